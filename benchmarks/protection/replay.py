"""Asks rules what they would have done: in healthy trainings, and with trouble planted in them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from . import criteria
from .norms import AFTER_LEVEL, LATE, PAST, Plant, Trace, plants
from .rivals import Rule

LEVEL = 3.0  # times


def replay(rule: Rule, trace: Trace) -> tuple[list[float], list[float]]:
    """The total norms of all steps, before and after what `rule` does to the gradients; 0 after a skipped step."""
    before, after = [], []
    for norms, loss in zip(trace.norms, trace.losses):
        factors = rule.factors(norms, loss)
        before.append(math.hypot(*norms))
        after.append(math.hypot(*(factor * norm for factor, norm in zip(factors, norms, strict=True))))
    return before, after


def healthy(rule: Rule, trace: Trace) -> dict[str, Any]:
    """On how many steps of a healthy training `rule` acts."""
    before, after = replay(rule, trace)
    return {"trace": trace.name, "num_steps": len(before), "num_acted": criteria.num_acted(before, after)}


def planted(rule: Rule, trace: Trace, plant: Plant) -> dict[str, Any]:
    """The largest update among the planted steps, as a multiple of the median before them."""
    _, after = replay(rule, trace.scaled(plant.steps, plant.factor))
    usual = trace.usual(plant.start)
    return {
        "trace": trace.name,
        "kind": plant.kind,
        "factor": plant.factor,
        "start": plant.start,
        "largest": criteria.largest_update(after, plant.steps, usual),
    }


def level(make: Callable[[], Rule], trace: Trace, rng: random.Random) -> dict[str, Any] | None:
    """How many more steps a rule damps once all norms are `LEVEL` times as large for good, in a trace prolonged by
    steps drawn from its end, than without that; None where it is too short."""
    if len(trace) < LATE + PAST // 2:
        return None
    start = rng.randrange(LATE, len(trace) - PAST // 4)
    long = trace.prolonged(AFTER_LEVEL, rng)
    steps = range(start, len(long))
    changed, unchanged = (criteria.num_damped(*replay(make(), one), steps) for one in (long.scaled(steps, LEVEL), long))
    return {"trace": trace.name, "start": start, "num_damped": max(0, changed - unchanged)}


def ask(make: Callable[[], Rule], trace: Trace, seed: int = 0) -> dict[str, Any]:
    """All of the above for one rule on one trace. The trouble depends on trace and `seed` alone: all rules meet the
    same."""
    rng = random.Random(f"{trace.name}/{seed}")
    chosen = plants(trace, rng)
    return {
        "healthy": healthy(make(), trace),
        "planted": [planted(make(), trace, plant) for plant in chosen],
        "level": level(make, trace, rng),
    }


def is_calm(trace: Trace) -> bool:
    """Whether none of its own norms, from `LATE` on, is above twice the median of those before: only there can a rule
    leave all healthy steps alone and hold all planted ones below that."""
    return all(trace.total(step) <= criteria.MOST_UPDATE * trace.usual(step) for step in range(LATE, len(trace)))
