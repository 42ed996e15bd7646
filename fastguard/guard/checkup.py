"""Diagnoses a run while it goes on, now and then, within a budget."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from ..diagnosis import Finding, Watch
from ..history import TrainingHistory
from ..stats.failures import Failures

CHECK_EVERY = 50
BUDGET = 0.01  # of the time, where no interval was asked for
AHEAD, GLANCE_EVERY = ("divergence-ahead",), 16  # rules that are to speak early, and after how many steps at least
AT_FIRST, FIRST_GLANCE = ("no-gradient", "unseen-updates"), 10  # and those that are so once, after the first steps


class Checkup:
    """Asks the rules every so many steps; what is new is logged. What raises is counted.

    Args:
        history: the run.
        failures: where it is counted.
        prepare: a bound method, called before the rules are asked to bring facts up to date; held weakly.
        check_every: the interval; 0 for never. None: 50 steps, or as many more as keep it within 1 % of the time.
        tell: takes a finding that is new; None: it is logged.

    Attributes:
        interval: steps from one `check` to the next; 0 for never.

    Cost: a diagnosis takes about 1 ms, a glance 30 us.
    """

    def __init__(
        self,
        history: TrainingHistory,
        failures: Failures,
        prepare: Callable[[], Any],
        check_every: int | None,
        tell: Callable[[Finding], Any] | None = None,
    ) -> None:
        self._watch = Watch(history, check_every or CHECK_EVERY, tell=tell, failures=failures)
        self._failures = failures
        self._prepare = weakref.WeakMethod(prepare)
        self._is_budgeted = check_every is None
        self.interval = CHECK_EVERY if check_every is None else check_every
        self._not_before = 0.0
        self._new: list[Finding] = []

    def check(self) -> list[Finding]:
        """Asks the rules, unless that would be too soon after the last time; what is new."""
        new: list[Finding] = []
        started = time.perf_counter()
        if self._is_budgeted and started < self._not_before:
            return new
        with self._failures.kept("checkup", "The rules were not asked at that step."):
            prepare = self._prepare()
            if prepare is not None:
                prepare()
            new = self._watch.check()
            self._new += new
        ended = time.perf_counter()
        self._not_before = ended + (ended - started) / BUDGET
        return new

    def take_new(self) -> list[Finding]:
        """What was found since this was asked last, and was new."""
        new, self._new = self._new, []
        return new

    def glance(self) -> list[Finding]:
        """Asks the rules that see trouble coming, more often than the others; what is new."""
        with self._failures.kept("checkup", "Nobody looked ahead at that step."):
            is_first = self._watch.history.newest_step < FIRST_GLANCE + GLANCE_EVERY - 1
            prepare = self._prepare() if is_first else None
            if prepare is not None:
                prepare()
            return self._watch.glance(AT_FIRST if is_first else AHEAD)
        return []

    def state_dict(self) -> dict[str, Any]:
        """What was told, so that a resumed run does not tell it again."""
        return self._watch.state_dict()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError for anything that did not come from `state_dict`."""
        self._watch.check_state(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`; raises as `check_state` does, and then changes nothing."""
        self._watch.load_state_dict(state)
