"""The cases: which fault is planted in which training, and which trainings are healthy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.lab.fault import Fault
from benchmarks.lab.faults import FAULTS
from benchmarks.lab.plant import Planted
from benchmarks.lab.tasks import TASKS as TEXT_TASKS
from benchmarks.lab.training import Setup

from .digits import TASKS as DIGITS_TASKS
from .healthy import HEALTHY

TUNE_SEEDS = (0, 1)
REPORT_SEEDS = (100, 101)
TASKS: dict[str, Callable[[int], Setup]] = {**DIGITS_TASKS, **TEXT_TASKS}


@dataclass(frozen=True)
class Case:
    """One training of the suite, without its seed.

    Attributes:
        name: unique.
        make: the run without a fault, by seed.
        fault: what is planted; None for a healthy run.
        sound: the healthy case that is the same run without the fault; None for a healthy run.
    """

    name: str
    make: Callable[[int], Setup]
    fault: Fault | None = None
    sound: str | None = None

    def prepare(self, seed: int) -> tuple[Setup, Planted | None]:
        """The run, with its fault planted at a place and a step that `seed` chooses."""
        setup = self.make(seed)
        if self.fault is None:
            return setup, None
        return setup, self.fault.plant(setup, random.Random(f"{self.name}/{seed}"))


_PLACES: dict[str, tuple[str, ...]] = {
    "lr": ("digits-mlp-sgd", "char-transformer", "digits-cnn"),
    "lr-x100": ("digits-mlp", "char-lstm"),
    "lr-jump": ("digits-mlp", "char-lstm", "digits-autoencoder"),
    "warm-up": ("digits-cnn-warmed-up", "char-mlp-warmed-up"),
    "lr-small": ("digits-mlp", "char-lstm"),
    "scheduler": ("digits-cnn", "char-transformer"),
    "accumulation": ("digits-accumulating", "char-mlp-accumulating"),
    "nan": ("digits-mlp", "digits-cnn", "digits-autoencoder"),
    "inf-weights": ("digits-mlp", "char-lstm", "char-transformer"),
    "fp16": ("digits-mlp", "char-mlp"),
    "fp16-scaled": ("digits-mlp", "char-mlp"),
    "rnn": ("char-rnn",),
    "sigmoid": ("digits-mlp", "char-mlp"),
    "dead-relu": ("digits-mlp", "digits-cnn", "digits-autoencoder"),
    "tanh": ("digits-autoencoder", "char-mlp"),
    "init-small": ("digits-mlp-sgd", "digits-autoencoder"),
    "init-large": ("digits-mlp", "digits-cnn", "char-mlp"),
    "layer-large": ("digits-autoencoder", "char-mlp"),
    "frozen": ("digits-mlp", "char-transformer"),
    "missing": ("digits-autoencoder", "char-lstm"),
    "weight-decay": ("digits-mlp", "char-transformer"),
    "dropout": ("digits-mlp", "digits-autoencoder"),
    "overfit": ("char-transformer", "char-lstm"),
    "labels": ("digits-mlp", "digits-cnn"),
    "bad-epoch": ("digits-mlp", "digits-cnn"),
    "bad-batch": ("digits-mlp", "digits-autoencoder", "char-lstm"),
    "no-zero-grad": ("digits-mlp", "char-mlp"),
    "stale": ("digits-cnn", "char-mlp"),
    "val-train-mode": ("char-mlp-dropout",),
    "overwritten": ("digits-mlp", "numbers-mlp"),
    "schedule-short": ("digits-mlp", "char-mlp"),
    "eps": ("digits-mlp", "char-mlp"),
    "clipped-away": ("digits-mlp-sgd", "numbers-mlp"),
    "softmax-twice": ("digits-mlp", "char-mlp"),
    "wrong-loss": ("regression-mlp",),
    "inputs-large": ("digits-mlp", "numbers-mlp"),
    "targets-large": ("regression-mlp",),
    "preprocessing": ("digits-mlp", "numbers-mlp"),
    "outliers": ("digits-mlp", "numbers-relu-mlp"),
    "same-batch": ("digits-mlp", "char-mlp"),
    "one-class": ("digits-cnn", "numbers-mlp"),
    "bit-flip": ("numbers-mlp", "digits-mlp-sgd"),
    "batch-norm": ("normed-mlp",),
}
FAULTY: tuple[Case, ...] = tuple(
    Case(f"{name}@{task}", TASKS[task], FAULTS[name], task) for name, tasks in _PLACES.items() for task in tasks
)
SOUND: tuple[Case, ...] = tuple(Case(name, make) for name, make in HEALTHY.items())
CASES: dict[str, Case] = {case.name: case for case in (*FAULTY, *SOUND)}
