"""Sequences and likelihoods: parity, sorting, a first symbol kept, chains, codes of digits, a spiral, pumps."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import operators as f
from .. import optimizers as o
from .. import truths as t
from ..case import Case
from ..data import dice_of
from ..loop import Plan, Tensors
from ..nets import Attending, Recurrent, mlp
from ..qualities import accuracy, bits, reconstruction, sign_accuracy

CASES: list[Case] = []
task = f.planning(CASES, __name__)


@functools.cache
def _parity() -> data.Split:
    dice = dice_of(1420)
    x = torch.randint(0, 2, (5000, 16), generator=dice)
    return data.parted(x.float() * 2.0 - 1.0, x[:, :4].sum(1) % 2, 0.85)


@task(
    0.9,
    ("lr-3e-5", f.putting(lr=3e-5), t.LOW),
    ("without-bends", f.model_is(lambda: nn.Sequential(nn.Linear(16, 128), nn.Linear(128, 1))), t.CANNOT),
    ("sign-of-others", f.shuffled, t.LABELS),
    (
        "first-layer-frozen-and-small",
        f.all_of(f.frozen("0"), f.weights(lambda m: [p.mul_(0.01) for p in m[0].parameters()])),
        t.either(t.FIXED, t.POOR),
    ),
    momentum=f.putting(optimizer=o.MOMENTUM, lr=0.1, num_epochs=30),
)
def parity_of_four(seed: int) -> Plan:
    """Whether four of sixteen signs multiply to one: long at chance, then a fall; AdamW; accuracy."""
    return f.planned(
        seed, lambda: mlp((16, 128, 1)), f.binary, _parity(), sign_accuracy(), optimizer=o.ADAMW, lr=3e-3,
        num_epochs=16, batch_size=64,
    )  # fmt: skip


class Sorter(nn.Module):
    """Numbers [B, 6] beside what was said of them so far, one encoder and one decoder layer."""

    def __init__(self, width: int = 32, is_causal: bool = True, has_places: bool = True) -> None:
        super().__init__()
        self.read, self.said = nn.Embedding(10, width), nn.Embedding(11, width)
        self.places = nn.Parameter(0.3 * torch.randn(6, width)) if has_places else 0.0
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoderLayer(width, 4, 64, **options)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 64, **options)
        self.head, self.is_causal = nn.Linear(width, 10), is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, said = x[:, :6], x[:, 6:]
        mask = torch.full((6, 6), -math.inf).triu(1) if self.is_causal else None
        return self.head(self.decoder(self.said(said) + self.places, self.encoder(self.read(given)), tgt_mask=mask))


def _with_start(given: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    return torch.cat([given, torch.full_like(said[:, :1], 10), said[:, :-1]], 1)


@functools.cache
def _unsorted() -> data.Split:
    given = torch.randint(0, 10, (1600, 6), generator=dice_of(1422))
    said = given.sort(1).values
    return data.parted(_with_start(given, said), said, 0.9)


@torch.no_grad()
def _sorted_alone(model: nn.Module, held: Tensors) -> float:
    said = torch.zeros_like(held[1])
    for place in range(6):
        said[:, place] = model(_with_start(held[0][:, :6], said))[:, place].argmax(1)
    return float((said == held[1]).float().mean())


@task(
    0.85,
    ("looks-ahead", f.model_is(lambda: Sorter(is_causal=False)), t.MASKLESS),
    (
        "said-not-moved",
        lambda plan: vars(plan).update(train=(torch.cat([plan.train[0][:, :6], plan.train[1]], 1), plan.train[1])),
        t.either(t.LEAK, t.DIFFERS),
    ),
    (
        "given-of-others",
        lambda plan: vars(plan).update(
            train=(torch.cat([plan.train[0][:, :6].roll(1, 0), plan.train[0][:, 6:]], 1), plan.train[1])
        ),
        t.either(t.LABELS, t.DIFFERS),
    ),
    ("lr-0.3", f.putting(lr=0.3, schedule=None), t.HIGH),
    ("softmax-before", f.ending_in(nn.Softmax(-1)), t.OUTPUT_OR_LOSS),
    summed_up=f.all_of(f.summing(2), f.putting(batch_size=16, schedule=None)),
)
def sorting(seed: int) -> Plan:
    """Six numbers sorted by an encoder and a decoder, AdamW, warm-up; numbers right when it says them by itself."""
    return f.planned(
        seed, Sorter, f.cross_entropy, _unsorted(), _sorted_alone, optimizer=o.ADAMW, lr=4e-3, num_epochs=8,
        schedule=o.warm_cosine,
    )  # fmt: skip


@functools.cache
def _first() -> data.Split:
    x = torch.randint(0, 6, (1500, 20), generator=dice_of(1426))
    return data.parted(x, x[:, 0], 0.8)


def _plain_recurrent(scale: float = 1.0, kind: str = "tanh") -> nn.Module:
    model = Recurrent(functools.partial(nn.RNN, nonlinearity=kind), 6, 6, 48, everywhere=False)
    nn.init.orthogonal_(model.recurrent.weight_hh_l0, scale)
    return model


@task(
    0.85,
    ("recurrent-weights-of-three", f.model_is(lambda: _plain_recurrent(4.0)), t.LARGE),
    ("recurrent-weights-of-a-third", f.model_is(lambda: _plain_recurrent(0.2)), t.either(t.VANISHING, t.TINY)),
    ("relu-grown", f.model_is(lambda: _plain_recurrent(2.5, "relu")), t.LARGE),
    ("first-cut-off", lambda plan: vars(plan).update(train=(plan.train[0][:, 5:], plan.train[1])), t.BLIND),
    ("rate-grows", f.putting(schedule=lambda n: lambda t: 1.0 + 40.0 * t / n), t.GROWING),
    rmsprop=f.putting(optimizer=o.RMSPROP, lr=1e-3),
)
def first_kept(seed: int) -> Plan:
    """The first of twenty symbols said at the end, a plain recurrent network from orthogonal weights; accuracy."""
    return f.planned(
        seed, _plain_recurrent, f.cross_entropy, _first(), accuracy, lr=1e-3, num_epochs=9, max_norm=1.0,
    )  # fmt: skip


@functools.cache
def _chains() -> data.Split:
    """Symbols whose next one hangs on the last two, eight times in ten."""
    dice = dice_of(1427)
    rule = torch.randint(0, 12, (12, 12), generator=dice)
    x = torch.randint(0, 12, (1600, 17), generator=dice)
    for place in range(2, 17):
        keeps = torch.rand(1600, generator=dice) < 0.8
        x[:, place] = torch.where(keeps, rule[x[:, place - 2], x[:, place - 1]], x[:, place])
    return data.parted(x[:, :-1], x[:, 1:], 0.85)


def _gpt(**options) -> nn.Module:
    return Attending(12, 12, 16, is_causal=True, **options)


def _share_of_bits(model: nn.Module, held: Tensors) -> float:
    return 1.0 + bits(model, held) / 3.585


def _with_padding(plan: Plan) -> None:
    y = plan.train[1].clone()
    y[:, 3:] = 0
    plan.train = (plan.train[0], y)


@task(
    0.2,
    ("padding-in-the-loss", _with_padding, t.either(t.LABELS, t.LEAK, t.LOSS, t.UNEVEN)),
    ("lr-0.5", f.putting(lr=0.5, schedule=None), t.HIGH),
    ("scheduler-not-stepped", f.putting(play=f.schedule_forgotten), t.NOT_STEPPED),
    ("weights-put-back", f.put_back(7), t.OVERWRITTEN),
    ("decay-120", f.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=120.0)), t.DECAY),
    ("beta-of-0.9995", f.putting(optimizer=o.of(torch.optim.Adam, betas=(0.9995, 0.999))), t.SETTINGS),
    nadam=f.putting(optimizer=o.NADAM, lr=2e-3),
)
def partly_random_chains(seed: int) -> Plan:
    """The next symbol of chains a fifth of which is chance, small GPT, AdamW, one cycle; share of bits saved."""
    return f.planned(
        seed, _gpt, f.cross_entropy, _chains(), _share_of_bits, optimizer=o.two_groups, lr=6e-3, num_epochs=7,
        schedule=o.one_cycle,
    )  # fmt: skip


class Codes(nn.Module):
    """Pixels [B, 64] through six normal numbers; in training with noise."""

    def __init__(self, last: nn.Module | None = None, kind: type[nn.Module] = nn.ELU) -> None:
        super().__init__()
        self.into, self.out = mlp((64, 96, 12), kind), mlp((6, 96, 64), kind)
        self.last = last or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.out(self.into(x).chunk(2, 1)[0])).sigmoid()


def _bound(model: nn.Module, batch: Tensors, weight: float = 1.0, per: str = "sample", kind: str = "") -> torch.Tensor:
    mean, log = model.into(batch[0]).chunk(2, 1)
    spread = log.sqrt() if kind == "root" else (0.5 * log).exp()
    z = mean + spread * torch.randn_like(mean)
    logits = model.last(model.out(z))
    seen = F.binary_cross_entropy_with_logits(logits, batch[0], reduction="none").sum(1)
    far = 0.5 * (mean.square() + log.exp() - 1.0 - log).sum(1)
    return (seen.mean() if per == "sample" else seen.mean() / 64.0) + weight * far.mean()


@task(
    0.45,
    (
        "pixels-averaged-codes-summed",
        f.loss_is(lambda _, m, b: _bound(m, b, per="pixel")),
        t.either(t.LOSS, t.COLLAPSED),
    ),
    ("sigmoid-within", f.model_is(lambda: Codes(nn.Sigmoid())), t.either(t.OUTPUT, t.LOSS)),
    ("root-of-a-logarithm", f.loss_is(lambda _, m, b: _bound(m, b, kind="root")), t.NAN_INSIDE),
    ("grey-values-of-255", f.scaled_inputs(255.0), t.UNSCALED),
    ("lr-1", f.putting(lr=1.0), t.either(t.HIGH, t.EXPLODING)),
    ("lr-1e-6", f.putting(lr=1e-6), t.LOW),
    warmed=f.putting(schedule=o.warm_cosine, lr=8e-3, optimizer=o.ADAMW),
)
def coded_digits(seed: int) -> Plan:
    """Digits through six noisy numbers, a bound of likelihood with a high floor, Adam clipped; R² without noise."""
    (x, y), (held, known) = data.pixels()
    return f.planned(
        seed, Codes, _bound, ((x, y), (held, known)), reconstruction, lr=4e-3, num_epochs=9, max_norm=20.0,
        batch_size=48,
    )  # fmt: skip


_LEVELS = 24
_KEEPS = (1.0 - torch.linspace(0.01, 0.35, _LEVELS)).cumprod(0)


@functools.cache
def _spiral() -> data.Split:
    dice = dice_of(1452)
    t = torch.rand(2400, generator=dice).sqrt() * 9.0 + 2.0
    x = torch.stack([t.cos(), t.sin()], 1) * t[:, None] / 7.0 + 0.04 * torch.randn(2400, 2, generator=dice)
    return data.parted(x, torch.zeros(2400))


class Denoiser(nn.Module):
    """The noise in a place at a level."""

    def __init__(self, sees_level: bool = True) -> None:
        super().__init__()
        self.body, self.sees_level = mlp((8, 96, 96, 2), nn.SiLU), sees_level

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        t = level.float()[:, None] / _LEVELS * float(self.sees_level)
        waves = torch.cat([t, (3.0 * t).sin(), (3.0 * t).cos(), (9.0 * t).sin(), (9.0 * t).cos(), t * t], 1)
        return self.body(torch.cat([x, waves], 1))


def _noise_told(model: nn.Module, batch: Tensors, kind: str = "") -> torch.Tensor:
    x = batch[0]
    level, noise = torch.randint(0, _LEVELS, (len(x),)), torch.randn_like(x)
    keep = _KEEPS[level][:, None]
    if kind == "no-roots":
        mixed = keep * x + (1.0 - keep) * noise
    elif kind == "other-noise":
        mixed, noise = keep.sqrt() * x + (1.0 - keep).sqrt() * noise, torch.randn_like(x)
    elif kind == "place-wanted":
        mixed, noise = keep.sqrt() * x + (1.0 - keep).sqrt() * noise, x
    else:
        mixed = keep.sqrt() * x + (1.0 - keep).sqrt() * noise
    return F.mse_loss(model(mixed, level), noise)


@torch.no_grad()
def _like_it(model: nn.Module, held: Tensors) -> float:
    """1 - energy distance of 500 drawn places to what is held out, over that of a normal cloud."""
    dice = dice_of(1453)
    here, cloud = torch.randn(2, 500, 2, generator=dice)
    share = torch.cat([_KEEPS[:1], _KEEPS[1:] / _KEEPS[:-1]])
    for level in reversed(range(_LEVELS)):
        told = model(here, torch.full((500,), level))
        here = (here - (1.0 - share[level]) / (1.0 - _KEEPS[level]).sqrt() * told) / share[level].sqrt()
        if level:
            here = here + (1.0 - share[level]).sqrt() * torch.randn(here.shape, generator=dice)
    far = lambda p, q: torch.cdist(p, q).mean()  # noqa: E731
    distance = lambda p: 2.0 * far(p, held[0]) - far(p, p) - far(held[0], held[0])  # noqa: E731
    return 1.0 - float(distance(here) / distance(cloud)) if bool(here.isfinite().all()) else -1.0


@task(
    0.5,
    ("roots-forgotten", f.loss_is(lambda _, m, b: _noise_told(m, b, "no-roots")), t.either(t.DIFFERS, t.LOSS)),
    ("noise-drawn-again", f.loss_is(lambda _, m, b: _noise_told(m, b, "other-noise")), t.LABELS),
    (
        "place-wanted-noise-taken",
        f.loss_is(lambda _, m, b: _noise_told(m, b, "place-wanted")),
        t.either(t.LABELS, t.LOSS, t.DIFFERS),
    ),
    ("level-not-seen", f.model_is(lambda: Denoiser(False)), t.either(t.CANNOT, t.BLIND)),
    ("lr-1", f.putting(lr=1.0), t.HIGH),
    averaged=f.putting(optimizer=o.of(torch.optim.AdamW, betas=(0.9, 0.95)), schedule=o.linear_decay, lr=6e-3),
)
def spiral_from_noise(seed: int) -> Plan:
    """A spiral drawn out of noise in 24 levels, a loss whose floor is most of it, Adam; energy distance saved."""
    return f.planned(
        seed, Denoiser, _noise_told, _spiral(), _like_it, lr=4e-3, num_epochs=24, batch_size=84,
    )  # fmt: skip


@functools.cache
def _pumps() -> data.Split:
    """Seven readings of a pump; how long it ran, whether it failed then, and the logarithm of its usual time."""
    dice = dice_of(1454)
    x = torch.randn(2000, 7, generator=dice)
    usual = 0.8 * x[:, 0] - 0.6 * x[:, 1].abs() + 0.5 * x[:, 2] * x[:, 3]
    time = usual.exp() * (-torch.rand(2000, generator=dice).clamp(min=1e-4).log()) ** 0.6
    ended = 2.5 * torch.rand(2000, generator=dice) + 0.05
    return data.parted(x, torch.stack([torch.minimum(time, ended), (time < ended).float(), usual], 1))


def _weibull(model: nn.Module, batch: Tensors, kind: str = "") -> torch.Tensor:
    log, shape = model(batch[0]).unbind(1)
    shape = F.softplus(shape + 1.0) + 0.05
    time, failed = batch[1][:, 0], batch[1][:, 1]
    if kind == "turned":
        failed = 1.0 - failed
    if kind == "whole-hours":
        time = time.floor()
    ratio = time.log() - log
    rate = failed * (shape.log() + shape * ratio - time.log())
    return -(rate - (0.0 if kind == "no-survivors" else (shape * ratio).exp())).mean()


@torch.no_grad()
def _usual(model: nn.Module, held: Tensors) -> float:
    return float(torch.corrcoef(torch.stack([model(held[0])[:, 0].nan_to_num(), held[1][:, 2]]))[0, 1].nan_to_num())


@task(
    0.75,
    ("who-failed-turned-over", f.loss_is(lambda _, m, b: _weibull(m, b, "turned")), t.either(t.LABELS, t.LOSS)),
    ("times-in-whole-hours", f.loss_is(lambda _, m, b: _weibull(m, b, "whole-hours")), t.either(t.SINGULAR, t.BATCH)),
    ("survival-left-out", f.loss_is(lambda _, m, b: _weibull(m, b, "no-survivors")), t.LOSS),
    ("readings-of-thousands", f.scaled_inputs(300.0, 1000.0), t.UNSCALED),
    ("lr-5", f.putting(lr=5.0), t.either(t.HIGH, t.EXPLODING)),
    ("a-column-infinite", f.nan_rows(0.3, math.inf), t.SPOILT_ROWS),
    momentum_clipped=f.putting(optimizer=o.MOMENTUM, lr=1e-2, max_norm=1.0, num_epochs=16),
)
def pumps(seed: int) -> Plan:
    """How long a pump lasts, a third still running, Weibull's likelihood, Adam; correlation with the true logarithm."""
    return f.planned(
        seed, lambda: mlp((7, 40, 40, 2), nn.SiLU), _weibull, _pumps(), _usual, lr=4e-3, num_epochs=9, batch_size=40,
        max_norm=10.0,
    )  # fmt: skip
