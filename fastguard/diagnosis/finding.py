"""What a rule says when it fires, and how it puts numbers and names into words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..stats import strict_json

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing, about a run.

    Attributes:
        summary: what was seen, in a sentence with its numbers.
        first_step, last_step: the steps it was seen at; None where no step can be named.
        severity: "info", "warning" or "critical"; a report's status is the worst of them, info apart.
        layers: names of the tensors to look at, most suspicious first.
        evidence: what was measured, and the thresholds it was held against.
        confidence: from 0 to 1, how sure the rule is that this is not chance.
        recommendation: what to do; empty takes the rule's own remedy.
        rule: name of the rule, or of the cause; filled in by it.
        link: the page that explains it; empty for rules that are not fastguard's own.
        symptoms: of a root cause (`fastguard.diagnosis.find_causes`): the findings that it explains.
    """

    summary: str
    first_step: int | None = None
    last_step: int | None = None
    severity: Severity = "warning"
    layers: tuple[str, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)
    confidence: float = 1.0
    recommendation: str = ""
    rule: str = ""
    link: str = ""
    symptoms: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"`severity` must be one of {list(SEVERITIES)}, got {self.severity!r} - at `Finding`")
        if not 0.0 <= self.confidence <= 1.0:
            raise ValueError(f"`confidence` must be from 0 to 1, got {self.confidence} - at `Finding`")

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain types that strict JSON can hold."""
        plain: dict[str, Any] = strict_json.encode(dataclasses.asdict(self))
        return plain

    @property
    def weight(self) -> tuple[int, float]:
        """What findings are sorted by, greatest first: severity, then confidence."""
        return SEVERITIES.index(self.severity), self.confidence


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "step"), count(3, "step")
    ('1 step', '3 steps')
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str], most: int = 3) -> str:
    """
    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
