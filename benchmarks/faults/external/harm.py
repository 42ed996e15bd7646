"""The test of harm: a fault counts only where it hurts.

It trains without a guard. What a twin reached is kept for all faults that share it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import fmean

from .case import Case, Make, Proof
from .loop import Watch, carry_out

MARGIN = 0.05


@functools.cache
def quality_of(make: Make, seed: int) -> float:
    """What the plan of `make` reaches without a guard."""
    return carry_out(make(seed), Watch()).quality


def worse(num_seeds: int) -> Callable[[Case], Proof]:
    """Over so many trainings the mean is worse than the twin's by `MARGIN`, and so is the recorded seed."""

    def test(case: Case) -> Proof:
        assert case.twin is not None
        found, sound = ([quality_of(make, seed) for seed in range(num_seeds)] for make in (case.make, case.twin))
        limit = fmean(sound) - MARGIN
        holds = fmean(found) < limit and found[case.seed] < limit
        return Proof(holds, {"mean": fmean(found), "recorded": found[case.seed], "twin": fmean(sound)})

    return test
