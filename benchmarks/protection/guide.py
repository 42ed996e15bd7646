"""The guide's table as an experiment: who explodes without measures, with clipping, with a warm-up, with everything.

The learning rate of each task is the lowest of 0.1, 0.2, 0.4, … at which most trainings explode when nothing is done;
found with other seeds than those that are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lab import tasks as text
from benchmarks.lab.training import Setup, warm_up_cosine

from ..faults import digits
from . import criteria, tasks
from .rivals import FixedNorm
from .training import Guarded, Protection, Ruled, everything, train

NUM_STEPS, NUM_WARM = 200, 60
MODELS: dict[str, Callable[[int], Setup]] = {  # without batch norm, which stands any learning rate
    "char-transformer": tasks.char_transformer,
    "char-mlp": text.char_mlp,
    "digits-cnn": digits.digits_cnn,
}
HOT = {"char-transformer": 0.8, "char-mlp": 0.8, "digits-cnn": 0.4}  # learning rates of SGD with momentum 0.9
NOTHING, CLIPPING, WARMED_UP, EVERYTHING = "nothing", "clipping", "clipping + warm-up", "everything"
MEASURES: dict[str, tuple[Callable[[], Protection], bool]] = {  # and whether with a warm-up
    NOTHING: (Protection, False),
    CLIPPING: (lambda: Ruled(FixedNorm(1.0)), False),
    WARMED_UP: (lambda: Ruled(FixedNorm(1.0)), True),
    EVERYTHING: (everything, True),
}
PRECISIONS: dict[str, tuple[torch.dtype | None, bool]] = {  # of autocast, and whether with a GradScaler
    "float32": (None, False),
    "float16 without scaler": (torch.float16, False),
    "float16 with scaler": (torch.float16, True),
}


def _setup(task: str, seed: int, num_steps: int) -> Setup:
    setup = MODELS[task](seed)
    setup.num_steps, setup.max_norm, setup.schedule = num_steps, None, None
    return setup


def run_measure(
    task: str, measure: str, seed: int, num_steps: int = NUM_STEPS, lr: float | None = None
) -> dict[str, Any]:
    """One training with a learning rate that is too high, under a measure."""
    make, is_warmed_up = MEASURES[measure]
    setup = _setup(task, seed, num_steps)
    setup.make_optimizer, setup.lr = text.sgd, HOT[task] if lr is None else lr
    if is_warmed_up:
        setup.schedule = warm_up_cosine(NUM_WARM, NUM_WARM, 1.0)
    return _told(train(setup, make()))


def run_precision(task: str, precision: str, seed: int, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """One training at its own learning rate, with the forward pass in a precision, under a guard that skips."""
    setup = _setup(task, seed, num_steps)
    setup.autocast, setup.scales_loss = PRECISIONS[precision]
    return _told(train(setup, Guarded(max_norm=1.0)))


def _told(run: dict[str, Any]) -> dict[str, Any]:
    losses = run.pop("losses")
    return {**run, "exploded": criteria.is_exploded(losses, run["final"])}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the runs of all seeds."""
    whole = [run["final"] for run in runs if not run["exploded"]]
    return {
        "num_runs": len(runs),
        "num_exploded": sum(run["exploded"] for run in runs),
        "num_raised": sum(run["error"] is not None for run in runs),
        "num_skipped": sum(run["num_skipped"] for run in runs),
        "num_rollbacks": sum(run["num_rollbacks"] for run in runs),
        "final": criteria.spread(whole) if whole else None,  # of those that did not explode
    }
