"""Sequences: parity, nested brackets, sorting, modules by their bytes, radio, changing spread, a first symbol kept."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from fastguard.commands.demo.text import library_text

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import LARGE, OUTPUT_OR_LOSS, TINY, either
from ..fresh4 import case as f
from ..fresh5.case import BLIND, MASKLESS, summing
from ..loop import Plan, Tensors
from ..nets import Attending, Recurrent, mlp
from ..qualities import accuracy, bits, sign_accuracy
from ..wild.case import dice_of
from . import case as g

MADE: list[Case] = []
task = f.planning(MADE, __name__)


@functools.cache
def _parity() -> data.Split:
    dice = dice_of(1420)
    x = torch.randint(0, 2, (5000, 16), generator=dice)
    return data.parted(x.float() * 2.0 - 1.0, x[:, :4].sum(1) % 2, 0.85)


@task(
    0.9,
    ("lr-3e-5", c.putting(lr=3e-5), c.LOW),
    ("without-bends", a.model_is(lambda: nn.Sequential(nn.Linear(16, 128), nn.Linear(128, 1))), c.CANNOT),
    ("sign-of-others", c.shuffled, c.LABELS),
    (
        "first-layer-frozen-and-small",
        f.all_of(g.frozen("0"), a.weights(lambda m: [p.mul_(0.01) for p in m[0].parameters()])),
        either(g.FIXED, a.POOR),
    ),
    momentum=c.putting(optimizer=o.MOMENTUM, lr=0.1, num_epochs=30),
)
def parity_of_four(seed: int) -> Plan:
    """Whether four of sixteen signs multiply to one: long at chance, then a fall; AdamW; accuracy."""
    return a.task(
        seed, lambda: mlp((16, 128, 1)), f.binary, _parity(), sign_accuracy(), optimizer=o.ADAMW, lr=3e-3,
        num_epochs=16, batch_size=64,
    )  # fmt: skip


@functools.cache
def _nested() -> data.Split:
    """Brackets of two kinds, half of them with one bracket of the wrong kind or side."""
    dice, rows, labels = dice_of(1421), [], []
    for number in range(1600):
        stack, row = [], []
        for place in range(14):
            must, may = len(stack) == 14 - place, len(stack) > 0
            if must or (may and torch.rand((), generator=dice) < 0.5):
                row.append(stack.pop() + 2)
            else:
                stack.append(int(torch.randint(0, 2, (), generator=dice)))
                row.append(stack[-1])
        if number % 2:
            at = int(torch.randint(0, 14, (), generator=dice))
            row[at] = row[at] ^ 1
        rows.append(row)
        labels.append(number % 2)
    return data.parted(torch.tensor(rows), torch.tensor(labels), 0.8)


def _first_half(plan: Plan) -> None:
    plan.train = (plan.train[0][:, :7], plan.train[1])


@task(
    0.85,
    ("first-half-in-training", _first_half, either(a.DIFFERS, BLIND)),
    ("lr-1", c.putting(lr=1.0), c.HIGH),
    ("lr-5e-6", c.putting(lr=5e-6), c.LOW),
    ("not-cleared", c.putting(zero_grad=False), c.KEPT),
    ("all-zero", a.weights(g.all_zero), a.POOR),
    gru=f.all_of(a.model_is(lambda: Recurrent(nn.GRU, 4, 2, 40, everywhere=False)), c.putting(num_epochs=10)),
)  # fmt: skip
def nested(seed: int) -> Plan:
    """Whether brackets of two kinds match, LSTM both ways, Adam; accuracy."""
    return a.task(
        seed, lambda: Recurrent(nn.LSTM, 4, 2, 40, everywhere=False, both_ways=True), c.cross_entropy, _nested(),
        accuracy, lr=8e-3, num_epochs=10, max_norm=5.0,
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
    ("looks-ahead", a.model_is(lambda: Sorter(is_causal=False)), MASKLESS),
    (
        "said-not-moved",
        lambda plan: vars(plan).update(train=(torch.cat([plan.train[0][:, :6], plan.train[1]], 1), plan.train[1])),
        either(c.LEAK, a.DIFFERS),
    ),
    (
        "given-of-others",
        lambda plan: vars(plan).update(
            train=(torch.cat([plan.train[0][:, :6].roll(1, 0), plan.train[0][:, 6:]], 1), plan.train[1])
        ),
        either(c.LABELS, a.DIFFERS),
    ),
    ("lr-0.3", c.putting(lr=0.3, schedule=None), c.HIGH),
    ("softmax-before", f.ending_in(nn.Softmax(-1)), OUTPUT_OR_LOSS),
    summed_up=f.all_of(summing(2), c.putting(batch_size=16, schedule=None)),
)
def sorting(seed: int) -> Plan:
    """Six numbers sorted by an encoder and a decoder, AdamW, warm-up; numbers right when it says them by itself."""
    return a.task(
        seed, Sorter, c.cross_entropy, _unsorted(), _sorted_alone, optimizer=o.ADAMW, lr=4e-3, num_epochs=8,
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
    ("too-slow-for-rare-ones", c.putting(optimizer=o.SGD, lr=1e-3), c.LOW),
    (
        "one-label-for-most",
        f.targets_as(lambda y: torch.where(torch.rand(len(y)) < 0.92, 0, y)),
        either(c.LABELS, a.UNEVEN),
    ),
    ("table-frozen", g.frozen("0"), g.FIXED),
    ("fifty-rows", f.all_of(f.first_rows(50), c.putting(num_epochs=120)), g.FEW),
    adam=c.putting(optimizer=o.ADAM, lr=1e-2),
)
def modules(seed: int) -> Plan:
    """From which part of Python's library sixty bytes are, a bag of rare trigrams, Adagrad, validated; accuracy."""
    return a.task(
        seed, _bag, c.cross_entropy, _modules(), accuracy, optimizer=o.ADAGRAD, lr=0.15, num_epochs=8, **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _radio() -> data.Split:
    dice = dice_of(1424)
    kind = torch.randint(0, 4, (1500,), generator=dice)
    symbols = torch.randint(0, 8, (1500, 24), generator=dice)
    phase = torch.stack([symbols % 2 * math.pi, symbols % 4 * math.pi / 2, symbols * math.pi / 4, 0.0 * symbols], 0)
    size = torch.where(kind[:, None] == 3, 0.4 + 0.4 * (symbols % 4), torch.ones(1500, 24))
    angle = phase[kind, torch.arange(1500)] + 6.28 * torch.rand(1500, 1, generator=dice)
    x = size[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return data.parted(x + 0.35 * torch.randn(x.shape, generator=dice), kind)


def _receiver(width: int = 24, kind: type[nn.Module] = nn.ReLU) -> nn.Module:
    conv = lambda low, size: [nn.Conv1d(low, width, size, padding=size // 2), nn.BatchNorm1d(width), kind()]  # noqa: E731
    return nn.Sequential(
        *conv(2, 1), *conv(width, 3), *conv(width, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 4)
    )


@task(
    0.7,
    ("lr-30", c.putting(lr=30.0), c.HIGH),
    (
        "summed-and-weighed-by-60",
        c.loss_is(lambda _, m, b: 60.0 * F.cross_entropy(m(b[0]), b[1], reduction="sum")),
        a.SUMMED,
    ),
    ("answers-minus", c.loss_is(lambda former, m, b: -0.2 * former(m, b)), c.LOSS),
    ("thrice-as-loud-later", f.inputs_later(lambda x: 3.0 * x), a.DIFFERS),
    ("in-order", f.all_of(c.in_order, c.putting(num_epochs=4)), either(c.SORTED, a.STATISTICS)),
    nesterov_small_batches=c.putting(optimizer=o.NESTEROV, batch_size=8, lr=0.01),
)
def radio(seed: int) -> Plan:
    """Which of four modulations a noisy signal has, a loss that stays high, convolutions, momentum; accuracy."""
    return a.task(
        seed, _receiver, c.cross_entropy, _radio(), accuracy, optimizer=o.MOMENTUM, lr=0.05, num_epochs=10,
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
    ("root-of-what-may-be-below-nought", c.loss_is(_by_root), g.NAN_INSIDE),
    ("error-without-its-spread", c.loss_is(lambda _, m, b: (b[1][:, 0] - m(b[0])[:, 0]).square().mean()), c.LOSS),
    ("in-basis-points", c.scaled_inputs(1000.0), f.INPUTS),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("lr-2", c.putting(lr=2.0), either(c.HIGH, c.EXPLODING)),
    ("days-turned", lambda plan: vars(plan).update(train=(plan.train[0].flip(1), plan.train[1])), a.DIFFERS),
    clipped_rmsprop=c.putting(optimizer=o.RMSPROP, lr=3e-3, max_norm=0.5),
)
def returns(seed: int) -> Plan:
    """How far a share moves tomorrow, likelihood of heavy tails with a high floor, GRU, Adam; R² of log-spread."""
    return a.task(
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
    ("recurrent-weights-of-three", a.model_is(lambda: _plain_recurrent(4.0)), LARGE),
    ("recurrent-weights-of-a-third", a.model_is(lambda: _plain_recurrent(0.2)), either(a.VANISHING, TINY)),
    ("relu-grown", a.model_is(lambda: _plain_recurrent(2.5, "relu")), LARGE),
    ("first-cut-off", lambda plan: vars(plan).update(train=(plan.train[0][:, 5:], plan.train[1])), BLIND),
    ("rate-grows", c.putting(schedule=lambda n: lambda t: 1.0 + 40.0 * t / n), c.GROWING),
    rmsprop=c.putting(optimizer=o.RMSPROP, lr=1e-3),
)
def first_kept(seed: int) -> Plan:
    """The first of twenty symbols said at the end, a plain recurrent network from orthogonal weights; accuracy."""
    return a.task(
        seed, _plain_recurrent, c.cross_entropy, _first(), accuracy, lr=1e-3, num_epochs=9, max_norm=1.0,
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


def _tied_to_nothing(model: nn.Module) -> None:
    model.head.weight = model.embed.weight = nn.Parameter(torch.zeros(12, 32))
    model.head.bias.zero_()


def _with_padding(plan: Plan) -> None:
    y = plan.train[1].clone()
    y[:, 3:] = 0
    plan.train = (plan.train[0], y)


@task(
    0.2,
    ("padding-in-the-loss", _with_padding, either(c.LABELS, c.LEAK, c.LOSS, a.UNEVEN)),
    ("lr-0.5", c.putting(lr=0.5, schedule=None), c.HIGH),
    ("scheduler-not-stepped", c.putting(play=g.schedule_forgotten), g.NOT_STEPPED),
    ("weights-put-back", g.put_back(7), c.OVERWRITTEN),
    ("decay-120", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=120.0)), c.DECAY),
    ("beta-of-0.9995", c.putting(optimizer=o.of(torch.optim.Adam, betas=(0.9995, 0.999))), c.SETTINGS),
    nadam=c.putting(optimizer=o.NADAM, lr=2e-3),
)
def partly_random_chains(seed: int) -> Plan:
    """The next symbol of chains a fifth of which is chance, small GPT, AdamW, one cycle; share of bits saved."""
    return a.task(
        seed, _gpt, c.cross_entropy, _chains(), _share_of_bits, optimizer=o.two_groups, lr=6e-3, num_epochs=7,
        schedule=o.one_cycle,
    )  # fmt: skip


CASES = g.renamed(MADE)
