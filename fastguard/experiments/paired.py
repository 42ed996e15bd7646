"""The statistics of an experiment: the losses of two runs that differ in one thing, step by step. Needs no torch.

Both runs take the same batches with the same random numbers, and each loss is that of a batch before the step on it
(prequential), so that a difference at a step is a difference between two models on the same unseen batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_STEPS = 8  # that are compared
LEAST_T = 3.0
LEAST_SHARE = 0.02
_NUM_PARTS = 6
_WIDTH = 5.0  # median absolute deviations; differences further out count as if they lay there
HELPS, HARMS, SAME, UNKNOWN = "helps", "harms", "no difference", "not known"


@dataclass(frozen=True)
class Comparison:
    """How the loss of an arm differs from that of the base.

    Attributes:
        verdict: "helps", "harms", "no difference", or "not known" if there are too few steps to tell.
        effect: how much lower the arm's loss is, on average; negative if it is higher. Inf if the base diverged alone,
            -Inf if the arm did.
        t: the effect divided by its standard error.
        num_steps: number of steps of each run, up to the first loss of either that is not finite.
        share: the effect as a share of the base's mean loss.
        error: the standard error of the effect, which includes the noise between two seeds if that is known.
    """

    verdict: str
    effect: float
    t: float
    num_steps: int
    share: float
    error: float = 0.0

    @property
    def ratio(self) -> float:
        """The likelihood ratio of a cause whose remedy the arm is: P(this verdict | cause) / P(this verdict | other).

        The figures are round: see "Experiments" in benchmarks/README.md for the counts that they rest on.
        """
        return _RATIOS[self.verdict]

    @property
    def null_ratio(self) -> float:
        """The likelihood ratio of targets that do not follow from the inputs, if the arm permuted these."""
        return _NULL_RATIOS[self.verdict]

    def text(self, change: str) -> str:
        """A sentence on the result.

        >>> compare([2.0, 2.1] * 20, [1.5, 1.7] * 20).text("the learning rate times 10")
        'Tried: with the learning rate times 10 the loss is 0.45 lower after 40 steps (t = 48.5).'
        """
        if math.isinf(self.effect):
            how = "stays finite; without, it does not" if self.effect > 0.0 else "becomes NaN or Inf"
            return f"Tried: with {change} the loss {how} after {self.num_steps} steps."
        if self.verdict == UNKNOWN:
            return f"Tried: with {change}, but there were only {self.num_steps} steps to compare."
        side = "lower" if self.effect >= 0.0 else "higher"
        told = f"the loss is {abs(self.effect):.2g} {side} after {self.num_steps} steps (t = {abs(self.t):.1f})"
        return f"Tried: with {change} {told}{', no clear difference' if self.verdict == SAME else ''}."


_RATIOS = {HELPS: 4.0, SAME: 0.5, HARMS: 0.25, UNKNOWN: 1.0}
_NULL_RATIOS = {HELPS: 1.0, SAME: 2.0, HARMS: 0.2, UNKNOWN: 1.0}  # what is learned by heart is harmed, too


def compare(
    base: Sequence[float],
    arm: Sequence[float],
    *,
    skip: int | None = None,
    noise: float = 0.0,
    is_null: bool = False,
) -> Comparison:
    """Compares the losses of two runs, step by step.

    The mean of the paired differences, base minus arm, and its t: mean / (standard deviation / sqrt(n)). Differences
    that lie further than five median absolute deviations from their median count as if they lay there, so that one
    spike decides nothing. A verdict other than "no difference" needs |t| >= 3, and twice the noise or 2 % of the loss.

    Args:
        base, arm: the loss of each step, in order. NaN and Inf are losses that diverged.
        skip: number of steps to leave out at the beginning, when the change has had no time to show. None: a quarter.
        noise: how far two runs of the base lie apart that differ in their seed only: `noise_between`. 0: not known.
        is_null: the arm is expected to harm. A harm of any size counts, from a t of 3 or of 0.4 sqrt(n) on: differences
            of neighbouring steps are alike.

    >>> found = compare([1.0, 1.2, 1.1, 1.3] * 3, [0.9, 1.0, 1.0, 1.1] * 3, skip=0)
    >>> found.verdict, round(found.effect, 2), round(found.t, 2), found.num_steps
    ('helps', 0.15, 9.95, 12)
    """
    num_base, num_arm = _num_finite(base), _num_finite(arm)
    shared = min(num_base, num_arm)
    if num_base < min(num_arm, len(base)):
        return Comparison(HELPS, math.inf, math.inf, num_base, math.inf)
    if num_arm < min(num_base, len(arm)):
        return Comparison(HARMS, -math.inf, -math.inf, num_arm, -math.inf)
    first = shared // 4 if skip is None else skip
    differences = [b - a for b, a in zip(base[first:shared], arm[first:shared])]
    if len(differences) < LEAST_STEPS:
        return Comparison(UNKNOWN, 0.0, 0.0, shared, 0.0)
    held = _held_in(differences)
    effect = statistics.fmean(held)
    deviation = statistics.stdev(held)
    level = statistics.fmean(map(abs, base[first:shared]))
    error = deviation / math.sqrt(len(held))
    t = _ratio(effect, error)
    share = _ratio(effect, level)
    is_large = is_null or (abs(effect) >= 2.0 * noise if noise else abs(share) >= LEAST_SHARE)
    is_clear = is_large and abs(t) >= (max(LEAST_T, 0.4 * math.sqrt(len(held))) if is_null else LEAST_T)
    verdict = SAME if not is_clear else HELPS if effect > 0.0 else HARMS
    return Comparison(verdict, effect, t, shared, share, math.hypot(error, noise))


def noise_between(base: Sequence[float], other: Sequence[float]) -> float:
    """How far the losses of two runs lie apart that differ in their seed only.

    The root mean square, over sixths of the compared steps, of the difference of the means.

    >>> round(noise_between([1.0] * 40, [1.1] * 40), 3)
    0.1
    """
    shared = min(_num_finite(base), _num_finite(other))
    differences = _held_in([a - b for a, b in zip(base[shared // 4 : shared], other[shared // 4 : shared])])
    length = max(len(differences) // _NUM_PARTS, 1)
    parts = [differences[start : start + length] for start in range(0, len(differences), length)]
    return math.sqrt(statistics.fmean(statistics.fmean(part) ** 2 for part in parts)) if parts else 0.0


def _num_finite(losses: Sequence[float]) -> int:
    """Number of losses before the first that is not finite."""
    return next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))


def _held_in(differences: Sequence[float]) -> list[float]:
    """`differences`, brought in to five median absolute deviations from their median; as they are where that is 0."""
    if not differences:
        return []
    middle = statistics.median(differences)
    width = _WIDTH * statistics.median(abs(one - middle) for one in differences)
    if not width:
        return list(differences)
    return [min(max(one, middle - width), middle + width) for one in differences]


def _ratio(value: float, by: float) -> float:
    """`value / by`; Inf with the sign of `value` where `by` is 0, and 0 where both are."""
    return value / by if by else math.copysign(math.inf, value) if value else 0.0
