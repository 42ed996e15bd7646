"""The trainings: three small models on real data, and trouble that comes over them half-way."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.lab import tasks as text
from benchmarks.lab.training import Batch, Setup, warm_up_cosine

from ..faults import digits

NUM_STEPS = {"char-transformer": 1200, "char-lstm": 1000, "digits-cnn": 500}  # thirty batches fewer cost below 1 %


def smoothed_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy with label smoothing 0.1: it ends well above 0, so that a share of it means something."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def cnn(width: int = 12) -> nn.Sequential:
    """Three convolutions with batch norm and a linear layer, for images [B, 1, 8, 8]."""
    layers: list[nn.Module] = []
    for low, high, stride in ((1, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)):
        layers += [nn.Conv2d(low, high, 3, stride, 1, bias=False), nn.BatchNorm2d(high), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * width, 10))


def digits_cnn(seed: int) -> Setup:
    """The convolutions on scans of digits, SGD with momentum."""
    return digits.digits_task(
        cnn, seed, as_images=True, lr=0.05, make_optimizer=text.sgd, loss_of=smoothed_loss, max_norm=None
    )


def char_transformer(seed: int) -> Setup:
    """The demo's transformer, of one block, on texts of 32 bytes; AdamW."""
    setup = text.char_transformer(seed)
    torch.manual_seed(seed)
    setup.model, setup.lr = setup.build(width=32, num_blocks=1), 5e-3
    return setup


def char_lstm(seed: int) -> Setup:
    """An LSTM on texts of 24 bytes; AdamW."""
    setup = text.char_lstm(seed)
    torch.manual_seed(seed)
    setup.model, setup.lr = setup.build(width=48), 1e-2
    return setup


TASKS: dict[str, Callable[[int], Setup]] = {
    "char-transformer": char_transformer,
    "char-lstm": char_lstm,
    "digits-cnn": digits_cnn,
}


def prepared(name: str, seed: int, length: float = 1.0) -> Setup:
    """A task with warm-up and a cosine, as people train; `length` times `NUM_STEPS`."""
    setup = TASKS[name](seed)
    num_steps = round(length * NUM_STEPS[name])
    setup.num_steps, setup.max_norm = num_steps, None
    setup.schedule = warm_up_cosine(num_steps // 20, num_steps, 0.02)
    return setup


# -- trouble -----------------------------------------------------------------------------------------------------------

Trouble = Callable[[Setup, random.Random], None]


def _start(setup: Setup, rng: random.Random) -> int:
    """A step near the middle."""
    return rng.randrange(2 * setup.num_steps // 5, setup.num_steps // 2)


def high_rate(setup: Setup, rng: random.Random, factor: float, num_steps: int) -> None:
    """The learning rate, as the scheduler sets it, is `factor` times what it should be for a while."""
    start, schedule = _start(setup, rng), setup.schedule or (lambda step: 1.0)
    setup.schedule = lambda step: schedule(step) * (factor if start <= step < start + num_steps else 1.0)


def bad_block(setup: Setup, rng: random.Random, num_steps: int) -> None:
    """A block of batches of a broken file: inputs and targets have nothing to do with each other.

    Bytes are all one pair that says the opposite of the text; images are a thousand times too bright.
    """
    start = _start(setup, rng)
    byte = rng.randrange(128, 256)

    def broken(number: int, batch: Batch) -> Batch:
        inputs, targets = batch
        if not start <= number < start + num_steps:
            return batch
        if inputs.is_floating_point():
            return 1e3 * inputs, targets.roll(1, 0)
        return inputs, torch.full_like(targets, byte)

    setup.change_batches(broken)


def ruined_weights(setup: Setup, rng: random.Random, kind: str) -> None:
    """One weight matrix is overwritten: with noise, with itself times a hundred, or one element of it with NaN."""
    start = _start(setup, rng)

    @torch.no_grad()
    def ruin(model: nn.Module) -> None:
        chosen = rng.choice([p for p in model.parameters() if p.ndim > 1])
        generator = torch.Generator().manual_seed(setup.seed)
        if kind == "noise":
            chosen.copy_(torch.randn(chosen.shape, generator=generator))
        elif kind == "large":
            chosen.mul_(100.0)
        else:
            chosen.view(-1)[rng.randrange(chosen.numel())] = float("nan")

    setup.events.append((start, ruin))  # type: ignore[arg-type]


TROUBLES: dict[str, Trouble] = {
    "lr × 10 for 30 steps": functools.partial(high_rate, factor=10.0, num_steps=30),
    "lr × 100 for 10 steps": functools.partial(high_rate, factor=100.0, num_steps=10),
    "bad block of 30 batches": functools.partial(bad_block, num_steps=30),
    "weights: noise": functools.partial(ruined_weights, kind="noise"),
    "weights: × 100": functools.partial(ruined_weights, kind="large"),
    "weights: NaN": functools.partial(ruined_weights, kind="nan"),
}


def troubled(name: str, trouble: str, seed: int, length: float = 1.0) -> Setup:
    """A task that trouble comes over; where and when depends on these alone."""
    setup = prepared(name, seed, length)
    TROUBLES[trouble](setup, random.Random(f"{name}/{trouble}/{seed}"))
    return setup
