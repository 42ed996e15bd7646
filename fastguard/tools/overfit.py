"""Checks whether a training can memorise one batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..records import values
from .bench import set_up
from .preflight.evidence import Evidence
from .preflight.losses import Attempt, Fit, Fitting, has_learnt

_SHARE, _SECONDS = 0.1, 20.0


@dataclass(frozen=True)
class OverfitResult:
    """Whether one batch could be memorised, also at other learning rates. `print` it.

    Attributes:
        learnt: whether the loss fell below a tenth of the first at the given learning rate.
        start, end: the loss before and after; NaN if it was not finite.
        num_steps: steps taken.
        lr: of the first group.
        advice: what to do; "" if it was learnt.
    """

    learnt: bool
    start: float
    end: float
    num_steps: int
    lr: float
    advice: str = ""

    def __bool__(self) -> bool:
        return self.learnt

    def __str__(self) -> str:
        head = ("LEARNT" if self.learnt else "NOT LEARNT") + f" in {self.num_steps} steps on one batch"
        return f"{head}\nloss {self.start:.4g} -> {self.end:.4g} at lr {self.lr:.3g}\n{self.advice}".rstrip()


def overfit_one_batch(
    model: torch.nn.Module,
    optimizer: Any,
    batch: Any,
    loss_fn: Callable[..., Any],
    *,
    steps: int = 200,
) -> OverfitResult:
    """Trains on one batch again and again, says whether its loss nearly vanishes, and restores everything.

    If a training cannot memorise one batch, more data will not help. If the given learning rate fails, it tries
    others, and a plain Adam, as `fastguard.preflight` does.

    Args:
        model, optimizer, loss_fn: as for `fastguard.preflight`; they are restored, and no guard sees a step.
        batch: (inputs, targets) or whatever `loss_fn(model, batch)` takes, or a DataLoader for its first batch.
        steps: the most training steps at the given learning rate.

    Raises:
        ValueError: `steps` is not >= 1; the loss is not finite, or has no gradient for any parameter in the optimizer.
        TypeError: `model`, `optimizer` or `loss_fn` is something else.

    Cost: `steps` training steps, or eight times as many; two copies of parameters and optimizer state. Synchronises.

    Source: Karpathy 2019, "A recipe for training neural networks": overfit one batch.

    >>> import torch, fastguard
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    >>> batch = torch.randn(4, 4), torch.randn(4, 1)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    >>> fastguard.tools.overfit_one_batch(model, optimizer, batch, torch.nn.functional.mse_loss).learnt
    True
    """
    values.at_least(1, "steps", steps)
    with set_up(model, optimizer, loss_fn, batch, 1) as (bench, batches):
        evidence = Evidence(bench, batches, max_steps=steps, seconds=_SECONDS)
        _check_trainable(evidence)
        floor = evidence.baseline
        given = Fitting(bench, batches, steps, _SECONDS).attempt(1.0, steps)
        is_learnt = _is_below(given)
        fit = Fit({}) if is_learnt else Fitting(bench, batches, steps, _SECONDS).run(floor)
    tried = sorted((one for factor, one in fit.attempts.items() if factor != 1.0), key=lambda one: one.lr)
    advice = "" if is_learnt else _advice(given, tried, fit.with_adam, floor)
    return OverfitResult(is_learnt, given.start, given.end, given.num_steps, given.lr, advice)


def _is_below(one: Attempt) -> bool:
    """Whether the loss fell below a tenth of its start; a negative loss must have fallen by as much."""
    return has_learnt(one, one.start, 1.0 - _SHARE)


def _check_trainable(evidence: Evidence) -> None:
    first = evidence.first
    if first.error is not None:
        raise first.error
    is_trained = any(id(p) in evidence.in_optimizer for p in evidence.parameters.values())
    problems = {
        f"has {first.num_losses} elements": first.num_losses != 1,
        f"is {first.loss}": not math.isfinite(first.loss),
        "has no gradient": not first.requires_grad,
        "has no parameter in `optimizer`": not is_trained,
    }
    if problem := next((what for what, is_so in problems.items() if is_so), ""):
        raise ValueError(f"the loss of `batch` must be one finite number to train on, and {problem}. Ask preflight.")


def _advice(given: Attempt, others: list[Attempt], with_adam: tuple[Attempt, ...], floor: float | None) -> str:
    best = max(others, key=lambda one: one.gain, default=given)
    start = given.start if floor is None else min(floor, given.start)
    is_better = best.gain > max(given.gain, 0.0) and has_learnt(best, start)
    if is_better and (_is_below(best) or not has_learnt(given, start)):
        return f"A learning rate of {best.lr:.3g} does better: begin there. LearningRateFinder finds one."
    best_adam = max(with_adam, key=lambda one: one.gain, default=given)
    if with_adam and has_learnt(best_adam, start):
        return f"Adam with a learning rate of {best_adam.lr:.3g} learns it: look at the optimizer's settings."
    if has_learnt(given, start):
        return f"It learns, slowly: more than {given.num_steps} steps are needed, or a larger model, or less dropout."
    return "Nothing learns it: look at targets, loss and model. fastguard.preflight checks these."
