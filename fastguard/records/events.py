"""Events of a run as dicts: recoveries, and differences between ranks and replicas."""

from __future__ import annotations

from typing import TypedDict

from .codec import Count

MAX_RANKS = 16


class _RecoveryDetails(TypedDict, total=False):
    to: Count
    num_batches: Count
    until: Count
    num_tensors: Count
    lr_factor: float


class RecoveryEvent(_RecoveryDetails):
    """One event of a recovery: "rollback", "failed", "new-level" or "recomputed", with its reason.

    The step is required; the step to which the run went back (`to`) and the other details depend on the kind.
    """

    kind: str
    reason: str
    step: Count


class BadRank(TypedDict):
    """A rank whose own gradients were not finite: the first such step and tensor, and the number of such steps."""

    rank: Count
    num_ranks: Count
    step: Count
    num_nans: Count
    num_infs: Count
    num_steps: Count
    name: str


class OddRank(TypedDict):
    """A rank whose own gradient norm differs: it was recently `ratio` times the median of all ranks."""

    rank: Count
    num_ranks: Count
    step: Count
    last_step: Count
    num_steps: Count
    ratio: float


class ReplicaDifference(TypedDict):
    """Gradients or weights (`what`) that differed between replicas.

    `name` is the first of `num_tensors` tensors. `ranks` are the minority; empty if there is none.
    """

    step: Count
    num_tensors: Count
    num_ranks: Count
    what: str
    name: str
    ranks: list[Count]


class Experiment(TypedDict):
    """What an experiment at `step` said of `causes`: `ratio` multiplies their odds, `text` is a sentence for a report.

    `arm` is what was changed, `verdict` whether that "helps", "harms", made "no difference" or is "not known".
    """

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
    if kind == "recomputed":
        same = "gave the same bits, so the cause is the data or the model"
        other = f"gave other bits in {event.get('num_tensors', 0)} tensors, so the hardware has a transient fault"
        return f"recomputing the gradients of step {step} {other if event.get('num_tensors') else same}"
    if kind == "new-level":
        return f"accepted a new level of the loss at step {step}, after {event['num_batches']} skipped batches"
    if kind == "failed":
        restored = f"; restored step {event['to']}" if "to" in event else ""
        return f"gave up at step {step} because {event['reason']}{restored}"
    said = f"rolled back from {step} to {event['to']} because {event['reason']}; {event['num_batches']} batches skipped"
    factor = event.get("lr_factor", 1.0)
    return said if factor == 1.0 else f"{said}; learning rate x {factor:g}, rising back until step {event['until']}"
