"""What a rule says when it fires."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .._text import count as count
from .._text import listed as listed
from ..records import strict_json, values

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing, about a run.

    Attributes:
        summary: the observation, in a sentence with its numbers.
        first_step, last_step: the steps it was seen at; None if unknown. Rules of fastguard that name no step report
            those of the window.
        severity: "info", "warning" or "critical"; a report's status is the worst of them, info apart.
        layers: names of the tensors to look at, most suspicious first.
        evidence: the measurements: numbers and text, and lists and dicts of such. Anything else
            is kept as its repr.
        confidence: from 0 to 1, how sure the rule is that this is not chance.
        recommendation: what to do; if empty, the rule's own remedy.
        rule: name of the rule, or of the cause; filled in by it.
        link: the page that explains it; empty for rules that are not fastguard's own.
        symptoms: for a root cause (`fastguard.diagnosis.find_causes`), the findings that it explains; for a rule with
            several signs, the finding of each, the weightiest first.

    Raises:
        ValueError: a severity or confidence that there is not.
        TypeError: an attribute of another type.
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
        for name in ("summary", "recommendation", "rule", "link"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"`{name}` must be text, got {getattr(self, name)!r} - at `Finding`")
        if isinstance(self.layers, str) or not all(isinstance(layer, str) for layer in self.layers):
            raise TypeError(f"`layers` must be names, got {self.layers!r} - at `Finding`")
        for name in ("first_step", "last_step"):
            step = getattr(self, name)
            if step is not None and not hasattr(step, "__index__"):
                raise TypeError(f"`{name}` must be the number of a step or None, got {step!r} - at `Finding`")
        object.__setattr__(self, "evidence", {str(key): _plain(value) for key, value in self.evidence.items()})

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain types that strict JSON can hold."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        own["symptoms"] = [symptom.to_dict() for symptom in self.symptoms]
        plain: dict[str, Any] = strict_json.encode(own)
        return plain

    @property
    def weight(self) -> tuple[int, float]:
        """The sort key of findings, greatest first: severity, then confidence."""
        return SEVERITIES.index(self.severity), self.confidence


class Seen:
    """What the check of a declared rule measured: the rule fills its text with it, and makes it a `Finding`.

    Args:
        at: first and last step, or entries that have one; those of the window by default.
        layers: names of the tensors to look at, most suspicious first. The text lists all, the finding has eight.
        warn: False for a severity of "info"; by default it is "warning", or what the rule declares.
        severity, sure, see, do: in place of the rule's own severity, confidence, text and remedy.
        measured: the evidence; None leaves it out. A name that begins with an underscore fills the text alone.
    """

    __slots__ = ("at", "do", "layers", "measured", "see", "severity", "sure")

    def __init__(
        self,
        *,
        at: Sequence[Any] | None = None,
        layers: Iterable[str] = (),
        warn: bool | None = None,
        severity: Severity | None = None,
        sure: float | None = None,
        see: str = "",
        do: str = "",
        **measured: Any,
    ) -> None:
        self.at, self.layers, self.sure, self.see, self.do = at, tuple(layers), sure, see, do
        self.severity = severity or (None if warn is None else "warning" if warn else "info")
        self.measured = measured

    def finding(self, see: str, severity: Severity, sure: float) -> Finding:
        """The finding, with what a rule declares for the rest."""
        first, last = [getattr(one, "step", one) for one in (self.at[0], self.at[-1])] if self.at else (None, None)
        return Finding(
            _FILLED.format(self.see or see, layers=self.layers, **self.measured),
            first,
            last,
            severity=self.severity or severity,
            layers=self.layers[:8],
            evidence={k: v for k, v in self.measured.items() if not k.startswith("_") and v is not None},
            confidence=sure if self.sure is None else self.sure,
            recommendation=self.do,
        )


class _Filled(string.Formatter):
    """As `str.format`; `{num:parameter}` counts, as "2 parameters", and names are listed, the first three of them."""

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, (list, tuple)):
            return listed(value)
        is_noun = len(spec) > 1 and spec.replace(" ", "").isalpha()
        return count(value, spec) if is_noun else str(super().format_field(value, spec))


_FILLED = _Filled()


def sign_of(finding: Finding) -> str:
    """The sign of its rule that was seen, or the weightiest of several; the rule's own name if it has one sign."""
    return str(finding.evidence.get("sign", finding.rule))


def by_sign(findings: Iterable[Finding]) -> dict[str, Finding]:
    """The findings by sign."""
    return {sign_of(part): part for finding in findings for part in finding.symptoms or (finding,)}


def as_one(parts: Sequence[Finding]) -> Finding:
    """Merges the findings of a rule's signs: the weightiest, with the texts of the others."""
    if len(parts) == 1:
        return parts[0]
    first, *others = ordered = sorted(parts, key=lambda one: one.weight, reverse=True)
    remedies = [one.recommendation for one in ordered if one.severity == first.severity]
    return dataclasses.replace(
        first,
        summary=" ".join(one.summary for one in ordered),
        layers=first.layers or next((one.layers for one in others if one.layers), ()),
        recommendation=" ".join(dict.fromkeys(remedies)),
        symptoms=tuple(ordered),
    )


def _plain(value: Any) -> Any:
    """`value` as plain types, numbers of others among them."""
    if value is None or type(value) in (float, int, str, bool):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    try:
        return values.real(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        shown = repr(value)
        return shown if len(shown) <= 100 else shown[:97] + "..."
