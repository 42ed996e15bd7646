"""The statistics of an experiment: losses of two runs on the same batches and random numbers, before each step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..diagnosis import UNKNOWN as NO_CAUSE
from .arms import Arm

LEAST_STEPS = 8  # that are compared
LEAST_T = 3.0
LEAST_SHARE = 0.02
_LARGE_SHARE = 0.1  # that counts if two seeds agree, however far apart their runs are
_NUM_PARTS = 6
_WIDTH = 5.0  # median absolute deviations; differences further out count as if they lay there
HELPS, HARMS, SAME, UNKNOWN, NOT_TRIED = "helps", "harms", "no difference", "not known", "not tried"
# P(this verdict | cause) / P(this verdict | other): of a cause whose remedy the arm is; and, if the arm permuted the
# inputs, of targets that do not follow from them. Whatever keeps a model from learning makes permuting harmless, and
# what is learned by heart is harmed, too. The figures are round: see "Experiments" in benchmarks/README.md for counts.
_RATIOS = {HELPS: (4.0, 1.0), SAME: (0.5, 1.0), HARMS: (0.25, 0.2), UNKNOWN: (1.0, 1.0)}
_MOVES = 1e-4  # of the loss; where an arm changes less, the model does not move at all


@dataclass(frozen=True)
class Comparison:
    """How the loss of an arm differs from that of the base."""

    verdict: str  # "helps", "harms", "no difference", or "not known" if there are too few steps to tell
    # how much lower the arm's loss is, on average; negative if it is higher. Inf if the base diverged alone, -Inf if
    # the arm did
    effect: float
    t: float  # the effect divided by its standard error
    num_steps: int  # number of steps of each run, up to the first loss of either that is not finite
    share: float  # the effect as a share of the base's mean loss
    error: float = 0.0  # the standard error of the effect, which includes the noise between two seeds if that is known

    def ratio(self, *, is_null: bool) -> float:
        """The likelihood ratio of the cause whose remedy the arm is; of wrong targets, if the arm `is_null`."""
        return 1.0 if abs(self.share) < _MOVES else _RATIOS[self.verdict][is_null]

    def text(self, change: str) -> str:
        """A sentence on the result; `change` follows "with"."""
        if math.isinf(self.effect):
            how = "stays finite; without, it does not" if self.effect > 0.0 else "becomes NaN or Inf"
            return f"Tried: with {change} the loss {how} after {self.num_steps} steps."
        if self.verdict == UNKNOWN:
            return f"Tried: with {change}, but there were only {self.num_steps} steps to compare."
        side = "lower" if self.effect >= 0.0 else "higher"
        told = f"the loss is {abs(self.effect):.2g} {side} after {self.num_steps} steps (t = {abs(self.t):.1f})"
        return f"Tried: with {change} {told}{', no clear difference' if self.verdict == SAME else ''}."


def _diverged(side: float, num_steps: int) -> Comparison:
    return Comparison(HELPS if side > 0.0 else HARMS, side * math.inf, side * math.inf, num_steps, side * math.inf)


def compare(base: Sequence[float], arm: Sequence[float], *, noise: float = 0.0, is_null: bool = False) -> Comparison:
    """Compares the losses of two runs, step by step.

    The first quarter, when the change has had no time to show, is left out. Of the others: the mean of the paired
    differences, base minus arm, and its t: mean / (standard deviation / sqrt(n)). Differences
    that lie further than five median absolute deviations from their median count as if they lay there, so that one
    spike decides nothing. A verdict other than "no difference" needs |t| >= 3, and twice the noise or 2 % of the loss.

    Args:
        base, arm: the loss of each step, in order. NaN and Inf are losses that diverged.
        noise: how far two runs of the base lie apart that differ in their seed only: `noise_between`. 0: not known.
        is_null: the arm is expected to harm. A harm of any size counts, from a t of 3 or of 0.4 sqrt(n) on: differences
            of neighbouring steps are alike.
    """
    num_base, num_arm = _num_finite(base), _num_finite(arm)
    shared = min(num_base, num_arm)
    if num_base < min(num_arm, len(base)):
        return _diverged(1.0, num_base)
    if num_arm < min(num_base, len(arm)):
        return _diverged(-1.0, num_arm)
    first = shared // 4
    held = _held_in([b - a for b, a in zip(base[first:shared], arm[first:shared])])
    if len(held) < LEAST_STEPS:
        return Comparison(UNKNOWN, 0.0, 0.0, shared, 0.0)
    error, root = statistics.stdev(held) / math.sqrt(len(held)), math.sqrt(len(held))
    found = _found(statistics.fmean(held), base[first:shared], shared, error)
    is_large = is_null or (abs(found.effect) >= 2.0 * noise if noise else abs(found.share) >= LEAST_SHARE)
    is_clear = is_large and abs(found.t) >= (max(LEAST_T, 0.4 * root) if is_null else LEAST_T)
    return replace(found, verdict=found.verdict if is_clear else SAME, error=math.hypot(error, noise))


def _found(effect: float, base: Sequence[float], num_steps: int, error: float) -> Comparison:
    """As if the difference was clear."""
    share = _ratio(effect, statistics.fmean(map(abs, base)))
    return Comparison(HELPS if effect > 0.0 else HARMS, effect, _ratio(effect, error), num_steps, share, error)


def noise_between(base: Sequence[float], other: Sequence[float]) -> float:
    """How far the losses of two runs lie apart that differ in their seed only.

    The root mean square, over sixths of the compared steps, of the difference of the means.
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
    middle = statistics.median(differences) if differences else 0.0
    width = _WIDTH * statistics.median(abs(one - middle) for one in differences) if differences else 0.0
    return [min(max(one, middle - width), middle + width) for one in differences] if width else list(differences)


def _ratio(value: float, by: float) -> float:
    """`value / by`; Inf with the sign of `value` where `by` is 0, and 0 where both are."""
    return value / by if by else math.copysign(math.inf, value) if value else 0.0


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)  # training loss of each step
    val_losses: dict[int, float] = field(default_factory=dict)  # by step
    seconds: float = 0.0  # how long it took
    problem: str = ""  # why it ended early, or was not run; empty if it reached its last step or the script's end


@dataclass
class Row:
    arm: Arm
    run: Run
    verdict: str  # "helps", "harms", "no difference", "not tried" or "not known"
    comparison: Comparison | None = None  # of the losses that the verdict is about; None if it was not run
    why: str = ""  # more about the verdict; empty if there is nothing to add
    num_seeds: int = 1  # with how many seeds it was run


@dataclass
class Outcome:
    """Of a whole trial: the two runs of the script as it is, the causes found in the first, and a row for each arm."""

    base: Run
    other: Run
    noise: float
    causes: list[Any]
    rows: list[Row]

    @property
    def best(self) -> Row | None:
        """The arm that helps most, a remedy of a cause that was found before any other; None if none helps."""
        helpful = [row for row in self.rows if row.verdict == HELPS and not row.arm.is_null]
        return max(helpful, key=self.promise, default=None)

    def promise(self, row: Row) -> tuple[bool, bool, float]:
        """What arms are sorted by: whether they help, whether they are the remedy of a cause, and by how much."""
        is_remedy = any(one.rule in row.arm.remedies for one in self.causes)
        return row.verdict == HELPS, is_remedy, row.comparison.share if row.comparison else 0.0

    @property
    def accusation(self) -> Row | None:
        """The null arm, if it did no harm, no other arm helped, "lr x10" among them, and there is no other cause."""
        null = next((row for row in self.rows if row.arm.is_null), None)
        has_tried_more = any(row.arm.name == "lr x10" and row.comparison is not None for row in self.rows)
        if null is None or null.verdict not in (SAME, HELPS) or self.best is not None or not has_tried_more:
            return None
        others = [one for one in self.causes if one.rule not in (NO_CAUSE, *null.arm.remedies)]
        return None if others else null


def judged(arm: Arm, run: Run, base: Run, other: Run, noise: float) -> Row:
    """The row of an arm that was run with the seed of `base`; `other` has another seed."""
    validation = _compare_validation(base, run, other)
    if arm.by_validation:
        return Row(arm, run, UNKNOWN if validation is None else validation.verdict, validation, "by validation losses")
    training = compare(base.losses, run.losses, noise=0.0 if arm.is_null else noise, is_null=arm.is_null)
    if training.verdict == HELPS and validation is not None and validation.verdict == HARMS:
        return Row(arm, run, HARMS, training, "the training loss is lower, the validation loss higher")
    return Row(arm, run, training.verdict, training, run.problem)


def may_help(row: Row, noise: float) -> bool:
    """Whether to run an arm with the second seed: it helps, or would, were two runs of the script more alike."""
    found = row.comparison
    if found is None or row.arm.is_null or row.verdict == HELPS:
        return row.verdict == HELPS and not row.arm.is_null
    is_large = found.effect >= noise and found.share >= LEAST_SHARE
    is_clear = found.t >= LEAST_T and (is_large or found.share >= _LARGE_SHARE)
    return row.verdict == SAME and is_clear and not row.arm.by_validation


def confirm(row: Row, again: Row, noise: float) -> bool:
    """Makes one result of two; returns whether the arm helps with both, by a large share or clearly on average."""
    first, second = row.comparison, again.comparison
    row.num_seeds = 2
    if first is None or second is None:
        return False
    is_sure = row.verdict == again.verdict == HELPS
    if math.isfinite(first.effect) and math.isfinite(second.effect):
        mean, error = 0.5 * (first.effect + second.effect), 0.5 * abs(first.effect - second.effect)
        is_clear = mean >= max(noise, LEAST_T * error) or min(first.share, second.share) >= _LARGE_SHARE
        is_sure = is_sure or (may_help(again, noise) and is_clear)
        share, error = 0.5 * (first.share + second.share), max(error, abs(first.effect / first.t))
        row.comparison = replace(first, effect=mean, share=share, error=error, t=min(first.t, second.t))
    if not is_sure:
        row.why = f"with the second seed: {again.verdict}"
    row.verdict = HELPS if is_sure else SAME
    return is_sure


def _compare_validation(base: Run, run: Run, other: Run) -> Comparison | None:
    """Of the later half of the validation losses; None if there are none at equal steps."""
    steps = sorted(step for step in base.val_losses if step in run.val_losses and step in other.val_losses)
    steps = steps[len(steps) // 2 :]
    if not steps:
        return None
    ours, theirs, others = ([one.val_losses[step] for step in steps] for one in (base, run, other))
    if not all(map(math.isfinite, theirs)):
        return _diverged(-1.0, len(steps))
    noise = abs(statistics.fmean(ours) - statistics.fmean(others))
    found = _found(statistics.fmean(ours) - statistics.fmean(theirs), ours, len(steps), noise)
    is_clear = abs(found.effect) >= 2.0 * noise and abs(found.share) >= LEAST_SHARE
    return found if is_clear else replace(found, verdict=SAME)
