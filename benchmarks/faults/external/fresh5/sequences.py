"""Sequences: bytes by convolutions, taps, clock times, rhythms, a pendulum, phrases, a grammar with gaps, tremors."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import LARGE, NOISE, OUTPUT_OR_LOSS, PARTED, either
from ..fresh4 import case as f
from ..loop import Plan, Tensors
from ..nets import Attending, Recurrent
from ..qualities import accuracy, bits, r_squared
from ..wild.case import dice_of
from . import case as g

CASES: list[Case] = []
task = g.planning(CASES, __name__)


class Causal(nn.Module):
    """Dilated convolutions over bytes that look back only."""

    def __init__(self, width: int = 48, is_causal: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d) for d in (1, 2, 4))
        self.head = nn.Linear(width, 128)
        self.is_causal = is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = self.embed(x).mT
        for layer in self.layers:
            room = 2 * layer.dilation[0]
            padded = F.pad(here, (room, 0) if self.is_causal else (room // 2, room // 2))
            here = here + layer(padded).relu()
        return self.head(here.mT)


def _per_byte(model: nn.Module, held: Tensors) -> float:
    return 1.0 + bits(model, held) / 7.0


@torch.no_grad()
def _per_byte_causal(model: nn.Module, held: Tensors) -> float:
    """As where the next byte is not there yet: each prefix by itself would see nothing after it."""
    was, model.is_causal = model.is_causal, True
    found = _per_byte(model, held)
    model.is_causal = was
    return found


def _unshifted(plan: Plan) -> None:
    plan.train = (plan.train[0], plan.train[0])


@task(
    0.42,
    ("looks-ahead", a.model_is(lambda: Causal(is_causal=False)), g.MASKLESS),
    ("not-moved-by-one", _unshifted, either(c.LEAK, c.LABELS)),
    ("lr-1e-6", c.putting(lr=1e-6), c.LOW),
    ("softmax-before", f.ending_in(nn.Softmax(-1)), OUTPUT_OR_LOSS),
    ("lr-1", c.putting(lr=1.0), c.HIGH),
    muon_like_sign=c.putting(optimizer=o.SIGN, lr=1e-3),
)
def next_byte(seed: int) -> Plan:
    """The next byte of Python's library by dilated convolutions, AdamW; 1 - bits of seven."""
    quality = lambda m, held: _per_byte_causal(m, held) if isinstance(m, Causal) else _per_byte(m, held)  # noqa: E731
    return a.task(
        seed, Causal, c.cross_entropy, data.text(32, 1200, 150), quality, optimizer=o.ADAMW, lr=4e-3, num_epochs=4,
        batch_size=16,
    )  # fmt: skip


@functools.cache
def _taps() -> data.Split:
    """Frames [B, 20, 6] in which four symbols sound for two to five frames each, and the symbols, from 1 on."""
    dice = dice_of(1321)
    said = torch.randint(1, 6, (1000, 4), generator=dice)
    x = torch.zeros(1000, 20, 6)
    for row in range(1000):
        at = 0
        for symbol in said[row].tolist():
            long = int(torch.randint(2, 5, (1,), generator=dice))
            x[row, at : at + long, symbol] = 1.0
            at += long + 1
    return data.parted(x + 0.3 * torch.randn(x.shape, generator=dice), said)


def _aligned(model: nn.Module, batch: Tensors, blank: int = 0, normed: bool = True) -> torch.Tensor:
    out = model(batch[0]).transpose(0, 1)
    log = out.log_softmax(2) if normed else out
    size = len(batch[0])
    return F.ctc_loss(log, batch[1], torch.full((size,), 20), torch.full((size,), 4), blank=blank)


@torch.no_grad()
def _spelt(model: nn.Module, held: Tensors) -> float:
    said, right = model(held[0]).argmax(2), 0
    for row, wanted in zip(said, held[1]):
        kept = torch.unique_consecutive(row)
        right += kept[kept != 0].tolist() == wanted.tolist()
    return right / len(said)


def _listener(kind: type[nn.RNNBase] = nn.GRU) -> nn.Module:
    return Recurrent(kind, 6, 6, 40, is_symbolic=False, both_ways=True)


@task(
    0.7,
    ("lasts-as-blank", c.loss_is(lambda _, m, b: _aligned(m, b, 5)), either(c.LOSS, c.LABELS)),
    ("others-words", c.shuffled, c.LABELS),
    ("logits-as-they-are", c.loss_is(lambda _, m, b: _aligned(m, b, normed=False)), c.LOSS),
    ("lr-1000", c.times(300.0), c.HIGH),
    lstm=a.model_is(lambda: _listener(nn.LSTM)),
)  # fmt: skip
def taps(seed: int) -> Plan:
    """Which four symbols are tapped, no alignment told, GRU both ways, Adam clipped; words without a mistake."""
    return a.task(seed, _listener, _aligned, _taps(), _spelt, lr=1e-2, num_epochs=7, batch_size=28, max_norm=5.0)


_WORDS = ["<", ">", "", "past", "to", "half", "quarter", "five", "ten", "twenty", "oclock", *"ABCDEFGHIJKL"]


@functools.cache
def _times() -> data.Split:
    """Hours and minutes as digits [B, 4], and what one says, four words behind a start."""
    minutes = {0: ["oclock"], 5: ["five", "past"], 10: ["ten", "past"], 15: ["quarter", "past"], 20: ["twenty", "past"]}
    minutes |= {
        30: ["half", "past"],
        40: ["twenty", "to"],
        45: ["quarter", "to"],
        50: ["ten", "to"],
        55: ["five", "to"],
    }
    x, y = [], []
    for hour in range(12):
        for minute, words in minutes.items():
            for copy in range(10):
                shown = (hour + (words[-1] == "to")) % 12
                said = [*words, "ABCDEFGHIJKL"[shown], ">"]
                x.append([hour // 10, hour % 10, minute // 10, minute % 10, copy])
                y.append([0, *(_WORDS.index(w) for w in said), *[2] * (4 - len(said))])
    return data.parted(torch.tensor(x), torch.tensor(y), 0.6)


class Teller(nn.Module):
    """An encoder over digits and a decoder over words, given what was said so far."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.digits, self.words = nn.Embedding(10, 32), nn.Embedding(len(_WORDS), 32)
        self.places = nn.Parameter(0.2 * torch.randn(5, 32))
        self.body = nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, len(_WORDS))
        self.is_causal = is_causal

    def forward(self, x: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        count = said.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(count) if self.is_causal else None
        here = self.digits(x) + self.places[: x.shape[1]]
        return self.head(self.body(here, self.words(said) + self.places[:count], tgt_mask=mask))


def _told(model: nn.Module, batch: Tensors, shift: int = 1, smooth: float = 0.0) -> torch.Tensor:
    x, said = batch
    out = model(x[:, :4], said[:, 1 - shift : said.shape[1] - shift])
    return F.cross_entropy(out.flatten(0, 1), said[:, 1:].flatten(), ignore_index=2, label_smoothing=smooth)


@torch.no_grad()
def _said_rightly(model: nn.Module, held: Tensors) -> float:
    said = torch.zeros(len(held[0]), 1, dtype=torch.long)
    for _ in range(4):
        said = torch.cat([said, model(held[0][:, :4], said)[:, -1].argmax(1, keepdim=True)], 1)
    matters = held[1] != 2
    return float(((said == held[1]) | ~matters).all(1).float().mean())


@task(
    0.8,
    ("unmasked", lambda plan: setattr(plan.model, "is_causal", False), g.MASKLESS),
    ("words-as-input-and-answer", c.loss_is(lambda _, m, b: _told(m, b, shift=0)), g.MASKLESS),
    ("other-times", c.shuffled, c.LABELS),
    ("decay", c.putting(optimizer=o.of(torch.optim.AdamW, weight_decay=60.0)), c.DECAY),
    smoothed=c.loss_is(lambda _, m, b: _told(m, b, smooth=0.1)),
)  # fmt: skip
def clock_times(seed: int) -> Plan:
    """Times of the day in words, an encoder and a decoder, AdamW with warm-up; whole answers right."""
    return a.task(
        seed, Teller, _told, _times(), _said_rightly, optimizer=o.ADAMW, lr=4e-3, num_epochs=7, batch_size=32,
        schedule=o.warm_cosine, max_norm=1.0,
    )  # fmt: skip


@functools.cache
def _rhythms() -> data.Split:
    """Blows on a noisy drum [B, 24, 1] after one of five patterns, begun anywhere."""
    dice = dice_of(1323)
    beats = ["x...x...", "x..x..x.", "x.x.xx..", "xx.xx.x.", "x....x.x"]
    y = torch.randint(0, 5, (1400,), generator=dice)
    patterns = torch.tensor([[float(sign == "x") for sign in 3 * beat] for beat in beats])
    slip = torch.randint(0, 8, (1400,), generator=dice)
    x = torch.stack([patterns[k].roll(int(s)) for k, s in zip(y, slip)])
    return data.parted((x - 0.4 + 0.35 * torch.randn(x.shape, generator=dice))[:, :, None], y)


def _in_disorder(plan: Plan) -> None:
    """A slip of the axis: blows are shuffled within each row."""
    x, y = plan.train
    plan.train = (torch.stack([row[torch.randperm(len(row))] for row in x]), y)


def _drummer(kind: type[nn.RNNBase] = nn.LSTM) -> nn.Module:
    return Recurrent(kind, 1, 5, 40, is_symbolic=False, everywhere=False)


@task(
    0.7,
    ("large-weights", f.scaled_weights(14.0), LARGE),
    ("in-volts", c.scaled_inputs(5e3, 0.0), f.INPUTS),
    ("beats-in-another-order", _in_disorder, either(PARTED, c.LABELS)),
    ("lr-3", c.putting(lr=3.0), c.HIGH),
    ("head-alone", c.putting(optimizer=lambda m, lr: torch.optim.Adam(m.head.parameters(), lr)), c.LEFT_OUT),
    gru=a.model_is(lambda: _drummer(nn.GRU)),
)  # fmt: skip
def rhythms(seed: int) -> Plan:
    """Which of five rhythms is drummed, LSTM, Adam clipped at 1, validated; accuracy."""
    return a.task(
        seed, _drummer, c.cross_entropy, _rhythms(), accuracy, lr=1e-2, num_epochs=14, batch_size=40, max_norm=1.0,
        **a.VALIDATED,
    )  # fmt: skip


@functools.cache
def _swings() -> data.Split:
    """Angles of damped pendula [B, 20, 1], and the four after them."""
    dice = dice_of(1324)
    angle, speed = 2.0 * torch.randn(1300, generator=dice), torch.randn(1300, generator=dice)
    damp, path = 0.1 * torch.rand(1300, generator=dice), []
    for _ in range(24 * 4):
        speed = speed - 0.08 * (angle.sin() + damp * speed)
        angle = angle + 0.08 * speed
        path.append(angle)
    seen = torch.stack(path, 1)[:, ::4].sin()
    return data.parted(seen[:, :20, None] + 0.02 * torch.randn(1300, 20, 1, generator=dice), seen[:, 20:])


def _forecaster(kind: type[nn.RNNBase] = nn.GRU) -> nn.Module:
    return Recurrent(kind, 1, 4, 32, is_symbolic=False, everywhere=False)


@task(
    0.75,
    ("backwards", lambda plan: vars(plan).update(train=(plan.train[0].flip(1), plan.train[1])), PARTED),
    ("eight-steps", c.putting(batch_size=900, num_epochs=4), a.SHORT),
    ("in-millidegrees", c.scaled_targets(57e3, 2e4), c.TARGETS),
    ("rate-grows", c.putting(schedule=lambda n: lambda t: 1.03**t), c.GROWING),
    elman=f.all_of(a.model_is(lambda: _forecaster(nn.RNN)), c.putting(max_norm=1.0)),
)
def pendulum(seed: int) -> Plan:
    """Where a pendulum will be at four times, GRU, RMSprop; R²."""
    return a.task(seed, _forecaster, c.squared_error, _swings(), r_squared, optimizer=o.RMSPROP, lr=4e-3, num_epochs=12)


@functools.cache
def _phrases() -> data.Split:
    """Words [B, 10], some of which can be two things, and what each is, by what stands before it."""
    dice = dice_of(1325)
    moves = torch.tensor([[0.0, 0.6, 0.3, 0.1], [0.1, 0.1, 0.2, 0.6], [0.1, 0.8, 0.0, 0.1], [0.5, 0.2, 0.2, 0.1]])
    kind, kinds = torch.zeros(1200, dtype=torch.long), []
    for _ in range(10):
        kind = torch.multinomial(moves[kind], 1, generator=dice)[:, 0]
        kinds.append(kind)
    y = torch.stack(kinds, 1)
    own, shared = (
        12 * y + torch.randint(0, 12, y.shape, generator=dice),
        48 + torch.randint(0, 4, y.shape, generator=dice),
    )
    return data.parted(torch.where(torch.rand(y.shape, generator=dice) < 0.45, shared, own), y)


@task(
    0.75,
    ("tags-one-late", lambda plan: vars(plan).update(train=(plan.train[0], plan.train[1].roll(1, 1))), c.LABELS),
    ("lr-2", c.putting(lr=2.0), c.HIGH),
    ("half-a-thousandth", c.putting(lr=5e-6), c.LOW),
    ("all-verbs", f.targets_as(lambda y: torch.where(torch.rand(y.shape) < 0.93, 1, y)), f.UNEVEN),
    plain_momentum=c.putting(optimizer=o.MOMENTUM, lr=0.3),
)
def phrases(seed: int) -> Plan:
    """What each word of a phrase is, GRU both ways, Adam; accuracy by word."""
    return a.task(
        seed, lambda: Recurrent(nn.GRU, 52, 4, 24, both_ways=True), c.cross_entropy, _phrases(), accuracy, lr=6e-3,
        num_epochs=7,
    )  # fmt: skip


@functools.cache
def _with_gaps() -> data.Split:
    """Three of twelve symbols said three times [B, 9]; some are hidden as 12."""
    dice = dice_of(1326)
    y = torch.randint(0, 12, (1600, 3), generator=dice).repeat(1, 3)
    hidden = torch.rand(y.shape, generator=dice) < 0.3
    return data.parted(torch.where(hidden, 12, y), torch.where(hidden, y, -100))


@torch.no_grad()
def _filled(model: nn.Module, held: Tensors) -> float:
    asked = held[1] >= 0
    return float((model(held[0]).argmax(2) == held[1])[asked].float().mean())


def _filler(norm_first: bool = True) -> nn.Module:
    model = Attending(13, 12, 9, 32, 1, norm_first=norm_first)
    nn.init.normal_(model.places, std=0.5)
    return model


def _nothing_hidden(plan: Plan) -> None:
    x, y = plan.train
    whole = torch.where(y >= 0, y, x)
    plan.train = (whole, whole)


@task(
    0.75,
    ("nothing-hidden", _nothing_hidden, g.MASKLESS),
    ("large-start", f.scaled_weights(20.0), LARGE),
    ("lr-0.5", c.putting(lr=0.5), c.HIGH),
    ("two-in-a-batch", c.putting(batch_size=2, num_epochs=1, lr=0.03), a.SMALL_BATCH),
    after=a.model_is(lambda: _filler(norm_first=False)),
)
def refrains_with_gaps(seed: int) -> Plan:
    """Hidden symbols of what is said three times, one block that attends, RAdam; accuracy where hidden."""
    return a.task(
        seed, _filler, c.cross_entropy, _with_gaps(), _filled, optimizer=o.RADAM, lr=6e-3,
        num_epochs=9, batch_size=40,
    )  # fmt: skip


@functools.cache
def _tremors() -> data.Split:
    """Traces [B, 1, 40] in half of which a wave arrives, and where it begins as one of ten, or 10."""
    dice, time = dice_of(1327), torch.arange(40.0)
    start, strong = torch.randint(0, 36, (1300, 1), generator=dice), 1.5 + torch.rand(1300, 1, generator=dice)
    comes = torch.rand(1300, 1, generator=dice) < 0.7
    since = (time - start).clamp(min=0.0)
    wave = strong * (since * 1.1).sin() * (-since / 8.0).exp() * comes
    x = wave + 0.6 * torch.randn(1300, 40, generator=dice)
    return data.parted(x[:, None], torch.where(comes, start // 4, 10)[:, 0])


def _picker(drop: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 24, 5, stride=2, padding=2),
        nn.BatchNorm1d(24), nn.ReLU(), nn.Flatten(), nn.Dropout(drop), nn.Linear(480, 11),
    )  # fmt: skip


@task(
    0.6,
    ("dropout-0.97", a.model_is(lambda: _picker(0.97)), c.DROPPED),
    ("quarter-of-labels-right", f.random_labels(0.85, 11), NOISE),
    ("in-order-of-arrival", f.all_of(c.in_order, c.putting(schedule=None)), c.SORTED),
    ("undone", c.putting(play=a.undone), c.OVERWRITTEN),
    ("eps-30", c.putting(optimizer=o.of(torch.optim.Adam, eps=30.0)), either(c.SETTINGS, c.LOW)),
    half_dropped=a.model_is(lambda: _picker(0.4)),
)
def tremors(seed: int) -> Plan:
    """When a wave arrives, or none: convolutions with batch norm, Adam along one cycle; accuracy."""
    return a.task(seed, _picker, c.cross_entropy, _tremors(), accuracy, lr=6e-3, num_epochs=7, schedule=o.one_cycle)
