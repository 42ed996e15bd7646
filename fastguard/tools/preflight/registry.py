"""The list of all checks, how a function becomes one, and how all of them are asked."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...diagnosis import Finding, Severity
from ...diagnosis.registry import check_names
from ...records.failures import Failures
from .evidence import Evidence

CHECKS: dict[str, Check] = {}


@dataclass(frozen=True, slots=True)
class Check:
    """A named check of a training that has not begun. Calling it gives its `Finding`, or None.

    Attributes:
        name: a noun phrase, like "softmax-before-cross-entropy".
        cause: the root cause that it speaks for, like "wrong-output-layer".
        severity: the worst that it reports.
        reads: what it looks at.
        source: where definition and thresholds come from.
        remedy: what to do, unless a finding says better.
        thresholds: its defaults, by name; a call takes others as keyword arguments.
    """

    name: str
    cause: str
    severity: Severity
    reads: str
    source: str
    remedy: str
    thresholds: Mapping[str, float]
    check: Callable[..., Finding | None]

    def __call__(self, evidence: Evidence, **thresholds: float) -> Finding | None:
        self.check_thresholds(thresholds)
        finding = self.check(evidence, **thresholds)
        if finding is None:
            return None
        recommendation = finding.recommendation or self.remedy
        return dataclasses.replace(finding, rule=self.name, recommendation=recommendation, link=self.page)

    def check_thresholds(self, thresholds: Mapping[str, float]) -> None:
        """Raises TypeError for a threshold that the check does not have."""
        check_names(thresholds, self.thresholds, f"check {self.name!r}")

    @property
    def page(self) -> str:
        """The page that explains it, from the root of the repository."""
        return f"docs/rules/{self.name}.md"


def check(
    name: str, *, cause: str, severity: Severity = "warning", reads: str, source: str, remedy: str
) -> Callable[[Callable[..., Finding | None]], Check]:
    """Registers a function of `Evidence` as a check; its keyword-only arguments are the thresholds."""

    def register(function: Callable[..., Finding | None]) -> Check:
        arguments = inspect.signature(function).parameters.values()
        thresholds: dict[str, Any] = {a.name: a.default for a in arguments if a.kind is a.KEYWORD_ONLY}
        CHECKS[name] = Check(name, cause, severity, reads, source, remedy, thresholds, function)
        return CHECKS[name]

    return register


def ask(
    evidence: Evidence, checks: Mapping[str, Check], thresholds: Mapping[str, Mapping[str, float]], failures: Failures
) -> list[Finding]:
    """What the checks find, critical first. One that raises finds nothing, and is counted among `failures`."""
    found = []
    for one in checks.values():
        with failures.kept(f"check {one.name!r}", "What it looks for was not checked."):
            finding = one(evidence, **thresholds.get(one.name, {}))
            if finding is not None:
                found.append(finding)
    return sorted(found, key=lambda finding: finding.weight, reverse=True)
