"""Tasks on text that every machine with Python has: predict the next byte of the standard library."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastguard.commands.demo.training import VOCABULARY, CharTransformer, library_text

from .training import Batch, Setup, warm_up_cosine

NUM_BYTES = 400_000
_NUM_HELD_OUT = 40_000
_MEAN_BYTE, _STD_BYTE = 76.0, 37.0


class CharMLP(nn.Module):
    """Logits [B, 256] of the byte after `context` bytes [B, context].

    Args:
        depth: hidden layers.
        activation: between them.
        dropout: after each of them.
    """

    def __init__(
        self,
        context: int = 8,
        width: int = 128,
        depth: int = 2,
        activation: Callable[[], nn.Module] = nn.ReLU,
        dropout: float = 0.0,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16, sparse=sparse)
        sizes = [16 * context, *[width] * depth]
        layers: list[nn.Module] = []
        for low, high in itertools.pairwise(sizes):
            layers += [nn.Linear(low, high), activation(), *([nn.Dropout(dropout)] if dropout else [])]
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.tokens(text).flatten(1)))


class CharRecurrent(nn.Module):
    """Logits [B, T, 256] of the next byte, for bytes [B, T], by an LSTM or a plain RNN."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM, width: int = 96, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.recurrent = kind(32, width, batch_first=True, **options)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.tokens(text))[0])


class NumberMLP(nn.Sequential):
    """What follows eight numbers [B, 8]: `num_outputs` of them, as [B, num_outputs]."""

    def __init__(
        self, num_outputs: int = VOCABULARY, width: int = 128, activation: Callable[[], nn.Module] = nn.Tanh
    ) -> None:
        hidden = [nn.Linear(8, width), activation(), nn.Linear(width, width), activation()]
        super().__init__(*hidden, nn.Linear(width, num_outputs))


class NormedMLP(nn.Sequential):
    """The same with a BatchNorm behind each hidden layer."""

    def __init__(self, num_outputs: int = VOCABULARY, width: int = 96) -> None:
        sizes = ((8, width), (width, width))
        hidden = [layer for low, high in sizes for layer in (nn.Linear(low, high), nn.BatchNorm1d(high), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(width, num_outputs))


@functools.cache
def _text() -> torch.Tensor:
    return torch.frombuffer(bytearray(library_text(NUM_BYTES)), dtype=torch.uint8)


def _windows(low: int, high: int, count: int, length: int, seed: int) -> torch.Tensor:
    starts = torch.randint(low, high - length, (count, 1), generator=torch.Generator().manual_seed(seed))
    return _text()[starts + torch.arange(length + 1)].long()


def text_batches(size: int, length: int, seed: int) -> Callable[[int], Batch]:
    """Batches [size, length] of inputs and next bytes by number, from random places of the text."""

    def batch_at(number: int) -> Batch:
        window = _windows(0, NUM_BYTES - _NUM_HELD_OUT, size, length, 100_003 * (seed + 1) + number)
        return window[:, :-1], window[:, 1:]

    return batch_at


def next_byte_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the next byte: of the last one only, if the model gives one for each text."""
    logits = model(batch[0])
    targets = batch[1] if logits.ndim == 3 else batch[1][:, -1]
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def as_numbers(text: torch.Tensor) -> torch.Tensor:
    """Bytes as numbers of mean 0 and standard deviation 1, nearly."""
    return (text - _MEAN_BYTE) / _STD_BYTE


def next_number_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error of the next byte as a number."""
    return (model(batch[0]).squeeze(-1) - batch[1]).square().mean()


def _text_task(build: Callable[..., nn.Module], seed: int, size: int, length: int, **options: Any) -> Setup:
    torch.manual_seed(seed)
    held_out = _windows(NUM_BYTES - _NUM_HELD_OUT, NUM_BYTES, 4 * size, length, 7)
    return Setup(
        seed=seed,
        build=build,
        model=build(),
        loss_of=next_byte_loss,
        batch_at=text_batches(size, length, seed),
        held_out=(held_out[:, :-1], held_out[:, 1:]),
        num_batches=(NUM_BYTES - _NUM_HELD_OUT) // (size * length),
        **options,
    )


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW as most people call it."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def char_mlp(seed: int) -> Setup:
    """An MLP on eight bytes."""
    return _text_task(CharMLP, seed, 128, 8, lr=1e-2, make_optimizer=adamw, num_steps=300, max_norm=5.0)


def char_mlp_dropout(seed: int) -> Setup:
    """The same with dropout 0.5."""
    setup = char_mlp(seed)
    torch.manual_seed(seed)
    setup.model = setup.build(dropout=0.5)
    return setup


def char_transformer(seed: int) -> Setup:
    """A transformer of two blocks on texts of 32 bytes."""

    def build(width: int = 48, num_blocks: int = 2) -> nn.Module:
        return CharTransformer(width=width, num_heads=4, num_blocks=num_blocks)

    options = {"make_optimizer": adamw, "num_steps": 250, "schedule": warm_up_cosine(20, 250)}
    return _text_task(build, seed, 16, 32, lr=5e-3, **options)


def char_lstm(seed: int) -> Setup:
    """An LSTM on texts of 24 bytes."""
    return _text_task(CharRecurrent, seed, 16, 24, lr=2e-2, make_optimizer=adamw, num_steps=250)


def char_rnn(seed: int) -> Setup:
    """A plain RNN on texts of 24 bytes."""
    build = functools.partial(CharRecurrent, nn.RNN)
    return _text_task(build, seed, 16, 24, lr=5e-3, make_optimizer=adamw, num_steps=250)


def char_mlp_warmed_up(seed: int) -> Setup:
    """The MLP with SGD and a learning rate that it stands after a warm-up only; not clipped."""
    options = {"num_steps": 300, "max_norm": None, "schedule": warm_up_cosine(80, 300)}
    return _text_task(CharMLP, seed, 128, 8, lr=0.6, make_optimizer=sgd, **options)


def hot_char_mlp(seed: int) -> Setup:
    """The same with a learning rate that is the end of it without the warm-up."""
    setup = char_mlp_warmed_up(seed)
    setup.lr = 0.8
    return setup


def char_mlp_accumulating(seed: int) -> Setup:
    """The MLP with SGD on eight batches of 32 a step; not clipped."""
    return _text_task(CharMLP, seed, 32, 8, lr=0.2, make_optimizer=sgd, num_steps=200, num_micro=8, max_norm=None)


def small_char_mlp(seed: int) -> Setup:
    """The MLP on a text of twenty batches, which it sees in one order again and again."""
    setup = char_mlp(seed)
    few_batches = 20
    batch_at = setup.batch_at
    setup.batch_at = lambda number: batch_at(number % few_batches)
    setup.num_batches, setup.num_steps = few_batches, 200
    return setup


def numbers_mlp(seed: int, activation: Callable[[], nn.Module] = nn.Tanh) -> Setup:
    """A tanh MLP on eight bytes as numbers, with SGD: which byte comes next."""
    build = functools.partial(NumberMLP, activation=activation)
    setup = _text_task(build, seed, 128, 8, lr=0.1, make_optimizer=sgd, num_steps=300)
    setup.change_batches(lambda number, batch: (as_numbers(batch[0]), batch[1]))
    setup.held_out = as_numbers(setup.held_out[0]), setup.held_out[1]
    return setup


def _of_numbers(build: Callable[..., nn.Module], seed: int, **fields: Any) -> Setup:
    """The same with another model."""
    setup = numbers_mlp(seed)
    torch.manual_seed(seed)
    setup.model, setup.build = build(), build
    for name, value in fields.items():
        setattr(setup, name, value)
    return setup


def normed_mlp(seed: int) -> Setup:
    """With BatchNorm, which is left to normalise the inputs."""
    setup = _of_numbers(NormedMLP, seed)
    setup.change_batches(lambda number, batch: (_off_centre(batch[0]), batch[1]))
    setup.held_out = _off_centre(setup.held_out[0]), setup.held_out[1]
    return setup


def _off_centre(numbers: torch.Tensor) -> torch.Tensor:
    return 2.0 * numbers + 4.0


def regression_mlp(seed: int) -> Setup:
    """The same MLP with one output: the next byte as a number."""
    fields = {"loss_of": next_number_loss, "make_optimizer": adamw, "lr": 1e-3, "max_norm": None}
    setup = _of_numbers(functools.partial(NumberMLP, 1), seed, **fields)
    setup.change_batches(lambda number, batch: (batch[0], as_numbers(batch[1][:, -1])))
    setup.held_out = setup.held_out[0], as_numbers(setup.held_out[1][:, -1])
    return setup


TASKS: dict[str, Callable[[int], Setup]] = {
    "char-mlp": char_mlp,
    "char-mlp-dropout": char_mlp_dropout,
    "char-transformer": char_transformer,
    "char-lstm": char_lstm,
    "char-rnn": char_rnn,
    "char-mlp-warmed-up": char_mlp_warmed_up,
    "hot-char-mlp": hot_char_mlp,
    "char-mlp-accumulating": char_mlp_accumulating,
    "small-char-mlp": small_char_mlp,
    "numbers-mlp": numbers_mlp,
    "numbers-relu-mlp": functools.partial(numbers_mlp, activation=nn.ReLU),
    "regression-mlp": regression_mlp,
    "normed-mlp": normed_mlp,
}
