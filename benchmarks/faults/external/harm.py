"""Tests of harm: a fault counts only where it hurts. Each set has its own, after its authors' definition.

They train without a guard. What a twin reached is kept for all faults that share it.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from .case import Case, Make, Proof
from .loop import Outcome, Watch, carry_out

THETA, ZETA, ETA, DELTA = 0.7, 0.03, 0.2, 0.01  # AUTOTRAINER's
MARGIN = 0.05


@functools.cache
def outcome_of(make: Make, seed: int, traces: bool = False) -> Outcome:
    """How the plan of `make` ends without a guard."""
    plan = make(seed)
    plan.traces = traces
    return carry_out(plan, Watch())


def qualities(make: Make, num_seeds: int) -> list[float]:
    """What the plan of `make` reaches with each of the first seeds."""
    return [outcome_of(make, seed).quality for seed in range(num_seeds)]


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """Probability that the means differ as much by chance: Welch's t-test, two-sided."""
    if max(stdev(first), stdev(second)) < 1e-9:
        return 0.0 if abs(fmean(first) - fmean(second)) > 1e-9 else 1.0
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():  # of qualities that hardly differ among themselves
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(ttest_ind(first, second, equal_var=False).pvalue)


def effect_size(first: Sequence[float], second: Sequence[float]) -> float:
    """Cohen's d: the difference of the means over the pooled standard deviation."""
    pooled = math.sqrt((stdev(first) ** 2 + stdev(second) ** 2) / 2.0)
    return abs(fmean(first) - fmean(second)) / pooled if pooled > 1e-9 else math.inf


def loses_accuracy(case: Case) -> Proof:
    """Set A, exploding and vanishing gradients, dying ReLUs: the best training accuracy stays below 0.7.

    The twin, which is the sound model of the same data, gets above it.
    """
    assert case.twin is not None
    best = max(outcome_of(case.make, case.seed, True).trace)
    sound = max(outcome_of(case.twin, case.seed, True).trace)
    return Proof(best < THETA <= sound, {"best_accuracy": best, "twin": sound, "limit": THETA})


def oscillates(case: Case) -> Proof:
    """Set A: in at least a fifth of the epochs the training accuracy falls by 0.03 or more from a local maximum to the
    next local minimum, and in the twin in fewer.
    """
    assert case.twin is not None
    drops, limit = num_drops(outcome_of(case.make, case.seed, True).trace)
    sound, of_twin = num_drops(outcome_of(case.twin, case.seed, True).trace)
    return Proof(drops >= limit and sound < of_twin, {"drops": drops, "twin": sound, "limit": limit})


def num_drops(trace: Sequence[float]) -> tuple[int, float]:
    """Falls of at least 0.03 from a local maximum to the local minimum after it, and how many are too many."""
    turns = [trace[0]]
    for before, now, after in zip(trace, trace[1:], trace[2:]):
        if (now - before) * (after - now) <= 0.0 and now != turns[-1]:
            turns.append(now)
    turns.append(trace[-1])
    return sum(high - low >= ZETA for high, low in itertools.pairwise(turns)), ETA * len(trace)


def is_slow(case: Case) -> Proof:
    """Set A: no epoch gains 0.01 of training accuracy, which stays below 0.7; the twin gets above it."""
    assert case.twin is not None
    trace = outcome_of(case.make, case.seed, True).trace
    gain = max((after - before for before, after in itertools.pairwise(trace)), default=0.0)
    sound = max(outcome_of(case.twin, case.seed, True).trace)
    holds = gain < DELTA and max(trace) < THETA <= sound
    return Proof(holds, {"best_gain": gain, "best_accuracy": max(trace), "twin": sound})


def below_base(num_seeds: int = 5) -> Callable[[Case], Proof]:
    """Set B: over so many trainings the mean lies below a base, and so does the recorded seed.

    The base is the twin's mean less the greater of 0.05 and two of its standard deviations.
    """

    def test(case: Case) -> Proof:
        assert case.twin is not None
        found, sound = qualities(case.make, num_seeds), qualities(case.twin, num_seeds)
        base = fmean(sound) - max(MARGIN, 2.0 * stdev(sound))
        holds = fmean(found) < base and found[case.seed] < base
        return Proof(holds, {"mean": fmean(found), "recorded": found[case.seed], "twin": fmean(sound), "base": base})

    return test


def killed(num_seeds: int = 8) -> Callable[[Case], Proof]:
    """Set C: over so many trainings each, the mutant differs from its twin (Welch's t-test p < 0.05, Cohen's d of at
    least 0.5), and for the worse by at least 0.05; so does the recorded seed.
    """

    def test(case: Case) -> Proof:
        assert case.twin is not None
        found, sound = qualities(case.make, num_seeds), qualities(case.twin, num_seeds)
        p, d = welch(found, sound), effect_size(found, sound)
        limit = fmean(sound) - MARGIN
        holds = p < 0.05 and d >= 0.5 and fmean(found) < limit and found[case.seed] < limit
        figures = {"mean": fmean(found), "recorded": found[case.seed], "twin": fmean(sound), "p": p, "d": min(d, 1e9)}
        return Proof(holds, figures)

    return test


def worse(num_seeds: int = 4, margin: float = MARGIN) -> Callable[[Case], Proof]:
    """Sets E and F: over so many trainings the mean is worse than the twin's by the margin, the recorded seed too."""

    def test(case: Case) -> Proof:
        assert case.twin is not None
        found, sound = qualities(case.make, num_seeds), qualities(case.twin, num_seeds)
        limit = fmean(sound) - margin
        holds = fmean(found) < limit and found[case.seed] < limit
        return Proof(holds, {"mean": fmean(found), "recorded": found[case.seed], "twin": fmean(sound)})

    return test
