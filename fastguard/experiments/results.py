"""What came of a trial: a verdict on each arm, by its losses and those of the script as it is with two seeds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from ..diagnosis import UNKNOWN as NO_CAUSE
from .arms import Arm
from .paired import HARMS, HELPS, LEAST_SHARE, LEAST_T, SAME, UNKNOWN, Comparison, compare

NOT_TRIED = "not tried"


@dataclass
class Run:
    """One run of the script.

    Attributes:
        losses: training loss of each step.
        val_losses: by step.
        seconds: how long it took.
        problem: why it ended early, or was not run; empty if it reached its last step or the script's end.
    """

    losses: list[float] = field(default_factory=list)
    val_losses: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    problem: str = ""


@dataclass
class Row:
    """What came of one arm.

    Attributes:
        verdict: "helps", "harms", "no difference", "not tried" or "not known".
        comparison: of the losses that the verdict is about; None if it was not run.
        why: more about the verdict; empty if there is nothing to add.
        num_seeds: with how many seeds it was run.
    """

    arm: Arm
    run: Run
    verdict: str
    comparison: Comparison | None = None
    why: str = ""
    num_seeds: int = 1


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
        """The null arm, if it did no harm, no other arm helped, and the rules name no other cause.

        A learning rate ten times as high has to be among the arms: a model that hardly moves learns nothing either.
        """
        null = next((row for row in self.rows if row.arm.is_null), None)
        has_tried_more = any(row.arm.name == "lr x10" and row.comparison is not None for row in self.rows)
        if null is None or null.verdict not in (SAME, HELPS) or self.best is not None or not has_tried_more:
            return None
        others = [one for one in self.causes if one.rule not in (NO_CAUSE, *null.arm.remedies)]
        return None if others else null


def judged(arm: Arm, run: Run, base: Run, other: Run, noise: float) -> Row:
    """The row of an arm that was run with the seed of `base`; `other` has another seed."""
    training = compare(base.losses, run.losses, noise=0.0 if arm.is_null else noise, is_null=arm.is_null)
    validation = _compare_validation(base, run, other)
    if arm.by_validation:
        return Row(arm, run, UNKNOWN if validation is None else validation.verdict, validation, "by validation losses")
    why = run.problem
    verdict = training.verdict
    if verdict == HELPS and validation is not None and validation.verdict == HARMS:
        verdict, why = HARMS, "the training loss is lower, the validation loss higher"
    return Row(arm, run, verdict, training, why)


def may_help(row: Row, noise: float) -> bool:
    """Whether to run an arm with the second seed: it helps, or would, were two runs of the script more alike."""
    found = row.comparison
    if found is None or row.arm.is_null:
        return False
    if row.arm.by_validation:
        return row.verdict == HELPS
    is_clear = found.t >= LEAST_T and found.share >= LEAST_SHARE and found.effect >= noise
    return row.verdict == HELPS or (row.verdict == SAME and is_clear)


def confirm(row: Row, again: Row, noise: float) -> bool:
    """Makes of an arm's results with two seeds one; returns whether it helps.

    It does if it helps with both, or if both effects are clear, and their mean is as large as the noise between seeds
    and three times its own standard error.
    """
    first, second = row.comparison, again.comparison
    row.num_seeds = 2
    if first is None or second is None:
        return False
    is_sure = row.verdict == again.verdict == HELPS
    if math.isfinite(first.effect) and math.isfinite(second.effect):
        mean, error = 0.5 * (first.effect + second.effect), 0.5 * abs(first.effect - second.effect)
        is_sure = is_sure or (may_help(again, noise) and mean >= max(noise, LEAST_T * error))
        share = 0.5 * (first.share + second.share)
        error = max(error, abs(first.effect / first.t))
        row.comparison = replace(first, effect=mean, share=share, error=error, t=min(first.t, second.t))
    if not is_sure:
        row.why = f"with the second seed: {again.verdict}"
    row.verdict = HELPS if is_sure else SAME
    return is_sure


def _compare_validation(base: Run, run: Run, other: Run) -> Comparison | None:
    """Of the later half of the validation losses; None if there are none at equal steps."""
    steps = [step for step in base.val_losses if step in run.val_losses and step in other.val_losses]
    steps = sorted(steps)[len(steps) // 2 :]
    if not steps:
        return None
    ours, theirs, others = ([one.val_losses[step] for step in steps] for one in (base, run, other))
    if not all(map(math.isfinite, theirs)):
        return Comparison(HARMS, -math.inf, -math.inf, len(steps), -math.inf)
    effect = statistics.fmean(ours) - statistics.fmean(theirs)
    noise = abs(statistics.fmean(ours) - statistics.fmean(others))
    level = abs(statistics.fmean(ours))
    share = effect / level if level else 0.0
    is_clear = abs(effect) >= 2.0 * noise and abs(share) >= 0.02
    verdict = SAME if not is_clear else HELPS if effect > 0.0 else HARMS
    return Comparison(verdict, effect, effect / noise if noise else math.inf, len(steps), share, noise)
