"""Diagnoses a run while it goes on: every few steps, or within a budget, and reports each finding once."""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..records import TrainingHistory, values
from ..records.failures import Failures
from ..records.slot import batch_end
from .finding import SEVERITIES, Finding, Severity, sign_of
from .registry import RULES, diagnose

_log = logging.getLogger("fastguard")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}
CHECK_EVERY = 48
_FIRST_CLIPPER = 31  # the first step after which the rule `already-clipped` runs
# Shares of the time that checks may take if no interval was given, in a run that goes on as before and in one that has
# changed; and seconds that the first checks may take on top.
BUDGET, BUDGET_OF_CHANGE, HEAD_START = 0.0025, 0.01, 0.002
AHEAD = ("divergence-ahead",)  # rules that run more often than others
GLANCE_EVERY, _LATE = 8, 1024  # their interval, which is doubled from that step on
AT_FIRST = ("no-gradient", "unseen-updates", "answer-seen")  # rules that run after the first steps
FIRST_GLANCE = 10
_NEVER = 1 << 62
_NUM_NEWEST = 8  # losses that say whether a run is calm as a batch ends
_CALM = 1.05  # times the best loss; below it "divergence-ahead" finds nothing


class Reported:
    """The newest finding of each rule that ever fired; `tell` takes those that are new or have become more severe."""

    def __init__(self, tell: Callable[[Finding], Any]) -> None:
        self.findings: dict[str, Finding] = {}
        self._tell = tell

    def add(self, found: Iterable[Finding]) -> list[Finding]:
        """Takes the findings of a diagnosis; tells and returns the new ones."""
        new = []
        for finding in found:
            known = self.findings.get(finding.rule)
            self.findings[finding.rule] = finding
            severity = SEVERITIES.index(finding.severity)
            if severity > (0 if known is None else SEVERITIES.index(known.severity)):
                new.append(finding)
                self._tell(finding)
        return new

    def state_dict(self) -> dict[str, Any]:
        """What was reported, so that a resumed run does not repeat it. Plain data."""
        return {"severities": {name: finding.severity for name, finding in self.findings.items()}}

    def check_state(self, state: Mapping[str, Any]) -> Mapping[str, Severity]:
        """The severities of a `state_dict`; a ValueError for anything else, which names the entry."""
        severities: Mapping[str, Severity] = values.entry(state, "severities", values.mapping)
        for name, severity in severities.items():
            if severity not in SEVERITIES:
                raise values.MisfitError(f"must be one of {list(SEVERITIES)}, got {severity!r}", ("severities", name))
        return severities

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`. Raises as `check_state` does, and then changes nothing."""
        self.findings = {
            name: Finding("Reported before the run was resumed.", severity=severity, rule=name)
            for name, severity in self.check_state(state).items()
        }


def log_news(history: TrainingHistory, finding: Finding) -> None:
    """Logs a finding, unless it only repeats what a guard logs at each step whose gradients are not finite."""
    is_repeated = finding.rule == "non-finite-gradients" or (
        finding.rule == "non-finite-loss" and history.num_bad_losses <= history.num_nonfinite
    )
    if not is_repeated or finding.severity != "warning" or history.num_scaled:
        _to_log(finding)


def _to_log(finding: Finding) -> None:
    step = "" if finding.last_step is None else f" (step {finding.last_step})"
    said = finding.rule, step, finding.summary, finding.recommendation
    _log.log(_LEVELS[finding.severity], "%s%s: %s %s", *said, extra={"sign": sign_of(finding)})


class Checkup:
    """Applies the rules at intervals and logs new findings, unless another rank does (`is_quiet`). Counts what raises.

    `check_every` is the interval; 0 for never. None: 48 steps, 64 from step 256 on, or more, to keep the checks within
    0.25% of the time; within 1% where the run has changed since the last one. `prepare` updates facts before the rules
    run, and is held weakly.

    Cost: a diagnosis takes about 1 ms, a glance 30 us.
    """

    def __init__(
        self,
        history: TrainingHistory,
        failures: Failures,
        prepare: Callable[[], Any],
        check_every: int | None,
        *,
        is_quiet: bool = False,
    ) -> None:
        tell = (lambda finding: None) if is_quiet else functools.partial(log_news, history)
        self.watch = Reported(tell)
        self._history, self._failures = history, failures
        self._prepare = weakref.WeakMethod(prepare)
        self._is_budgeted = check_every is None
        self.interval = CHECK_EVERY if check_every is None else check_every  # 0 for never
        self._not_before = self._not_before_if_changed = 0.0
        self._head_start = HEAD_START
        self._state: tuple[Any, ...] = ()
        self._new: list[Finding] = []
        self.check_at = self.glance_at = _NEVER  # the steps after which all rules, and the early ones, run next
        self._level = logging.DEBUG if is_quiet else logging.WARNING
        self._clipper_at: float = _FIRST_CLIPPER  # the step after which to look for another clipper

    def plan(self, newest: int) -> None:
        """Schedules the next checks after the step `newest`."""
        if not self.interval:
            return
        first = newest + self.interval - 1
        self.check_at = batch_end(first) if self._is_budgeted else first
        self.glance_at = FIRST_GLANCE - 1 if newest < FIRST_GLANCE else self._next_glance(newest)

    def look(self, newest: int) -> list[Finding]:
        """Applies the rules that are due after the step `newest`, as a batch of steps ends; returns new findings."""
        new: list[Finding] = []
        if newest >= self._clipper_at:
            self._look_for_clipper(newest)
        if newest >= self.check_at:
            following = newest + self.interval
            self.check_at = batch_end(following) if self._is_budgeted else following
            new += self.check()
        if newest >= self.glance_at:
            self.glance_at = self._next_glance(newest)
            is_first = newest < FIRST_GLANCE + 2 * GLANCE_EVERY - 1
            if is_first or self._history.loss_trend.best <= 0.0 or not self._is_calm():
                new += self.glance()
        return new

    def _look_for_clipper(self, newest: int) -> None:
        """Warns once if something has clipped the gradients before the guard saw them."""
        history = self._history
        self._clipper_at = newest + min(newest, history.window)
        for finding in diagnose(history, rules=[RULES["already-clipped"]], failures=self._failures):
            self._clipper_at = math.inf
            _log.log(self._level, "%s %s", finding.summary, finding.recommendation)

    @property
    def calm_below(self) -> float:
        """The mean loss up to which "divergence-ahead" finds nothing: about the best."""
        best = self._history.loss_trend.best
        return math.inf if best <= 0.0 else _CALM * best

    def _is_calm(self) -> bool:
        entries = self._history.recent
        newest = (entries[i] for i in range(-min(_NUM_NEWEST, len(entries)), 0))
        losses = [entry.loss for entry in newest if entry.loss is not None]
        return not losses or sum(losses) <= self.calm_below * len(losses)  # False where one is NaN

    def _next_glance(self, newest: int) -> int:
        """The next multiple of the stride, to see slow changes early; the check's turn before any loss."""
        if newest >= FIRST_GLANCE and not self._history.loss_trend.count:
            return self.check_at
        stride = glance_stride(newest)
        return (newest + stride) | (stride - 1)

    def check(self) -> list[Finding]:
        """Applies the rules, unless it is too soon after the last time; returns new findings."""
        new: list[Finding] = []
        started = time.perf_counter()
        is_early = self._is_budgeted and started < self._not_before  # a run that has changed gets more time
        if is_early and (started < self._not_before_if_changed or self._state == _state_of(self._history)):
            return new
        with self._failures.kept("checkup", "The rules were skipped at that step."):
            prepare = self._prepare()
            if prepare is not None:
                prepare()
            new = self.watch.add(diagnose(self._history, failures=self._failures))
            self._new += new
        ended = time.perf_counter()
        covered = min(ended - started, self._head_start)
        self._head_start -= covered
        self._not_before = ended + (ended - started - covered) / BUDGET
        self._not_before_if_changed = ended + (ended - started - covered) / BUDGET_OF_CHANGE
        self._state = _state_of(self._history)
        return new

    def take_new(self) -> list[Finding]:
        """The new findings since the last call."""
        new, self._new = self._new, []
        return new

    def glance(self) -> list[Finding]:
        with self._failures.kept("checkup", "Early-warning rules were skipped at this step."):
            is_first = self._history.newest_step < FIRST_GLANCE + 2 * GLANCE_EVERY - 1
            prepare = self._prepare() if is_first else None
            if prepare is not None:
                prepare()
            if is_first or self._history.loss_trend.count:
                names = AT_FIRST if is_first else AHEAD
                asked = [sign for name in names for sign in RULES[name].signs if sign.name == name]
                return self.watch.add(diagnose(self._history, rules=asked, failures=self._failures))
        return []


def glance_stride(step: int) -> int:
    """Steps from one run of the early rules to the next."""
    return GLANCE_EVERY if step < _LATE else 2 * GLANCE_EVERY


def _state_of(history: TrainingHistory) -> tuple[Any, ...]:
    """The state of a run in a few coarse numbers: while these stay the same, the rules hardly find anything new."""
    losses, norms = history.loss_trend, history.norm_trend
    counts = (
        *(history.num_skipped, history.num_nonfinite, history.num_bad_losses, history.num_clipped, history.equal_run),
        *(len(losses.spikes), len(norms.spikes), len(history.validations), len(history.lone_elements)),
    )
    newest = history.recent[-1] if history.recent else None
    rate = 0 if newest is None or not newest.lr else math.frexp(newest.lr)[1]
    has_risen = losses.mean > losses.best + 0.2 * abs(losses.best)
    return *(count.bit_length() for count in counts), round(norms.mean), rate, has_risen
