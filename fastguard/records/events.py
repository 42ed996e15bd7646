"""Steps and events of a run: what a history keeps about single steps, recoveries, and differences between ranks."""

from __future__ import annotations

import math
from typing import NamedTuple, TypedDict

from .codec import Count

MAX_RANKS = 16
_isfinite = math.isfinite


class Entry(NamedTuple):
    """One step in a window. Unknown numbers are None; `norm` is before clipping and may be NaN or Inf."""

    step: int
    norm: float
    clip_coef: float
    skipped: bool
    loss: float | None
    val_loss: float | None
    lr: float | None
    loss_scale: float | None
    overhead_s: float | None

    @property
    def clipped_norm(self) -> float:
        """The norm after clipping."""
        return self.norm * self.clip_coef

    @property
    def is_clean(self) -> bool:
        """Whether the step may enter a baseline: it was not skipped, and its norm is finite."""
        return not self.skipped and _isfinite(self.norm)


class NonFiniteEvent(NamedTuple):
    """A step whose gradients contained NaN or Inf, or whose norm overflowed. `names` are the first eight of
    `num_tensors` bad tensors, in backward order: the first is the likeliest origin."""

    step: int
    names: tuple[str, ...]
    num_tensors: int
    num_nans: int
    num_infs: int
    skipped: bool
    loss_scale: float | None


class LoneElement(NamedTuple):
    """A clean step at which one element was nearly all of the gradient: its tensor, |g|, and the tensor's usual norm.
    `usual` is 0.0 if there was no earlier sample of the tensor."""

    step: int
    name: str
    value: float
    usual: float


class Total(NamedTuple):
    """All gradient elements of a clean step together: their sum, the largest |g|, and an upper bound of |sum|. `names`
    are the first four tensors with an element as large as the largest."""

    step: int
    sum: float
    largest: float
    bound: float
    names: tuple[str, ...] = ()


class Validation(NamedTuple):
    """One validation: its step and loss, and the smoothed training loss at that step (NaN if there was none)."""

    step: int
    val_loss: float
    train_loss: float


class _RecoveryDetails(TypedDict, total=False):
    to: Count
    num_batches: Count
    until: Count
    lr_factor: float


class RecoveryEvent(_RecoveryDetails):
    """One event of a recovery: "rollback", "failed" or "new-level", with its reason. The step is required; the step to
    which the run went back (`to`) and the other details depend on the kind."""

    kind: str
    reason: str
    step: Count


class BadRank(TypedDict):
    """A rank whose part of the gradients was not finite: the first such step and tensor, and their number of steps."""

    rank: Count
    num_ranks: Count
    step: Count
    num_nans: Count
    num_infs: Count
    num_steps: Count
    name: str


class Experiment(TypedDict):
    """What an experiment at `step` said of `causes`: `ratio` multiplies their odds, `text` is a sentence for a report.
    `arm` is what was changed, `verdict` whether that "helps", "harms", made "no difference" or is "not known"."""

    step: Count
    arm: str
    causes: list[str]
    verdict: str
    effect: float
    t: float
    num_steps: Count
    ratio: float
    text: str


def describe_recovery(event: RecoveryEvent) -> str:
    """A recovery in words.

    >>> describe_recovery({"kind": "rollback", "step": 9, "to": 5, "reason": "the loss was NaN", "num_batches": 5})
    'rolled back from 9 to 5 because the loss was NaN; 5 batches skipped'
    """
    step, kind = event["step"], event["kind"]
    if kind == "new-level":
        return f"accepted a new level of the loss at step {step}, after {event['num_batches']} skipped batches"
    if kind == "failed":
        restored = f"; restored step {event['to']}" if "to" in event else ""
        return f"gave up at step {step} because {event['reason']}{restored}"
    said = f"rolled back from {step} to {event['to']} because {event['reason']}; {event['num_batches']} batches skipped"
    factor = event.get("lr_factor", 1.0)
    return said if factor == 1.0 else f"{said}; learning rate x {factor:g}, rising back until step {event['until']}"
