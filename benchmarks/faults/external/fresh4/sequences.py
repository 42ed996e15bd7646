"""Sequences: reviews, loads, languages, tags, spoken words, beats, letters, translations, sales, sensors."""

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
from ..fresh3.case import CUT_OR_FROZEN, LARGE, NOISE, OUTPUT_OR_LOSS, TINY, either
from ..loop import Plan, Tensors
from ..nets import Attending, Recurrent
from ..qualities import accuracy, bits, r_squared, sign_accuracy
from ..wild.case import dice_of
from . import case as f

CASES: list[Case] = []
task = f.planning(CASES, __name__)


@functools.cache
def _reviews() -> data.Split:
    """Words of 60, of which ten praise and ten blame, and what follows a "not" counts the other way round."""
    dice = dice_of(1140)
    x = torch.randint(1, 60, (1800, 14), generator=dice)
    worth = (x < 11).float() - ((x > 10) & (x < 21)).float()
    turned = torch.cat([torch.zeros(1800, 1), (x[:, :-1] > 50).float()], 1)
    score = (worth * (1.0 - 2.0 * turned)).sum(1)
    kept = score != 0.0
    return data.parted(x[kept], (score[kept] > 0.0).long())


def _one_kind(plan: Plan) -> None:
    keep = (plan.train[1] == 1) | (torch.arange(len(plan.train[1])) % 40 == 0)
    plan.train = tuple(t[keep] for t in plan.train)


@task(
    0.72,
    ("lr-100", c.times(100.0), c.HIGH),
    ("mostly-praise", _one_kind, f.UNEVEN),
    ("other-reviews", c.shuffled, c.LABELS),
    ("softmax-over-batch", f.ending_in(nn.Softmax(0)), OUTPUT_OR_LOSS),
    lstm=a.model_is(lambda: Recurrent(nn.LSTM, 60, 1, 32, everywhere=False)),
    rmsprop=c.putting(optimizer=o.RMSPROP, lr=3e-3),
)
def reviews(seed: int) -> Plan:
    """Whether a review praises, by a GRU, Adam clipped at 1, validated; accuracy."""
    return a.task(
        seed, lambda: Recurrent(nn.GRU, 60, 1, 32, everywhere=False), f.binary, _reviews(), sign_accuracy(), lr=1e-2,
        num_epochs=8, max_norm=1.0, **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _megawatts() -> data.Split:
    """24 hours of a town's load in megawatts, and the next one."""
    dice = dice_of(1141)
    hour = torch.arange(1900.0)
    load = 400.0 + 120.0 * (hour * math.tau / 24).sin() + 60.0 * (hour * math.tau / 168).cos()
    drift = 0.0
    for i in range(1900):
        drift = 0.9 * drift + 12.0 * float(torch.randn((), generator=dice))
        load[i] += drift
    rows = load.unfold(0, 25, 1)
    return data.parted(rows[:, :-1, None], rows[:, -1:], 0.8)


@functools.cache
def _load() -> data.Split:
    (x, y), (held, known) = _megawatts()
    mean, std = x.mean(), x.std()
    return ((x - mean) / std, (y - mean) / std), ((held - mean) / std, (known - mean) / std)


def _in_megawatts(plan: Plan) -> None:
    plan.train, plan.held_out = _megawatts()


@task(
    0.75,
    ("in-megawatts", _in_megawatts, c.BOTH),
    ("sgd-rate", c.putting(optimizer=o.SGD, lr=20.0, max_norm=None), f.HIGH),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("another-hour", c.shuffled, c.LABELS),
    gru=a.model_is(lambda: Recurrent(nn.GRU, 1, 1, 24, is_symbolic=False, everywhere=False)),
)
def town_load(seed: int) -> Plan:
    """A town's load in the next hour, by an LSTM, Adam clipped at 1, validated; R²."""
    return a.task(
        seed, lambda: Recurrent(nn.LSTM, 1, 1, 24, is_symbolic=False, everywhere=False), c.squared_error, _load(),
        r_squared, lr=8e-3, num_epochs=7, max_norm=1.0, **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _languages() -> data.Split:
    """Strings of 24 letters from five Markov chains."""
    dice = dice_of(1142)
    chains = (1.6 * torch.randn(5, 20, 20, generator=dice)).softmax(2)
    y = torch.randint(0, 5, (1600,), generator=dice)
    rows = [torch.randint(0, 20, (1600,), generator=dice)]
    for _ in range(23):
        rows.append(torch.multinomial(chains[y, rows[-1]], 1, generator=dice)[:, 0])
    return data.parted(torch.stack(rows, 1), y)


class _Pairs(nn.Module):
    def __init__(self, drop: float = 0.1, width: int = 48, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.letters, self.pairs = nn.Embedding(20, 16), nn.Conv1d(16, width, 3)
        self.act, self.last = act(), nn.Sequential(nn.Dropout(drop), nn.Linear(width, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.pairs(self.letters(x).mT)).amax(2))


@task(
    0.8,
    ("dropout-0.98", a.model_is(lambda: _Pairs(0.98)), c.DROPPED),
    ("never-alive", a.weights(lambda m: m.pairs.bias.fill_(-60.0)), c.DEAD),
    ("one-by-one", f.all_of(f.first_rows(500), c.putting(batch_size=1, num_epochs=1, lr=0.1)), a.SMALL_BATCH),
    ("few-strings", f.all_of(f.first_rows(24), c.putting(num_epochs=200)), f.OVER),
    adamax=c.putting(optimizer=o.ADAMAX, lr=5e-3),
)
def languages(seed: int) -> Plan:
    """Which of five languages, by triples of letters and their maximum, AdamW; accuracy."""
    return a.task(seed, _Pairs, c.cross_entropy, _languages(), accuracy, optimizer=o.ADAMW, lr=4e-3, num_epochs=7)


@functools.cache
def _tagged() -> data.Split:
    """Words of 40, whose tag hangs on the word and on the tag before."""
    dice = dice_of(1143)
    x = torch.randint(0, 40, (1000, 12), generator=dice)
    table = torch.randint(0, 5, (40, 5), generator=dice)
    tag, tags = torch.zeros(1000, dtype=torch.long), []
    for i in range(12):
        tag = table[x[:, i], tag * (torch.arange(5)[tag] > 1)]
        tags.append(tag)
    return data.parted(x, torch.stack(tags, 1))


@task(
    0.8,
    ("one-place-off", f.targets_as(lambda y: y.roll(1, 1)), c.LABELS),
    ("embedding-left-out", c.putting(optimizer=lambda m, lr: torch.optim.Adam(m.head.parameters(), lr)), c.LEFT_OUT),
    ("rate-per-batch", c.putting(play=a.rate_each_batch), c.SCHEDULE),
    ("lr-1000", c.times(1000.0), c.HIGH),
    ("huge-start", f.scaled_weights(60.0), LARGE),
    one_way=a.model_is(lambda: Recurrent(nn.GRU, 40, 5, 48)),
)
def tags(seed: int) -> Plan:
    """A tag for each word, by an LSTM that reads both ways, Adam; accuracy of words."""
    return a.task(
        seed, lambda: Recurrent(nn.LSTM, 40, 5, 32, both_ways=True), c.cross_entropy, _tagged(), accuracy, lr=1.5e-2,
        num_epochs=12,
    )  # fmt: skip


@functools.cache
def _words() -> data.Split:
    """Loudness of 16 bands over 20 frames: two formants that glide, six words."""
    dice = dice_of(1144)
    y = torch.randint(0, 6, (1200,), generator=dice)
    starts, glides = 3.0 + 9.0 * torch.rand(6, 2, generator=dice), 6.0 * torch.rand(6, 2, generator=dice) - 3.0
    band, time = torch.arange(16.0)[None, :, None], torch.arange(20.0)[None, None] / 20.0
    loud = torch.zeros(1200, 16, 20)
    for i in range(2):
        voice = 0.7 * torch.randn(1200, 1, 1, generator=dice)
        at = starts[y, i, None, None] + voice + glides[y, i, None, None] * time
        loud += torch.exp(-0.7 * (band - at).square())
    return data.parted(loud * (0.5 + torch.rand(1200, 1, 1, generator=dice)) + 0.05, y)


def _logarithmic(split: data.Split) -> data.Split:
    dice = dice_of(1145)
    noisy = [(x + 0.1 * torch.rand(x.shape, generator=dice)).log() + 1.5 for x, _ in split]
    return (noisy[0], split[0][1]), (noisy[1], split[1][1])


class _Spoken(nn.Module):
    def __init__(self, drop: float = 0.2, takes_log: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(16, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(),
            nn.Dropout(drop), nn.Linear(64, 6),
        )  # fmt: skip
        self.takes_log = takes_log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.log() if self.takes_log else x)


def _logarithm_inside(plan: Plan) -> None:
    (x, y), (held, known) = _words()
    quiet = lambda t: (t - 0.05).clamp(min=0.0)  # noqa: E731
    plan.train, plan.held_out, plan.model = (quiet(x), y), (quiet(held), known), _Spoken(takes_log=True)


@task(
    0.85,
    ("not-logarithmic-later", f.inputs_later(lambda x: 2000.0 * (x - 1.5).exp() + 100.0), a.DIFFERS),
    ("log-of-silence", _logarithm_inside, c.SINGULAR),
    (
        "half-wrong",
        f.random_labels(0.85, 6),
        NOISE,
    ),
    ("lr-1e-7", c.putting(lr=1e-7), c.LOW),
    (
        "mean-of-zero",
        c.loss_is(lambda _, m, b: F.cross_entropy(m(b[0]), b[1]) * 0.0 + m(b[0]).square().mean()),
        either(c.LOSS, c.COLLAPSED),
    ),
    momentum=c.putting(optimizer=o.MOMENTUM, lr=5e-2),
)
def spoken_words(seed: int) -> Plan:
    """Six words by convolutions over time with batch norm, Adam, validated; accuracy."""
    return a.task(
        seed, _Spoken, c.cross_entropy, _logarithmic(_words()), accuracy, lr=3e-3, num_epochs=5, **a.VALIDATED
    )


@functools.cache
def _beats() -> data.Split:
    """Pulses of a heart in 60 samples: regular, early, wide, missing."""
    dice = dice_of(1146)
    y = torch.randint(0, 4, (1300,), generator=dice)
    time = torch.arange(60.0)
    x = torch.zeros(1300, 60)
    for i in range(4):
        at = 8.0 + 14.0 * i + torch.randn(1300, 1, generator=dice)
        at = at - 5.0 * ((y == 1) & (torch.tensor(i) == 2)).float()[:, None]
        wide = 1.0 + 1.5 * ((y == 2) & (torch.tensor(i) == 1)).float()[:, None]
        there = 1.0 - ((y == 3) & (torch.tensor(i) == 1)).float()[:, None]
        x += there * torch.exp(-0.5 * ((time - at) / wide).square())
    return data.parted((x + 0.15 * torch.randn(x.shape, generator=dice))[:, None], y)


def _beats_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(1, 16, 7, stride=2), nn.ReLU(), nn.Conv1d(16, 24, 5, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(24 * 12, 48), nn.ReLU(), nn.Linear(48, 4),
    )  # fmt: skip


@task(
    0.88,
    ("some-nan", c.one_nan, c.BATCH),
    ("tiny-start", f.scaled_weights(1e-4), TINY),
    (
        "relu-at-the-end",
        f.all_of(f.ending_in(nn.ReLU()), a.weights(lambda m: m[0][-1].bias.fill_(-3.0))),
        either(c.OUTPUT, c.DEAD),
    ),
    ("cleared-late", c.putting(play=a.cleared_late), a.NO_GRADIENT),
    ("decay", c.putting(optimizer=o.of(torch.optim.SGD, momentum=0.9, weight_decay=0.3)), c.DECAY),
    adam=c.putting(optimizer=o.ADAM, lr=2e-3),
    triangular=c.putting(schedule=lambda n: lambda t: 1.0 - abs(2.0 * t / n - 1.0) + 0.01),
)
def beats(seed: int) -> Plan:
    """What is odd in a heart's beats, by convolutions, Nesterov's momentum; accuracy."""
    return a.task(
        seed, _beats_net, c.cross_entropy, _beats(), accuracy, optimizer=o.NESTEROV, lr=2e-2, num_epochs=8,
    )  # fmt: skip


def _small_gpt(is_causal: bool = True) -> nn.Module:
    return Attending(128, 128, 24, 32, 2, is_causal=is_causal)


@torch.no_grad()
def _told_well(model: nn.Module, held: Tensors) -> float:
    return 1.0 + bits(model, held) / 7.0


def _reads_ahead(plan: Plan) -> None:
    plan.model.is_causal = False

    def told_without_looking(model: nn.Module, held: Tensors) -> float:
        model.is_causal = True
        return _told_well(model, held)

    plan.quality = told_without_looking


@task(
    0.4,
    ("reads-ahead", _reads_ahead, c.LEAK),
    ("says-again", lambda plan: setattr(plan, "train", (plan.train[0], plan.train[0])), either(c.LEAK, c.LABELS)),
    ("lr-100", c.times(100.0), c.HIGH),
    ("endless-warm-up", c.putting(schedule=lambda n: lambda t: (t + 1) / (300 * n)), c.SCHEDULE),
    constant=c.putting(schedule=None, optimizer=o.ADAM, max_norm=None),
)
def small_gpt(seed: int) -> Plan:
    """The next byte of source code, a causal transformer, AdamW, warm-up and cosine, clipped, validated; 1 + bits/7."""
    return a.task(
        seed, _small_gpt, c.cross_entropy, data.text(24, 2200, 200), _told_well, optimizer=o.ADAMW, lr=5e-3,
        num_epochs=4, max_norm=1.0,
        schedule=lambda n: lambda t: min((t + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * t / n)),
        **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _ciphers() -> tuple[Tensors, Tensors]:
    """Six symbols, what a decoder is given of the answer, the answer: symbols in reverse by another alphabet."""
    dice = dice_of(1148)
    x = torch.randint(1, 12, (1500, 6), generator=dice)
    y = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(11, generator=dice)])[x.flip(1)]
    given = torch.cat([torch.zeros(1500, 1, dtype=torch.long), y[:, :-1]], 1)
    return tuple(t[:1200] for t in (x, given, y)), tuple(t[1200:] for t in (x, given, y))


class _Translator(nn.Module):
    def __init__(self, is_cut: bool = False) -> None:
        super().__init__()
        self.words, self.said = nn.Embedding(12, 24), nn.Embedding(12, 24)
        self.reads, self.tells = nn.GRU(24, 64, batch_first=True), nn.GRU(24, 64, batch_first=True)
        self.last, self.is_cut = nn.Linear(64, 12), is_cut

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        state = self.reads(self.words(x))[1]
        return self.last(self.tells(self.said(given), 0.0 * state.detach() if self.is_cut else state)[0])


def _translation(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return F.cross_entropy(model(batch[0], batch[1]).flatten(0, 1), batch[2].flatten())


@torch.no_grad()
def _translated(model: nn.Module, held: Tensors) -> float:
    """Word by word, each fed back."""
    given = torch.zeros_like(held[1])
    for i in range(6):
        said = model(held[0], given).argmax(2)
        if i < 5:
            given[:, i + 1] = said[:, i]
    return float((said == held[2]).float().mean())


@task(
    0.65,
    ("given-the-answer", lambda plan: setattr(plan, "train", (plan.train[0], plan.train[2], plan.train[2])), c.LEAK),
    ("cut-in-the-middle", lambda plan: setattr(plan.model, "is_cut", True), CUT_OR_FROZEN),
    ("stopped-early", c.putting(num_epochs=2), f.TOO_LITTLE),
    ("lr-1e-7", c.putting(lr=1e-7), c.LOW),
    clipped=c.putting(max_norm=0.5),
)
def ciphers(seed: int) -> Plan:
    """Symbols in reverse by another alphabet, two GRUs, Adam; share right when fed back."""
    torch.manual_seed(seed)
    return c.planned(
        seed, _Translator(), _translation, *_ciphers(), _translated, 0.0, lr=8e-3, num_epochs=16, batch_size=40
    )


@functools.cache
def _sensors() -> data.Split:
    """Three sensors over 18 ticks: whether the second follows the first, or the third."""
    dice = dice_of(1149)
    y = torch.randint(0, 2, (1200,), generator=dice)
    x = torch.randn(1200, 18, 3, generator=dice).cumsum(1) / 3.0
    lead = torch.where(y[:, None] == 0, x[:, :, 0], x[:, :, 2])
    x[:, 2:, 1] = lead[:, :-2] + 0.2 * torch.randn(1200, 16, generator=dice)
    return data.parted(x, y)


@task(
    0.8,
    ("volts", c.scaled_inputs(2e3, 1e4), f.INPUTS),
    ("lr-100", c.putting(lr=0.3), c.HIGH),
    ("swapped", f.targets_as(lambda y: 1 - y), c.LABELS),
    ("all-zero", a.weights(lambda m: [p.zero_() for p in m.parameters()]), a.POOR),
    ("repeated", a.first_batch_only, f.OVER),
    radam=c.putting(optimizer=o.RADAM, lr=5e-3),
)
def sensors(seed: int) -> Plan:
    """Which of two the middle sensor follows, a transformer over ticks, Adam; accuracy."""
    return a.task(
        seed, lambda: Attending(3, 2, 18, 32, 1, is_symbolic=False, pooled=True), c.cross_entropy, _sensors(), accuracy,
        lr=3e-3, num_epochs=10,
    )  # fmt: skip
