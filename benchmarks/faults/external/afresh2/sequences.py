"""Sequences: forecasts, letters with a state that is carried on, long memory, speech, and convolutions over time."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import optimizers as o
from ..afresh import case as c
from ..case import Case
from ..loop import Plan, Tensors, Watch
from ..qualities import accuracy, r_squared
from ..wild.case import dice_of
from . import case as a

_faulty = functools.partial(a.faulty, __name__)


class Forecast(nn.Module):
    """What comes next, after a GRU."""

    def __init__(self, num_in: int = 2, width: int = 24, is_batch_first: bool = True) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(num_in, width, batch_first=is_batch_first), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0][:, -1])


@functools.cache
def _demand(length: int = 20) -> data.Split:
    dice = dice_of(540)
    t = torch.arange(1700.0)
    series = (t / 5.0).sin() + 0.5 * (t / 13.0).cos() * (t / 4.1).sin() + 0.1 * torch.randn(1700, generator=dice)
    level = 0.2 * torch.randn(1700, generator=dice)
    x = torch.stack([series, level], 1).unfold(0, length, 1)[:-1].transpose(1, 2)
    y = (series + level.roll(1))[length:, None]
    cut = 1100
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def demand(seed: int) -> Plan:
    """The next value of a series, validated on what comes later."""
    return a.task(seed, Forecast, c.squared_error, _demand(), r_squared, lr=5e-3, num_epochs=6, **a.VALIDATED)


def _answer_within(plan: Plan) -> None:
    """The window reaches one step too far: it holds what is asked for."""
    (x, y), (held, wanted) = plan.train, plan.held_out
    plan.train = (torch.cat([x[:, 1:], torch.stack([y, torch.zeros_like(y)], 2)], 1), y)
    plan.held_out = (torch.cat([held[:, 1:], torch.zeros(len(held), 1, 2)], 1), wanted)
    plan.play = c.plain


def _train_scaled_by_later(plan: Plan) -> None:
    """What is trained on is scaled, what is validated on is not."""
    x, y = plan.train
    plan.train = (8.0 * x + 3.0, y)


@functools.cache
def _letters() -> data.Split:
    dice = dice_of(541)
    table = (2.5 * torch.randn(12, 12, 12, generator=dice)).softmax(-1)
    text = [0, 1]
    for draw in torch.rand(6000, generator=dice).tolist():
        text.append(min(11, int((table[text[-2], text[-1]].cumsum(0) < draw).sum())))
    rows = torch.tensor(text[:6000]).view(20, 300)
    parts = rows.unfold(1, 26, 25).reshape(-1, 26)
    return (parts[:176, :-1], parts[:176, 1:]), (parts[176:, :-1], parts[176:, 1:])


class Letters(nn.Module):
    """The next letter, after an LSTM over an embedding."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = (
            nn.Embedding(12, 16),
            nn.LSTM(16, width, batch_first=True),
            nn.Linear(width, 12),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embed(x))[0])


def letters(seed: int) -> Plan:
    """The next of twelve letters, which hangs on the two before it."""
    return a.task(
        seed, Letters, c.cross_entropy, _letters(), accuracy, lr=1e-2, batch_size=8, num_epochs=12, max_norm=1.0
    )


def _copied(plan: Plan) -> None:
    """Targets are the inputs: the shift was left out."""
    plan.train = (plan.train[0], plan.train[0])


def _mean_of_softmax(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    return c.cross_entropy(lambda x: model(x).softmax(1), batch)


def _sentence_axis(former, model: nn.Module, batch: Tensors) -> torch.Tensor:
    """[B, T, C] viewed as [B, C, T], so that letters and places are mixed."""
    out = model(batch[0])
    return F.cross_entropy(out.reshape(len(out), 12, -1), batch[1])


class Memory(nn.Module):
    """A plain recurrent net over numbers: was the first of them positive, and what was their sum?"""

    def __init__(self, scale: float = 1.0, act: str = "tanh", width: int = 24) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(1, width, batch_first=True, nonlinearity=act), nn.Linear(width, 1)
        with torch.no_grad():
            nn.init.orthogonal_(self.rnn.weight_hh_l0)
            self.rnn.weight_hh_l0.mul_(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0][:, -1])


@functools.cache
def _numbers() -> data.Split:
    x = torch.randn(900, 30, 1, generator=dice_of(542))
    return data.parted(x, 0.3 * x.sum(1) + 1.5 * x[:, 0].sign())


def memory(seed: int) -> Plan:
    """A sum, and the sign of the first."""
    return a.task(seed, Memory, c.squared_error, _numbers(), r_squared, lr=3e-3, num_epochs=15, max_norm=1.0)


@functools.cache
def _speech() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    dice = dice_of(543)
    said = torch.randint(1, 6, (400, 4), generator=dice)
    voices = torch.randn(6, 8, generator=dice)
    frames = voices[said].repeat_interleave(4, 1) + 0.5 * torch.randn(400, 16, 8, generator=dice)
    return (frames[:300], said[:300]), (frames[300:], said[300:])


class Speech(nn.Module):
    """Scores of five sounds and a blank for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(8, 24, batch_first=True, bidirectional=True), nn.Linear(48, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0])


def _ctc(model: nn.Module, batch: Tensors, blank: int = 0, logs: bool = True, frames: int = 16) -> torch.Tensor:
    out = model(batch[0]).transpose(0, 1)
    count = len(batch[0])
    return F.ctc_loss(
        out.log_softmax(-1) if logs else out, batch[1], torch.full((count,), frames), torch.full((count,), 4), blank
    )


@torch.no_grad()
def _heard(model: nn.Module, wanted: Tensors) -> float:
    right = 0
    for scores, said in zip(model(wanted[0]), wanted[1].tolist()):
        found = scores.argmax(-1).unique_consecutive()
        right += found[found > 0].tolist() == [s for k, s in enumerate(said) if k == 0 or s != said[k - 1]] or (
            found[found > 0].tolist() == said
        )
    return right / len(wanted[0])


def speech(seed: int) -> Plan:
    """Sounds without their places."""
    return a.task(seed, Speech, _ctc, _speech(), _heard, lr=1e-2, num_epochs=16)


class Waves(nn.Module):
    """Convolutions over time that widen; four kinds of wave."""

    def __init__(self, act=F.relu, width: int = 16, norms: bool = True) -> None:
        super().__init__()
        sizes = (1, width, width, width)
        self.convs = nn.ModuleList(
            nn.Conv1d(low, high, 5, padding=2 * 2**k, dilation=2**k)
            for k, (low, high) in enumerate(itertools.pairwise(sizes))
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) if norms else nn.Identity() for _ in self.convs)
        self.out, self.act = nn.Linear(width, 4), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms):
            x = self.act(norm(conv(x)))
        return self.out(x.mean(2))


@functools.cache
def _waves() -> data.Split:
    dice = dice_of(544)
    t, kind = torch.linspace(0.0, 6.0, 64), torch.randint(4, (900,), generator=dice)
    phase, rate = 6.0 * torch.rand(900, 1, generator=dice), 2.0 + 2.0 * torch.rand(900, 1, generator=dice)
    at = rate * t + phase
    shapes = torch.stack([at.sin(), at.sin().sign(), 2.0 * (at / 6.283).frac() - 1.0, at.sin().abs() * 2.0 - 1.0], 1)
    x = shapes[torch.arange(900), kind] + 0.3 * torch.randn(900, 64, generator=dice)
    return data.parted(x[:, None], kind)


def waves(seed: int) -> Plan:
    """Which kind of wave it is."""
    return a.task(
        seed, Waves, c.cross_entropy, _waves(), accuracy, optimizer=o.ADAMAX, lr=1e-2, num_epochs=10, schedule=o.cosine
    )


def _lost(plan: Plan, watch: Watch) -> None:
    """The model is made anew after the optimizer was."""
    former = Waves()
    optimizer = watch.wrap(plan.optimizer(former, plan.lr), plan.model, plan.max_norm)
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            loss = plan.loss(plan.model, batch)
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)


def _cosine_again_and_again(num_steps: int):
    """A cosine that was given the number of epochs where steps are meant."""
    cosine = o.cosine(10)
    return lambda step: cosine(min(step, 10)) * 0.1


class Codec(nn.Module):
    """A sequence to one vector and back."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 12)
        self.read, self.write, self.out = (
            nn.GRU(12, width, batch_first=True),
            nn.GRUCell(12, width),
            nn.Linear(width, 8),
        )

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        source, told = pair[:, 0], pair[:, 1]
        state, outs = self.read(self.embed(source))[1][0], []
        for place in range(told.shape[1]):
            state = self.write(self.embed(told[:, place]), state)
            outs.append(self.out(state))
        return torch.stack(outs, 1)


@functools.cache
def _reversed() -> data.Split:
    source = torch.randint(1, 8, (1400, 4), generator=dice_of(545))
    target = source.flip(1)
    told = torch.cat([torch.zeros(1400, 1, dtype=torch.long), target[:, :-1]], 1)
    return data.parted(torch.stack([source, told], 1), target)


def backwards(seed: int) -> Plan:
    """Four letters, said backwards."""
    return a.task(seed, Codec, c.cross_entropy, _reversed(), accuracy, lr=1e-2, batch_size=50, num_epochs=14)


def _target_told(plan: Plan) -> None:
    """The decoder is told what it is asked for, in training."""
    pair, target = plan.train
    plan.train = (torch.stack([pair[:, 0], target], 1), target)


def _growing_memory(plan: Plan) -> None:
    """ReLUs with recurrent weights that grow, and no clipping."""
    plan.model, plan.max_norm = Memory(1.6, "relu"), None


CASES: tuple[Case, ...] = (
    *_faulty(
        "demand",
        demand,
        ("answer-within", _answer_within, c.LEAK),
        ("scaled-in-training", _train_scaled_by_later, a.DIFFERS),
        ("batch-for-time", a.model_is(lambda: Forecast(is_batch_first=False)), a.MIXED),
        ("lr-1e-7", c.putting(lr=1e-7), c.LOW),
        ("kilowatts", c.scaled_targets(3e4), c.TARGETS),
    ),
    *_faulty(
        "letters",
        letters,
        ("copied", _copied, c.LEAK),
        ("softmax-over-time", c.loss_is(_mean_of_softmax), c.OUTPUT),
        ("reshaped", c.loss_is(_sentence_axis), a.MIXED),
        ("clipped-adam", c.putting(max_norm=1e-9), c.CLIPPED),
        ("lr-2", c.putting(lr=2.0), c.HIGH),
        ("one-batch", a.first_batch_only, c.REPEATED),
    ),
    *_faulty(
        "memory",
        memory,
        ("exploding", _growing_memory, c.EXPLODING),
        ("forgets", a.model_is(lambda: Memory(0.2)), a.VANISHING),
        ("broadcast", c.loss_is(lambda former, m, b: F.mse_loss(m(b[0]).flatten(), b[1])), c.LOSS),
        ("saturated", c.scaled_inputs(500.0), c.INPUTS),
    ),
    *_faulty(
        "speech",
        speech,
        ("blank-elsewhere", c.loss_is(lambda former, m, b: _ctc(m, b, blank=5)), c.LOSS),
        ("no-log-softmax", c.loss_is(lambda former, m, b: _ctc(m, b, logs=False)), c.OUTPUT),
        ("no-frames", c.loss_is(lambda former, m, b: _ctc(m, b, frames=3)), a.MIXED),
    ),
    *_faulty(
        "waves",
        waves,
        ("optimizer-of-former", c.putting(play=_lost), a.NO_GRADIENT),
        ("cosine-of-ten", c.putting(schedule=_cosine_again_and_again), c.SCHEDULE),
        ("in-order", c.in_order, c.SORTED),
        ("accumulated", c.putting(play=a.summed_over(16), optimizer=o.SGD, lr=1.0), a.NOT_SCALED),
        ("sorted-out", lambda plan: setattr(plan, "train", (plan.train[0], torch.zeros_like(plan.train[1]))), a.UNEVEN),
    ),
    *_faulty(
        "backwards",
        backwards,
        ("told", _target_told, c.LEAK),
        ("shuffled", c.shuffled, c.LABELS),
        ("not-cleared", c.putting(zero_grad=False), c.KEPT),
        ("betas", c.putting(optimizer=o.of(torch.optim.Adam, betas=(0.0, 0.0))), c.SETTINGS),
    ),
)  # fmt: skip
