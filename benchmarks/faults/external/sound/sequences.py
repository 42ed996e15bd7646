"""Sequences: copied, tagged, forecast, added up, continued."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case, sound_cases
from ..loop import Plan, Tensors
from ..qualities import accuracy, bits, r_squared

_cases = functools.partial(sound_cases, __name__)


def everywhere_loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Mean cross-entropy over all places."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def squared_loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


def copying(seed: int, kind: type[nn.RNNBase], width: int = 64) -> Plan:
    torch.manual_seed(seed)
    split = data.copy_task(length=4, gap=2, symbols=4, count=1600)
    model = nets.Recurrent(kind, 8, 8, width)
    return Plan(model, everywhere_loss, *split, accuracy, 0.8, lr=1e-2, max_norm=1.0, num_epochs=8, seed=seed)


def copying_attending(seed: int) -> Plan:
    torch.manual_seed(seed)
    split = data.copy_task(length=4, gap=2, symbols=4, count=1600)
    model = nets.Attending(8, 8, 10)
    return Plan(model, everywhere_loss, *split, accuracy, 0.9, lr=3e-3, num_epochs=8, seed=seed)


def tagging(seed: int) -> Plan:
    """How deep each bracket lies; read from both ends."""
    torch.manual_seed(seed)
    model = nets.Recurrent(nn.LSTM, 2, 5, 32, both_ways=True)
    return Plan(model, everywhere_loss, *data.brackets(), accuracy, 0.85, lr=1e-2, num_epochs=6, seed=seed)


def forecasting(seed: int) -> Plan:
    torch.manual_seed(seed)
    model = nets.Recurrent(nn.LSTM, 1, 1, 32, is_symbolic=False, everywhere=False)
    return Plan(model, squared_loss, *data.waves(), r_squared, 0.85, lr=1e-2, num_epochs=10, seed=seed)


def forecasting_convolutions(seed: int) -> Plan:
    """Dilated convolutions over time."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(1), nn.Unflatten(1, (1, 24)), nn.Conv1d(1, 16, 3), nn.ReLU(), nn.Conv1d(16, 16, 3, dilation=2),
        nn.ReLU(), nn.Conv1d(16, 16, 3, dilation=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1),
    )  # fmt: skip
    model(data.waves()[0][0][:2])
    return Plan(model, squared_loss, *data.waves(), r_squared, 0.85, lr=5e-3, num_epochs=10, seed=seed)


def adding(seed: int) -> Plan:
    """Two marked numbers of twelve are to be added: nothing falls for a while, and then it does."""
    torch.manual_seed(seed)
    model = nets.Recurrent(nn.GRU, 2, 1, 32, is_symbolic=False, everywhere=False)
    return Plan(model, squared_loss, *data.adding(), r_squared, 0.8, lr=1e-2, num_epochs=8, max_norm=1.0, seed=seed)


def language(seed: int) -> Plan:
    """The next byte of Python's source, by a transformer."""
    torch.manual_seed(seed)
    model = nets.Attending(128, 128, 20, width=48, is_causal=True)
    return Plan(
        model, everywhere_loss, *data.text(20), bits, -4.0, lr=3e-3, num_epochs=4, max_norm=1.0, seed=seed,
    )  # fmt: skip


def language_recurrent(seed: int) -> Plan:
    """The same by an LSTM."""
    torch.manual_seed(seed)
    model = nets.Recurrent(nn.LSTM, 128, 128, 64)
    return Plan(
        model, everywhere_loss, *data.text(20), bits, -4.0, lr=1e-2, num_epochs=4, max_norm=1.0, seed=seed,
    )  # fmt: skip


class Bag(nn.Module):
    """Whether a piece of text is code or comment, from the mean of its pairs of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.EmbeddingBag(2048, 16, mode="mean", sparse=True)
        self.head = nn.Linear(16, 2)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        pairs = (text[:, :-1] * 131 + text[:, 1:]) % 2048
        return self.head(self.pairs(pairs))


def bag(seed: int) -> Plan:
    """Sparse gradients: which of two files' manners a text has; here, whether it holds a bracket."""
    torch.manual_seed(seed)
    (train, _), (held_out, _) = data.text(30, 1500, 400)

    def labelled(text: torch.Tensor) -> Tensors:
        return text, ((text == ord("(")) | (text == ord(")"))).any(1).long()

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Plan(
        Bag(), loss, labelled(train), labelled(held_out), accuracy, 0.75,
        lr=2.0, optimizer=o.SGD, num_epochs=12, seed=seed,
    )  # fmt: skip


def sorting(seed: int) -> Plan:
    """Six digits put in order, by attention without a mask."""
    torch.manual_seed(seed)
    digits = torch.randint(0, 10, (2000, 6))
    model = nets.Attending(10, 10, 6)
    split = data.parted(digits, digits.sort(1).values, 0.85)
    return Plan(model, everywhere_loss, *split, accuracy, 0.85, lr=3e-3, num_epochs=8, seed=seed)


class AlignedText(nn.Module):
    """Log-probabilities [T, B, C] for CTC: which symbols stand in a stretched sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nets.Recurrent(nn.GRU, 4, 5, 32, is_symbolic=False, both_ways=True)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.body(signal).log_softmax(-1).transpose(0, 1)


def aligned(seed: int) -> Plan:
    """Connectionist temporal classification: four symbols, each stretched over three places, in noise."""
    torch.manual_seed(seed)
    symbols = torch.randint(0, 4, (1200, 4))
    symbols[:, 1:] = torch.where(symbols[:, 1:] == symbols[:, :-1], (symbols[:, 1:] + 1) % 4, symbols[:, 1:])
    for place in range(1, 4):
        same = symbols[:, place] == symbols[:, place - 1]
        symbols[same, place] = (symbols[same, place] + 1) % 4
    signal = F.one_hot(symbols.repeat_interleave(3, 1), 4).float() + 0.2 * torch.randn(1200, 12, 4)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        sizes = torch.full((len(batch[0]),), 12), torch.full((len(batch[0]),), 4)
        return F.ctc_loss(model(batch[0]), batch[1] + 1, *sizes)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        best = model(held_out[0]).argmax(-1).T
        right = 0
        for found, wanted in zip(best.tolist(), held_out[1].tolist()):
            read = [now - 1 for before, now in zip([0, *found], found) if now and now != before]
            right += read == wanted
        return right / len(best)

    split = data.parted(signal, symbols, 0.85)
    return Plan(AlignedText(), loss, *split, quality, 0.8, lr=1e-2, num_epochs=8, max_norm=5.0, seed=seed)


_CLIPPED = {"max_norm": 1.0}
CASES: tuple[Case, ...] = (
    *_cases(
        "copy-gru",
        "copy task, GRU",
        functools.partial(copying, kind=nn.GRU),
        adam={},
        rmsprop={"optimizer": o.RMSPROP, "lr": 3e-3},
    ),
    *_cases(
        "copy-lstm",
        "copy task, LSTM",
        functools.partial(copying, kind=nn.LSTM),
        adam={"num_epochs": 10},
        nadam={"optimizer": o.NADAM, "num_epochs": 10},
    ),
    *_cases(
        "copy-rnn",
        "copy task, plain RNN",
        functools.partial(copying, kind=nn.RNN),
        adam={"lr": 3e-3, "num_epochs": 10},
        tightly_clipped={"lr": 3e-3, "max_norm": 0.05, "num_epochs": 10},
    ),
    *_cases(
        "copy-attending",
        "copy task, transformer",
        copying_attending,
        adamw={"optimizer": o.ADAMW},
        warm={"schedule": o.warm_cosine, **_CLIPPED},
    ),
    *_cases(
        "brackets-tagging",
        "depth of brackets, bidirectional LSTM",
        tagging,
        adam={},
        adagrad={"optimizer": o.ADAGRAD, "lr": 5e-2, "num_epochs": 10},
    ),
    *_cases("waves-lstm", "forecast, LSTM", forecasting, adam={}, clipped_cosine={"schedule": o.cosine, **_CLIPPED}),
    *_cases(
        "waves-convolutions",
        "forecast, dilated convolutions",
        forecasting_convolutions,
        adam={},
        momentum={"optimizer": o.MOMENTUM, "lr": 0.02},
    ),
    *_cases("adding-gru", "adding problem", adding, adam={}, adamw={"optimizer": o.ADAMW, "lr": 2e-2}),
    *_cases(
        "text-transformer",
        "next byte, transformer",
        language,
        adamw={"optimizer": o.ADAMW},
        warm={"optimizer": o.two_groups, "schedule": o.warm_cosine},
    ),
    *_cases(
        "text-lstm", "next byte, LSTM", language_recurrent, adam={}, sgd_clipped={"optimizer": o.MOMENTUM, "lr": 0.5}
    ),
    *_cases("text-bag", "sparse embedding bag", bag, sgd={}, linear_decay={"schedule": o.linear_decay}),
    *_cases("sorting", "sorting by attention", sorting, adam={}, clipped={**_CLIPPED}),
    *_cases("aligned-gru", "connectionist temporal classification", aligned, adam={}, adamw={"optimizer": o.ADAMW}),
)
