"""Applies the rules every few steps while a run goes on, and reports each finding once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..records import TrainingHistory, values
from ..records.failures import Failures
from .finding import SEVERITIES, Finding, Severity, sign_of
from .registry import RULES, Rule, diagnose

_log = logging.getLogger("fastguard")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


class Watch:
    """Diagnoses `history` every `check_every` steps, and reports a finding when it is new or has become more severe.

    Args:
        history: the run; it is not changed.
        check_every: steps from one diagnosis to the next.
        least: the least severity that is reported.
        tell: takes a finding; by default it logs it to the logger `fastguard`.
        rules, thresholds, failures: as in `diagnose`.

    Attributes:
        findings: the newest of each rule that ever fired, by name.
        failures: counts the rules that raised; each is logged once.

    Raises:
        ValueError: `check_every` is not an integer >= 1, or `least` no severity.

    Cost: 0.1 us a step; every `check_every` steps that of `diagnose`, about 0.5 ms: 10 us a step at 50.

    >>> history, told = TrainingHistory(), []
    >>> watch = Watch(history, check_every=10, tell=told.append)
    >>> for step in range(20):
    ...     history.record(step, loss=float("nan") if step > 5 else 1.0, grad_norm=1.0, lr=0.1)
    ...     _ = watch.step()
    >>> [finding.rule for finding in told]
    ['non-finite-loss']
    """

    def __init__(
        self,
        history: TrainingHistory,
        check_every: int = 50,
        *,
        least: Severity = "warning",
        tell: Callable[[Finding], Any] | None = None,
        rules: Iterable[Rule] | None = None,
        thresholds: Mapping[str, Mapping[str, float]] | None = None,
        failures: Failures | None = None,
    ) -> None:
        if isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 1:
            raise ValueError(f"`check_every` must be an integer >= 1, got {check_every!r}. 50 asks at every 50th step.")
        if least not in SEVERITIES:
            raise ValueError(f"`least` must be one of {list(SEVERITIES)}, got {least!r}")
        self.history = history
        self.check_every = check_every
        self.findings: dict[str, Finding] = {}
        self.failures = Failures() if failures is None else failures
        self._least = SEVERITIES.index(least)
        self._tell = _to_log if tell is None else tell
        self._rules = None if rules is None else list(rules)
        self._thresholds = thresholds
        self._left = check_every
        self._glanced: dict[tuple[str, ...], list[Rule]] = {}

    def step(self) -> list[Finding]:
        """Counts a step; returns `check()` at every `check_every`-th one, else an empty list."""
        self._left -= 1
        return [] if self._left else self.check()

    def check(self) -> list[Finding]:
        """Applies the rules now; reports and returns what is new, or more severe than last reported."""
        self._left = self.check_every
        found = diagnose(self.history, rules=self._rules, thresholds=self._thresholds, failures=self.failures)
        return self._told(found)

    def glance(self, names: tuple[str, ...]) -> list[Finding]:
        """As `check`, for the rules `names` alone, which are cheap and early."""
        asked = self._glanced.get(names)
        if asked is None:
            rules = RULES.values() if self._rules is None else self._rules
            asked = self._glanced[names] = [sign for rule in rules for sign in rule.signs if sign.name in names]
        thresholds = {name: given for name, given in (self._thresholds or {}).items() if name in names}
        return self._told(diagnose(self.history, rules=asked, thresholds=thresholds, failures=self.failures))

    def _told(self, found: Iterable[Finding]) -> list[Finding]:
        new = []
        for finding in found:
            known = self.findings.get(finding.rule)
            self.findings[finding.rule] = finding
            severity = SEVERITIES.index(finding.severity)
            if severity >= self._least and (known is None or severity > SEVERITIES.index(known.severity)):
                new.append(finding)
                self._tell(finding)
        return new

    def state_dict(self) -> dict[str, Any]:
        """What was reported, so that a resumed run does not repeat it. Plain data."""
        return {"severities": {name: finding.severity for name, finding in self.findings.items()}, "left": self._left}

    def check_state(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Severity], int]:
        """The entries of a `state_dict`; a ValueError for anything else, which names the entry."""
        severities = values.entry(state, "severities", values.mapping)
        for name, severity in severities.items():
            if severity not in SEVERITIES:
                raise values.MisfitError(f"must be one of {list(SEVERITIES)}, got {severity!r}", ("severities", name))
        return severities, values.entry(state, "left", values.whole)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`. Raises as `check_state` does, and then changes nothing."""
        severities, left = self.check_state(state)
        self.findings = {
            name: Finding("Reported before the run was resumed.", severity=severity, rule=name)
            for name, severity in severities.items()
        }
        self._left = max(1, min(left, self.check_every))


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
