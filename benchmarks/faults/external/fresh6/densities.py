"""Likelihoods: codes of digits, an arm's two answers, a spiral out of noise, pumps, calls, gears."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import ASCENT, either
from ..fresh4 import case as f
from ..fresh5.case import BLIND
from ..loop import Plan, Tensors
from ..nets import mlp
from ..qualities import explained, reconstruction
from ..wild.case import dice_of
from . import case as g

MADE: list[Case] = []
task = f.planning(MADE, __name__)


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
    ("pixels-averaged-codes-summed", c.loss_is(lambda _, m, b: _bound(m, b, per="pixel")), either(c.LOSS, c.COLLAPSED)),
    ("sigmoid-within", a.model_is(lambda: Codes(nn.Sigmoid())), either(c.OUTPUT, c.LOSS)),
    ("root-of-a-logarithm", c.loss_is(lambda _, m, b: _bound(m, b, kind="root")), g.NAN_INSIDE),
    ("grey-values-of-255", c.scaled_inputs(255.0), f.INPUTS),
    ("lr-1", c.putting(lr=1.0), either(c.HIGH, c.EXPLODING)),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    warmed=c.putting(schedule=o.warm_cosine, lr=8e-3, optimizer=o.ADAMW),
)
def coded_digits(seed: int) -> Plan:
    """Digits through six noisy numbers, a bound of likelihood with a high floor, Adam clipped; R² without noise."""
    (x, y), (held, known) = data.pixels()
    return a.task(
        seed, Codes, _bound, ((x, y), (held, known)), reconstruction, lr=4e-3, num_epochs=9, max_norm=20.0,
        batch_size=48,
    )  # fmt: skip


@functools.cache
def _arm() -> data.Split:
    """Where an arm of two parts ends [B, 2], and its two angles, one of two pairs that get there."""
    dice = dice_of(1451)
    first, bend = torch.rand(2, 2200, generator=dice)
    first, bend = 1.5 * first, 0.5 + 2.0 * bend
    x = torch.stack([first.cos() + 0.8 * (first + bend).cos(), first.sin() + 0.8 * (first + bend).sin()], 1)
    other = torch.rand(2200, generator=dice) < 0.5
    turned = 2.0 * torch.atan2(x[:, 1], x[:, 0]) - first
    y = torch.stack([torch.where(other, turned, first), torch.where(other, -bend, bend)], 1)
    return data.parted(x, y)


def _mixture(model: nn.Module, batch: Tensors, axis: int = 1, floor: float = 0.02) -> torch.Tensor:
    out = model(batch[0]).view(-1, 3, 5)
    share, mean, log = out[..., 0].log_softmax(axis), out[..., 1:3], out[..., 3:]
    spread = floor + F.softplus(log) if floor else log.relu()
    fit = torch.distributions.Normal(mean, spread, validate_args=False).log_prob(batch[1][:, None]).sum(2)
    return -(share + fit).logsumexp(1).mean()


def _middle(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    told = model(batch[0]).view(-1, 3, 5)[..., 1:3]
    return F.mse_loss(told, batch[1][:, None].expand_as(told))


@torch.no_grad()
def _reaches(model: nn.Module, held: Tensors) -> float:
    out = model(held[0]).view(-1, 3, 5)
    best = out[torch.arange(len(out)), out[..., 0].argmax(1), 1:3]
    first, bend = best.unbind(1)
    end = torch.stack([first.cos() + 0.8 * (first + bend).cos(), first.sin() + 0.8 * (first + bend).sin()], 1)
    return explained(end.flatten(), held[0].flatten())


@task(
    0.8,
    ("spread-without-a-floor", c.loss_is(lambda _, m, b: _mixture(m, b, floor=0.0)), g.NAN_INSIDE),
    ("in-degrees-times-ten", c.scaled_targets(573.0), c.TARGETS),
    ("mean-of-both", c.loss_is(_middle), either(c.LOSS, c.CANNOT)),
    ("ends-of-other-arms", c.shuffled, c.LABELS),
    ("lr-0.5", c.putting(lr=0.5), either(c.HIGH, c.EXPLODING)),
    rmsprop=c.putting(optimizer=o.RMSPROP, lr=1e-3, num_epochs=12),
)
def arm(seed: int) -> Plan:
    """An arm's angles by where it shall end, a mixture of three for two answers, Adam clipped; R² of where it ends."""
    return a.task(
        seed, lambda: mlp((2, 64, 64, 15), nn.Tanh), _mixture, _arm(), _reaches, lr=4e-3, num_epochs=12, max_norm=5.0,
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
    ("roots-forgotten", c.loss_is(lambda _, m, b: _noise_told(m, b, "no-roots")), either(a.DIFFERS, c.LOSS)),
    ("noise-drawn-again", c.loss_is(lambda _, m, b: _noise_told(m, b, "other-noise")), c.LABELS),
    (
        "place-wanted-noise-taken",
        c.loss_is(lambda _, m, b: _noise_told(m, b, "place-wanted")),
        either(c.LABELS, c.LOSS, a.DIFFERS),
    ),
    ("level-not-seen", a.model_is(lambda: Denoiser(False)), either(c.CANNOT, BLIND)),
    ("lr-1", c.putting(lr=1.0), c.HIGH),
    averaged=c.putting(optimizer=o.of(torch.optim.AdamW, betas=(0.9, 0.95)), schedule=o.linear_decay, lr=6e-3),
)
def spiral_from_noise(seed: int) -> Plan:
    """A spiral drawn out of noise in 24 levels, a loss whose floor is most of it, Adam; energy distance saved."""
    return a.task(
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
    ("who-failed-turned-over", c.loss_is(lambda _, m, b: _weibull(m, b, "turned")), either(c.LABELS, c.LOSS)),
    ("times-in-whole-hours", c.loss_is(lambda _, m, b: _weibull(m, b, "whole-hours")), either(c.SINGULAR, c.BATCH)),
    ("survival-left-out", c.loss_is(lambda _, m, b: _weibull(m, b, "no-survivors")), c.LOSS),
    ("readings-of-thousands", c.scaled_inputs(300.0, 1000.0), f.INPUTS),
    ("lr-5", c.putting(lr=5.0), either(c.HIGH, c.EXPLODING)),
    ("a-column-infinite", g.nan_rows(0.3, math.inf), g.SPOILT_ROWS),
    momentum_clipped=c.putting(optimizer=o.MOMENTUM, lr=1e-2, max_norm=1.0, num_epochs=16),
)
def pumps(seed: int) -> Plan:
    """How long a pump lasts, a third still running, Weibull's likelihood, Adam; correlation with the true logarithm."""
    return a.task(
        seed, lambda: mlp((7, 40, 40, 2), nn.SiLU), _weibull, _pumps(), _usual, lr=4e-3, num_epochs=9, batch_size=40,
        max_norm=10.0,
    )  # fmt: skip


@functools.cache
def _calls() -> data.Split:
    """Hour and place of a call centre; calls, which scatter more than Poisson's would, and their true mean."""
    dice = dice_of(1455)
    hour, x = 6.28 * torch.rand(2200, generator=dice), torch.randn(2200, 4, generator=dice)
    mean = (1.2 + 0.8 * hour.sin() + 0.4 * x[:, 0] - 0.3 * x[:, 1] * x[:, 2]).exp()
    more = torch.distributions.Gamma(1.5, 1.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1455)
        calls = torch.poisson(mean * more.sample((2200,)))
    return data.parted(torch.cat([torch.stack([hour.sin(), hour.cos()], 1), x], 1), torch.stack([calls, mean], 1))


def _poisson(model: nn.Module, batch: Tensors, log: bool = True) -> torch.Tensor:
    return F.poisson_nll_loss(model(batch[0])[:, 0], batch[1][:, 0], log_input=log)


@torch.no_grad()
def _rates(model: nn.Module, held: Tensors) -> float:
    return explained(model(held[0])[:, 0], held[1][:, 1].log())


def _rows_down(plan: Plan) -> None:
    plan.train = (plan.train[0], plan.train[1].roll(1, 0))


@task(
    0.6,
    ("rate-for-its-logarithm", c.loss_is(lambda _, m, b: _poisson(m, b, False)), either(c.LOSS, c.OUTPUT, c.SINGULAR)),
    (
        "logarithm-of-no-calls",
        c.loss_is(lambda _, m, b: F.mse_loss(m(b[0])[:, 0], b[1][:, 0].log())),
        either(c.SINGULAR, c.BATCH),
    ),
    ("calls-of-the-next-hour", _rows_down, c.LABELS),
    ("hours-as-stamps", c.scaled_inputs(500.0, 20000.0), f.INPUTS),
    (
        "dropped-0.93",
        a.model_is(lambda: nn.Sequential(*mlp((6, 48, 48, 1), nn.SiLU, lambda _: nn.Dropout(0.93)))),
        c.DROPPED,
    ),
    ("clipped-at-1e-5", c.putting(max_norm=1e-5, optimizer=o.MOMENTUM, lr=1e-2), c.CLIPPED),
    sgd=c.putting(optimizer=o.MOMENTUM, lr=5e-3, max_norm=2.0),
)
def calls(seed: int) -> Plan:
    """How many calls come, Poisson's likelihood of what scatters more, AdamW, validated; R² of the logarithm."""
    return a.task(
        seed, lambda: mlp((6, 48, 48, 1), nn.SiLU), _poisson, _calls(), _rates, optimizer=o.ADAMW, lr=4e-3,
        num_epochs=8, batch_size=40, **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _gears() -> data.Split:
    """The hum of gears [B, 1, 48]: two tones and their overtones, in noise."""
    dice = dice_of(1456)
    time = torch.arange(48.0)
    rate, phase = 0.2 + 0.3 * torch.rand(2, 1400, 1, generator=dice), 6.28 * torch.rand(2, 1400, 1, generator=dice)
    size = torch.rand(2, 1400, 1, generator=dice) + 0.3
    x = (size * (rate * time + phase).sin() + 0.3 * size * (2.0 * rate * time + phase).sin()).sum(0)
    x = (x + 0.1 * torch.randn(x.shape, generator=dice))[:, None]
    return data.parted(x, x)


class Narrow(nn.Module):
    """Convolutions down to few numbers, and up again."""

    def __init__(self, size: int = 16, kind: type[nn.Module] = nn.GELU, depth: int = 1) -> None:
        super().__init__()
        more = [m for _ in range(depth - 1) for m in (nn.Linear(96, 96), kind())]
        self.down = nn.Sequential(
            nn.Conv1d(1, 12, 5, 2, 2), kind(), nn.Conv1d(12, 16, 5, 2, 2), kind(), nn.Flatten(),
            nn.Linear(192, 96), kind(), *more, nn.Linear(96, size),
        )  # fmt: skip
        self.up = nn.Sequential(nn.Linear(size, 96), kind(), nn.Linear(96, 48), nn.Unflatten(1, (1, 48)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))


@task(
    0.8,
    ("relu-at-the-end", f.ending_in(nn.ReLU()), c.OUTPUT),
    ("two-numbers", a.model_is(lambda: Narrow(1)), c.CANNOT),
    ("seven-sigmoids", a.model_is(lambda: Narrow(16, nn.Sigmoid, 7)), g.DEEP),
    ("way-up-frozen", f.all_of(g.frozen("up"), a.weights(lambda m: m.up[2].weight.mul_(0.01))), g.FIXED),
    ("pushed-away", c.loss_is(lambda _, m, b: -F.mse_loss(m(b[0]), b[1]).clamp(max=50.0)), ASCENT),
    ("model-made-anew", c.putting(play=g.made_anew), either(a.NO_GRADIENT, g.FIXED)),
    lion_like=c.putting(optimizer=o.SIGN, lr=8e-4),
)
def gears(seed: int) -> Plan:
    """The hum of gears through sixteen numbers, convolutions, NAdam; R²."""
    return a.task(
        seed, Narrow, c.squared_error, _gears(), reconstruction, optimizer=o.NADAM, lr=3e-3, num_epochs=9,
    )  # fmt: skip


CASES = g.renamed(MADE)
