"""What the rules say of a run that goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..._text import prose, shown
from ...diagnosis import UNKNOWN, Finding, diagnose
from ...diagnosis.finding import SEVERITIES
from ...records import TrainingHistory
from ...records.failures import Failures
from ...report import Report, build_report
from ...report.report import headline, place_of


class ShownFinding(NamedTuple):
    """A finding as text.

    >>> finding = Finding("Too large.", 3, 5, layers=("a",), rule="norm-spike", recommendation="Clip.")
    >>> ShownFinding(finding).line
    '[warning] norm-spike, steps 3 to 5, in a: Too large. What to do: Clip.'
    """

    finding: Finding

    @property
    def headline(self) -> str:
        """Severity, rule, steps and layers."""
        return headline(self.finding)

    @property
    def line(self) -> str:
        """All of it in one line."""
        advice = f" What to do: {self.finding.recommendation}" if self.finding.recommendation else ""
        return f"{self.headline}: {prose(self.finding.summary + advice)}"


class LiveFindings:
    """Asks the rules of a run, and keeps what they found.

    Attributes:
        told: findings as they were when new, the oldest first: each rule's once, and again when it is more severe.
        report: as of the newest `assess`; None before.
    """

    def __init__(self, history: TrainingHistory) -> None:
        self.told: list[ShownFinding] = []
        self.report: Report | None = None
        self._history = history
        self._failures = Failures()

    def ask(self) -> None:
        """Takes what the rules find now. Cost: 1 ms."""
        self._tell(diagnose(self._history, failures=self._failures))

    def assess(self) -> None:
        """As `ask`, with causes and status. Cost: 2 ms."""
        self.report = build_report(self._history, failures=self._failures)
        self._tell(self.report.findings)

    def _tell(self, findings: Iterable[Finding]) -> None:
        severest = {told.finding.rule: SEVERITIES.index(told.finding.severity) for told in self.told}
        for finding in findings:
            if SEVERITIES.index(finding.severity) > severest.get(finding.rule, -1):
                self.told.append(ShownFinding(finding))

    @property
    def now(self) -> list[ShownFinding]:
        """The findings of the newest `assess`, as they are now."""
        return [ShownFinding(finding) for finding in self.report.findings] if self.report else []

    @property
    def cause(self) -> tuple[str, str] | None:
        """The likely cause, with its steps and layers, and what to do; None if there is none, or none is known."""
        known = [cause for cause in (self.report.causes if self.report else ()) if cause.rule != UNKNOWN]
        return (f"{shown(known[0].rule)}{place_of(known[0])}", prose(known[0].recommendation)) if known else None

    @property
    def layers(self) -> list[str]:
        """The layers that the findings name, the most severe first."""
        findings = self.report.findings if self.report else ()
        return list(dict.fromkeys(layer for finding in findings for layer in finding.layers))
