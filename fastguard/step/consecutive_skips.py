"""Consecutive skipped steps: what is logged, and what is raised when there are too many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from .._text import count, listed
from ..errors import NonFiniteGradientsError, PolicySkipsError
from ..records import StepStats

_log = logging.getLogger("fastguard")


class ConsecutiveSkips:
    """The steps skipped in a row so far.

    Attributes:
        limit: number of steps from which an error is due.
        steps: their numbers.
        by_policy: the numbers of those that the clip policy skipped.
        tensors: names of the tensors that were not finite; an ordered set.
        due: the error to raise.
        instead: called with the error instead of raising it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.steps: list[int] = []
        self.by_policy: list[int] = []
        self.tensors: dict[str, None] = {}
        self.due: NonFiniteGradientsError | None = None
        self.instead: Callable[[NonFiniteGradientsError], None] | None = None

    def clear(self) -> None:
        """Starts again at none."""
        self.steps.clear()
        self.by_policy.clear()
        self.tensors.clear()

    def count(self, record: StepStats, policy: str) -> None:
        """Counts a skipped step, or starts again after one that was taken; `policy` is the repr of the clip policy."""
        run, step = self.steps, record.step
        if run and run[-1] < step - 1:  # a step was taken in between
            self.clear()
        if not record.skipped:
            if run and run[-1] == step:  # an earlier evaluation of this step was bad
                run.pop()
            return
        if not run or run[-1] != step:
            run.append(step)
            if record.is_skipped_by_policy:
                self.by_policy.append(step)
        self.tensors.update(dict.fromkeys(record.nonfinite))
        if len(run) >= self.limit:
            tensors = list(self.tensors)
            self.due = NonFiniteGradientsError(run, tensors)
            if self.by_policy:
                self.due = PolicySkipsError(run, tensors, self.by_policy, policy)

    def take_due(self) -> NonFiniteGradientsError | None:
        """The error to raise now, once; None if there is none, or `instead` has been called with it."""
        due, self.due = self.due, None
        if due is not None and self.instead is not None:
            self.instead(due)
            return None
        return due

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "skipped_run": list(self.steps),
            "skipped_by_policy": list(self.by_policy),
            "skipped_tensors": list(self.tensors),
        }

    def go_on(self, steps: list[int], tensors: Sequence[str], by_policy: Sequence[int]) -> None:
        """Resumes from what was saved. Never raises."""
        self.steps, self.tensors = steps, dict.fromkeys(tensors)
        self.by_policy = [step for step in by_policy if step in steps]
        self.due = None


def log_nonfinite(record: StepStats, level: int, where_among_ranks: str) -> None:
    """Logs that the gradients of a step are not finite."""
    names = record.nonfinite
    where = f"first in {names[0]!r}, {count(len(names), 'tensor')} in all" if names else "only their norm overflowed"
    where = f"{where}; {where_among_ranks}" if where_among_ranks else where
    what = "skipped" if record.skipped else "taken all the same"
    _log.log(level, "step %d: gradients are not finite (%s); the step was %s", record.step, where, what)


def log_skipped_by_policy(record: StepStats, level: int, policy: str) -> None:
    """Logs that a clip policy skipped a step whose gradients are finite."""
    where = f" in {listed(record.over, 4)}" if record.over else f" of {record.norm:.4g}, above {record.trigger:.4g}"
    where = f"for a norm{where}" if record.over or record.trigger else "whatever its norm is"  # as after a loss
    _log.log(level, "step %d: skipped by the clip policy %s, %s", record.step, policy, where)
