"""Sequences: parity, sorting, modules by their bytes, changing spread, a first symbol kept, chains."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn

from fastguard.commands.demo.text import library_text

from .. import data
from .. import operators as f
from .. import optimizers as o
from .. import truths as t
from ..case import Case
from ..data import dice_of
from ..loop import Plan, Tensors
from ..nets import Attending, Recurrent, mlp
from ..qualities import accuracy, bits, sign_accuracy

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
def _modules() -> data.Split:
    """Trigrams, hashed, of 60 bytes from one of five parts of the library; targets: which part."""
    dice, whole = dice_of(1423), torch.frombuffer(bytearray(library_text(200_000)), dtype=torch.uint8).long()
    kind = torch.randint(0, 5, (1500,), generator=dice)
    start = kind * 40_000 + torch.randint(0, 39_900, (1500,), generator=dice)
    bytes_ = whole[start[:, None] + torch.arange(62)]
    grams = (bytes_[:, :-2] * 961 + bytes_[:, 1:-1] * 31 + bytes_[:, 2:]) % 4096
    return data.parted(grams, kind)


def _bag(width: int = 24) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(4096, width, mode="mean"), nn.Linear(width, 5))


@task(
    0.6,
    ("too-slow-for-rare-ones", f.putting(optimizer=o.SGD, lr=1e-3), t.LOW),
    (
        "one-label-for-most",
        f.targets_as(lambda y: torch.where(torch.rand(len(y)) < 0.92, 0, y)),
        t.either(t.LABELS, t.UNEVEN),
    ),
    ("table-frozen", f.frozen("0"), t.FIXED),
    ("fifty-rows", f.all_of(f.first_rows(50), f.putting(num_epochs=120)), t.FEW),
    adam=f.putting(optimizer=o.ADAM, lr=1e-2),
)
def modules(seed: int) -> Plan:
    """From which part of Python's library sixty bytes are, a bag of rare trigrams, Adagrad, validated; accuracy."""
    return f.planned(
        seed, _bag, f.cross_entropy, _modules(), accuracy, optimizer=o.ADAGRAD, lr=0.15, num_epochs=8, **f.VALIDATED,
    )  # fmt: skip


@functools.cache
def _returns() -> data.Split:
    dice = dice_of(1425)
    spread, x = torch.ones(1400), torch.zeros(1400, 17)
    spreads = torch.zeros(1400, 17)
    for day in range(17):
        spreads[:, day] = spread
        x[:, day] = spread.sqrt() * torch.randn(1400, generator=dice)
        spread = 0.05 + 0.75 * x[:, day].square() * (1.0 + 0.5 * (x[:, day] < 0)) + 0.15 * spread
        spread = spread.clamp(max=40.0)
    return data.parted(x[:, :-1, None], torch.stack([x[:, -1], spreads[:, -1]], 1))


def _normal(model: nn.Module, batch: Tensors) -> torch.Tensor:
    log, y = model(batch[0])[:, 0], batch[1][:, 0]
    return 0.5 * (log + y.square() * (-log).exp()).mean()


def _by_root(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    spread = model(batch[0])[:, 0] - 0.5
    return (spread.sqrt().log() + 0.5 * batch[1][:, 0].square() / spread).mean()


@torch.no_grad()
def _of_spread(model: nn.Module, held: Tensors) -> float:
    log, wanted = model(held[0])[:, 0], held[1][:, 1].log()
    return 1.0 - float((log - wanted).square().mean() / wanted.var())


@task(
    0.4,
    ("root-of-what-may-be-below-nought", f.loss_is(_by_root), t.NAN_INSIDE),
    ("error-without-its-spread", f.loss_is(lambda _, m, b: (b[1][:, 0] - m(b[0])[:, 0]).square().mean()), t.LOSS),
    ("in-basis-points", f.scaled_inputs(1000.0), t.UNSCALED),
    ("lr-1e-6", f.putting(lr=1e-6), t.LOW),
    ("lr-2", f.putting(lr=2.0), t.either(t.HIGH, t.EXPLODING)),
    ("days-turned", lambda plan: vars(plan).update(train=(plan.train[0].flip(1), plan.train[1])), t.DIFFERS),
    clipped_rmsprop=f.putting(optimizer=o.RMSPROP, lr=3e-3, max_norm=0.5),
)
def returns(seed: int) -> Plan:
    """How far a share moves tomorrow, likelihood of heavy tails with a high floor, GRU, Adam; R² of log-spread."""
    return f.planned(
        seed, lambda: Recurrent(nn.GRU, 1, 1, 24, is_symbolic=False, everywhere=False), _normal, _returns(), _of_spread,
        lr=5e-3, num_epochs=14, batch_size=40, max_norm=5.0,
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
