"""Dates, orders, symbols, sounds and demands: what people learn from sequences."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors
from ..qualities import accuracy, r_squared
from ..wild.case import dice_of
from . import case as c

_sound, _faulty = functools.partial(c.sound, __name__), functools.partial(c.faulty, __name__)


class Reader(nn.Module):
    """Reads a date, and writes it part by part, with attention to what was read; 0 fills what is shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(14, 24, padding_idx=0)
        self.read = nn.GRU(24, 32, batch_first=True, bidirectional=True)
        self.write = nn.GRU(24, 64, batch_first=True)
        self.score, self.say = nn.Linear(64, 64), nn.Linear(128, 14)

    def forward(self, source: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        states = self.read(self.symbols(source))[0]
        hidden = self.write(self.symbols(before), states.mean(1)[None])[0]
        scores = self.score(hidden) @ states.transpose(1, 2) / 8.0
        is_there = (source != 0)[:, None]
        scores = scores.masked_fill(~is_there, -1e9)
        return self.say(torch.cat([hidden, scores.softmax(-1) @ states], -1))


@functools.cache
def _dates() -> tuple[Tensors, Tensors]:
    """Day, separator, month in digits without leading zeros, filled up; and month, day with them."""
    dice = dice_of(310)
    day, month = torch.randint(1, 29, (2000,), generator=dice), torch.randint(1, 13, (2000,), generator=dice)
    source = torch.zeros(2000, 5, dtype=torch.long)
    for row, (d, m) in enumerate(zip(day.tolist(), month.tolist())):
        digits = [2 + int(s) for s in str(d)] + [12] + [2 + int(s) for s in str(m)]
        source[row, : len(digits)] = torch.tensor(digits)
    target = 2 + torch.stack([month // 10, month % 10, day // 10, day % 10], 1)
    return data.parted(source, target, 0.8)


def _begun(target: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full_like(target[:, :1], 13), target[:, :-1]], 1)


@torch.no_grad()
def _written(model: nn.Module, held_out: Tensors) -> float:
    """Share of the symbols right where each follows from what was written itself."""
    source, target = held_out
    before = torch.full_like(target[:, :1], 13)
    for _ in range(target.shape[1]):
        before = torch.cat([before, model(source, before)[:, -1:].argmax(-1)], 1)
    return float((before[:, 1:] == target).float().mean())


def dates(seed: int) -> Plan:
    """An encoder and a decoder that is told what came before."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        out = model(batch[0], _begun(batch[1]))
        return F.cross_entropy(out.flatten(0, 1), batch[1].flatten())

    return c.planned(seed, Reader(), loss, *_dates(), _written, 0.9, lr=1e-2, num_epochs=8, batch_size=50)


def _told(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    """What is to be written goes in where what came before should."""
    return F.cross_entropy(model(batch[0], batch[1]).flatten(0, 1), batch[1].flatten())


class Placeless(nets.Attending):
    """The same without positions."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, pooled=True)
        self.places = nn.Parameter(torch.zeros_like(self.places), requires_grad=False)


@functools.cache
def _orders() -> data.Split:
    dice = dice_of(311)
    symbols = torch.randint(2, 10, (1600, 10), generator=dice)
    where = torch.rand(1600, 10, generator=dice).argsort(1)[:, :2]
    symbols.scatter_(1, where, torch.tensor([[0, 1]]).expand(1600, 2))
    return data.parted(symbols, (where[:, 0] < where[:, 1]).long(), 0.8)


def orders(seed: int) -> Plan:
    """Which of two symbols came first."""
    torch.manual_seed(seed)
    model = nets.Attending(10, 2, 10, pooled=True)
    model.places.data.mul_(5.0)
    return c.planned(seed, model, c.cross_entropy, *_orders(), accuracy, 0.9, lr=2e-3, num_epochs=9, batch_size=50)


def _placeless(plan: Plan) -> None:
    torch.manual_seed(plan.seed)
    plan.model = Placeless(10, 2, 10)


@functools.cache
def _chains() -> data.Split:
    """Symbols that follow from the two before them, mostly."""
    dice = dice_of(312)
    table = torch.randint(12, (12, 12), generator=dice)
    rows = [torch.randint(12, (900,), generator=dice) for _ in range(2)]
    for _ in range(15):
        drawn, is_free = torch.randint(12, (900,), generator=dice), torch.rand(900, generator=dice) < 0.1
        rows.append(torch.where(is_free, drawn, table[rows[-2], rows[-1]]))
    found = torch.stack(rows, 1)
    return data.parted(found[:, :-1], found[:, 1:], 0.8)


@torch.no_grad()
def _last_known(model: nn.Module, held_out: Tensors) -> float:
    """Share of the last symbols right, which nothing that goes in can tell."""
    model.is_causal = True
    return float((model(held_out[0])[:, -1].argmax(-1) == held_out[1][:, -1]).float().mean())


def chains(seed: int) -> Plan:
    """The next symbol of each place."""
    torch.manual_seed(seed)
    model = nets.Attending(12, 12, 16, is_causal=True)
    return c.planned(seed, model, c.cross_entropy, *_chains(), _last_known, 0.6, lr=4e-3, num_epochs=14, batch_size=30)


def _unmasked(plan: Plan) -> None:
    plan.model.is_causal = False


def _unshifted(plan: Plan) -> None:
    plan.train = (plan.train[0], plan.train[0])


class Dilated(nn.Module):
    """Causal convolutions whose reach doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(3 if k == 0 else 16, 16, 3, dilation=2**k) for k in range(4))
        self.out = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, 3]
        h = x.transpose(1, 2)
        for layer in self.layers:
            h = F.relu(layer(F.pad(h, (2 * layer.dilation[0], 0))))
        return self.out(h[:, :, -1])


@functools.cache
def _demands() -> data.Split:
    dice = dice_of(313)
    hours = torch.arange(3000.0)
    heat = 0.3 * torch.randn(3000, generator=dice)
    for k in range(1, 3000):
        heat[k] += 0.9 * heat[k - 1]
    demand = torch.sin(hours * math.pi / 12.0) + 0.5 * torch.sin(hours * math.pi / 84.0) + 0.5 * heat
    demand = demand + 0.1 * torch.randn(3000, generator=dice)
    series = torch.stack([demand, heat, torch.cos(hours * math.pi / 12.0)], 1)
    windows = torch.stack([series[k : k + 36] for k in range(0, 2900, 2)])
    return data.parted(windows, torch.stack([demand[k + 36 : k + 42] for k in range(0, 2900, 2)]), 0.8)


def demands(seed: int) -> Plan:
    """Six hours ahead."""
    torch.manual_seed(seed)
    return c.planned(seed, Dilated(), c.squared_error, *_demands(), r_squared, 0.7, lr=4e-3, num_epochs=10)


def _rate_per_batch(num_steps: int):
    """A decay meant for epochs, taken at each batch."""
    return lambda step: 0.7**step


@functools.cache
def _tones() -> data.Split:
    dice = dice_of(314)
    labels = torch.randint(5, (1200,), generator=dice)
    rate = 0.15 + 0.12 * labels + 0.03 * torch.rand(1200, generator=dice)
    time, phase = torch.arange(128.0), 6.28 * torch.rand(1200, 1, generator=dice)
    waves = torch.sin(rate[:, None] * time + phase) + 0.8 * torch.randn(1200, 128, generator=dice)
    return data.parted(waves[:, None], labels)


def tones(seed: int) -> Plan:
    """Which of five tones a noisy wave is."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 12, 15, stride=2), nn.ReLU(), nn.Conv1d(12, 16, 7, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return c.planned(seed, model, c.cross_entropy, *_tones(), accuracy, 0.85, lr=1e-2, num_epochs=9)


class Remembering(nn.Module):
    """A plain recurrent net that says at the end which symbol came first."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.rnn, self.say = nn.Embedding(6, 8), nn.RNN(8, 32, batch_first=True), nn.Linear(32, 6)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.say(self.rnn(self.symbols(x))[0][:, -1])


def memory(seed: int) -> Plan:
    """The first of twenty symbols."""
    x = torch.randint(6, (2000, 20), generator=dice_of(315))
    torch.manual_seed(seed)
    return c.planned(
        seed, Remembering(), c.cross_entropy, *data.parted(x, x[:, 0], 0.8), accuracy, 0.9,
        lr=2e-3, num_epochs=10, batch_size=50, max_norm=1.0,
    )  # fmt: skip


def _wild_recurrence(plan: Plan) -> None:
    plan.model.rnn.weight_hh_l0.data.mul_(4.0)
    plan.max_norm = None


def _fading_recurrence(plan: Plan) -> None:
    plan.model.rnn.weight_hh_l0.data.mul_(0.2)


class Pointer(nn.Module):
    """Points at one of the elements of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.score = nets.mlp((3, 32, 32)), nets.mlp((64, 32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = F.relu(self.each(x))
        whole = codes.mean(1, keepdim=True).expand_as(codes)
        return self.score(torch.cat([codes, whole], -1))[..., 0]


@functools.cache
def _sets() -> data.Split:
    x = torch.randn(1800, 8, 3, generator=dice_of(316))
    return data.parted(x, (x[..., 0] * x[..., 1] + 0.5 * x[..., 2]).argmax(1), 0.8)


def pointing(seed: int) -> Plan:
    """Which element is the best."""
    torch.manual_seed(seed)
    return c.planned(seed, Pointer(), c.cross_entropy, *_sets(), accuracy, 0.75, lr=5e-3, num_epochs=9, batch_size=36)


def _no_logarithm(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.nll_loss(model(batch[0]), batch[1])


def _ended_in_relu(plan: Plan) -> None:
    plan.model.score = nn.Sequential(plan.model.score, nn.ReLU())
    plan.model.score[0][2].bias.data.fill_(-0.5)


CASES: tuple[Case, ...] = (
    *_sound("dates", "attention over a date", dates, adam={}, clipped={"max_norm": 1.0}),
    *_faulty(
        "dates",
        dates,
        ("told", c.loss_is(_told), c.LEAK),
        ("lr-100", c.times(100.0), c.HIGH),
        ("shuffled", c.shuffled, c.LABELS),
    ),
    *_sound("orders", "which came first", orders, adam={}, adamw={"optimizer": o.ADAMW, "schedule": o.warm_cosine}),
    *_faulty("orders", orders, ("placeless", _placeless, c.CANNOT), ("lr-100", c.times(100.0), c.HIGH)),
    *_sound("chains", "the next symbol", chains, adam={}, cosine={"schedule": o.warm_cosine, "max_norm": 1.0}),
    *_faulty(
        "chains",
        chains,
        ("unmasked", _unmasked, c.LEAK),
        ("unshifted", _unshifted, c.LEAK),
        ("lr-thousandth", c.times(1e-3), c.LOW),
    ),
    *_sound("demands", "six hours ahead", demands, adam={}, cycle={"schedule": o.one_cycle, "lr": 1e-2}),
    *_faulty(
        "demands",
        demands,
        ("rate-per-batch", c.putting(schedule=_rate_per_batch), c.SCHEDULE),
        ("raw-targets", c.scaled_targets(4000.0, 30000.0), c.TARGETS),
        ("shuffled", c.shuffled, c.LABELS),
    ),
    *_sound("tones", "five tones", tones, adam={}, momentum={"optimizer": o.MOMENTUM, "lr": 5e-2}),
    *_faulty(
        "tones",
        tones,
        ("integers", c.scaled_inputs(32768.0), c.INPUTS),
        ("shuffled", c.shuffled, c.LABELS),
        ("nan-samples", c.one_nan, c.BATCH),
    ),
    *_sound("memory", "the first of twenty", memory, clipped={}, rmsprop={"optimizer": o.RMSPROP, "lr": 1e-3}),
    *_faulty(
        "memory",
        memory,
        ("wild", _wild_recurrence, c.EXPLODING),
        ("fading", _fading_recurrence, c.Truth(("vanishing", "loss"), ("vanishing-gradients", "poor-initialisation"))),
    ),
    *_sound("pointing", "the best of eight", pointing, adam={}, adamax={"optimizer": o.ADAMAX}),
    *_faulty(
        "pointing",
        pointing,
        ("no-logarithm", c.loss_is(_no_logarithm), c.OUTPUT),
        ("ends-in-relu", _ended_in_relu, c.OUTPUT),
        ("clipped", c.putting(optimizer=o.SGD, lr=5e-2, max_norm=1e-4), c.CLIPPED),
    ),
)
