"""What counts as success, each as one function of figures: written, and tested, before anything was run.

The limits are in `MEASURES`; `table.py` lays the figures beside them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Results = dict[str, Any]
ACTED, DAMPED = 1e-9, 0.1  # shares of the norm taken away, above which a rule has acted, or damped a step
MOST_UPDATE = 2.0  # times the median
WITHIN = 0.02  # of the clean run's loss
Ending = Literal["brought through", "gave up", "stopped", "silent"]


# -- rules, replayed ---------------------------------------------------------------------------------------------------


def num_acted(before: Sequence[float], after: Sequence[float]) -> int:
    """Steps whose norm a rule made smaller, by however little; skipped ones too."""
    return sum(a < b * (1.0 - ACTED) for b, a in zip(before, after, strict=True))


def num_damped(before: Sequence[float], after: Sequence[float], steps: Iterable[int]) -> int:
    """Those of `steps` whose norm a rule made smaller by more than a tenth; skipped ones too."""
    return sum(after[i] < before[i] * (1.0 - DAMPED) for i in steps)


def largest_update(after: Sequence[float], steps: Iterable[int], usual: float) -> float:
    """The largest norm that went on to the optimizer in `steps`, as a multiple of the `usual` one."""
    return max(after[i] for i in steps) / usual if usual > 0.0 else math.inf


def share_acted(healthy: Iterable[Results]) -> float:
    """Of all steps of all healthy runs the share on which a rule acted."""
    runs = list(healthy)
    return sum(run["num_acted"] for run in runs) / sum(run["num_steps"] for run in runs)


def share_held(planted: Iterable[Results], *kinds: str) -> float:
    """Of the runs with trouble of `kinds` the share whose largest update was at most `MOST_UPDATE` times the usual."""
    found = [run["largest"] <= MOST_UPDATE for run in planted if run["kind"] in kinds]
    return sum(found) / len(found) if found else math.nan


def steps_damped(levels: Iterable[Results | None], share: float = 0.95) -> float:
    """So many steps were damped after a lasting change in `share` of the runs, at the most."""
    numbers = sorted(run["num_damped"] for run in levels if run is not None)
    return float(numbers[max(0, math.ceil(share * len(numbers)) - 1)]) if numbers else math.nan


# -- trainings ---------------------------------------------------------------------------------------------------------


def is_exploded(losses: Sequence[float], final: float) -> bool:
    """Whether a training came to nothing: a loss or the validation loss is not finite, or that is no lower at the end
    than the loss was in the beginning."""
    return not all(map(math.isfinite, losses)) or not final < losses[0]


def has_arrived(final: float, clean: float) -> bool:
    """Whether a validation loss is within `WITHIN` of the clean run's, or below it; never where it is not finite."""
    return final <= clean + WITHIN * abs(clean)


def ending(run: Results, clean: float) -> Ending:
    """How a run in trouble ended.

    "brought through": by itself, as good as the clean one. "gave up": with `RecoveryFailedError`. "stopped": by any
    other error. "silent": it went on to its end, and nobody said that it had come to less.
    """
    if run["error"] is not None:
        return "gave up" if run["error"] == "RecoveryFailedError" else "stopped"
    return "brought through" if has_arrived(run["final"], clean) else "silent"


def diverges(unprotected: Results, clean: float) -> bool:
    """Whether trouble is worth the name: without any measure the run is not as good as the clean one."""
    return unprotected["error"] is not None or not has_arrived(unprotected["final"], clean)


def share_ending(endings: Iterable[str], *which: str) -> float:
    """The share of `endings` that are one of `which`."""
    found = list(endings)
    return sum(one in which for one in found) / len(found) if found else math.nan


def num_rollbacks(runs: Iterable[Results]) -> int:
    """Rollbacks of all runs together."""
    return sum(run["num_rollbacks"] for run in runs)


def num_different(runs: Iterable[Results]) -> int:
    """Runs whose parameters, buffers and losses are not bit for bit those of the same run without recovery."""
    return sum(run["digest"] != run["digest_without"] for run in runs)


# -- cost --------------------------------------------------------------------------------------------------------------


def snapshot_share(snapshot_us: float, step_us: float, every: int = 50) -> float:
    """What a snapshot every `every` steps adds to a step, as a share of it."""
    return snapshot_us / (every * step_us)


def rollback_steps(rollback_us: float, optimizer_us: float) -> float:
    """A rollback in steps of the optimizer alone."""
    return rollback_us / optimizer_us


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A row of the table.

    Attributes:
        key: where its figure stands in the results' "measures".
        limit: what is to be reached; at least that with `is_more_better`, else at most.
        unit: how the figure is written: "%" for a share, "" for a number.
    """

    key: str
    title: str
    limit: float
    unit: str = ""
    is_more_better: bool = False

    def is_reached(self, value: float | None) -> bool | None:
        """Whether `value` keeps to the limit; None where it was not measured."""
        if value is None or math.isnan(value):
            return None
        return value >= self.limit if self.is_more_better else value <= self.limit


MEASURES = (
    Measure("acted", "healthy runs: steps that are acted on", 0.001, "%"),
    Measure("held", "planted spikes × 3 … 20 and bursts of eight: largest update ≤ 2 × the median", 0.99, "%", True),
    Measure("damped", "steps damped by over a tenth after a lasting change by 3, in 95 % of runs", 20),
    Measure(
        "through", "diverging runs that end within 2 % of the clean run's loss, untouched by hand", 0.90, "%", True
    ),
    Measure("silent", "diverging runs that end worse, and nobody said so", 0),
    Measure("rollbacks", "healthy runs with recovery: rollbacks", 0),
    Measure("different", "healthy runs with recovery: runs with another bit than without", 0),
    Measure("snapshot", "a snapshot every 50 steps, share of a step, transformer of 4.8M", 0.01, "%"),
    Measure("snapshot-gpt2", "the same, GPT-2 124M", 0.01, "%"),
    Measure("rollback", "a rollback, in steps of the optimizer alone", 2),
    Measure("allocations", "tensors allocated by a rollback", 0),
    Measure("per-tensor", "a step with a policy of each tensor / with GlobalNorm, 300 tensors", 1.1),
)


def policy_measures(asked: Sequence[Results]) -> dict[str, float]:
    """The measures of one rule, from what it did on each trace."""
    found = [run for one in asked for run in one["planted"]]
    return {
        "acted": share_acted(one["healthy"] for one in asked),
        "held": share_held(found, "spike", "burst"),
        "held-spikes": share_held(found, "spike"),
        "held-bursts": share_held(found, "burst"),
        "held-early": share_held(found, "early spike"),
        "damped": steps_damped(one["level"] for one in asked),
        "damped-median": steps_damped((one["level"] for one in asked), 0.5),
        "num_traces": len(asked),
        "num_steps": sum(one["healthy"]["num_steps"] for one in asked),
        "num_planted": len(found),
    }


def diverging_measures(endings: Sequence[str]) -> dict[str, float]:
    """The measures of one protection, from how its runs in trouble ended."""
    return {
        "through": share_ending(endings, "brought through"),
        "gave-up": share_ending(endings, "gave up"),
        "stopped": share_ending(endings, "stopped"),
        "silent": float(sum(one == "silent" for one in endings)),
        "num_runs": len(endings),
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and largest."""
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}
