"""From symptoms to root causes: which one thing explains several findings, and how surely.

Each cause names the rules that speak for it, with weights, and those whose firing it explains. Its confidence is
1 - prod(1 - weight * confidence of the finding): independent reasons add up, none is ever certain. The surest cause
takes its symptoms; a cause whose every reason is among the symptoms of a surer one is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..history import TrainingHistory
from ..stats.failures import Failures
from .finding import SEVERITIES, Finding

# From finding, history, and all findings by rule.
Weight = float | Callable[[Finding, TrainingHistory, Mapping[str, Finding]], float]
CAUSES: dict[str, Cause] = {}
_LEAST = 0.3


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that can be wrong with a run.

    Attributes:
        name: a noun phrase, like "learning-rate-too-high".
        summary: what it is, in a sentence.
        remedy: what to do.
        reasons: rules that speak for it, each with a weight from 0 to 1, or a function for one.
        explains: further rules that fire where it is at work, and say nothing for it by themselves.
    """

    name: str
    summary: str
    remedy: str
    reasons: Mapping[str, Weight]
    explains: frozenset[str] = field(default_factory=frozenset)

    def weigh(
        self, found: Mapping[str, Finding], history: TrainingHistory
    ) -> tuple[float, list[tuple[float, Finding]]]:
        """Its confidence, and the findings that speak for it, the weightiest first."""
        against = 1.0
        reasons = []
        for name, weight in self.reasons.items():
            finding = found.get(name)
            if finding is None:
                continue
            value = weight(finding, history, found) if callable(weight) else weight
            if finding.severity == "info":
                value *= 0.5
            if value > 0.0:
                against *= 1.0 - value * finding.confidence
                reasons.append((value * finding.confidence, finding))
        return 1.0 - against, sorted(reasons, key=lambda reason: -reason[0])


def cause(name: str, summary: str, remedy: str, reasons: Mapping[str, Weight], explains: str = "") -> Cause:
    """Registers a cause; `explains` are rule names with blanks between them."""
    CAUSES[name] = Cause(name, summary, remedy, reasons, frozenset(explains.split()))
    return CAUSES[name]


def find_causes(
    findings: Iterable[Finding], history: TrainingHistory, *, failures: Failures | None = None
) -> list[Finding]:
    """The root causes of `findings`, the surest first, each with the findings it explains as its `symptoms`.

    A finding is a symptom of one cause at most. Findings of severity "info" alone make no cause. A cause that raises
    is left out, and logged to the logger `fastguard`.

    Args:
        findings: what `diagnose` gave.
        history: the run they were found in.
        failures: where causes that raise are counted; one that is in there already is not logged again.

    Cost: 50 us.
    """
    found = {finding.rule: finding for finding in findings}
    weighed = []
    failures = Failures() if failures is None else failures
    for one in CAUSES.values():
        try:
            confidence, reasons = one.weigh(found, history)
        except Exception as error:
            failures.note(f"cause {one.name!r}", error, "It was not weighed.")
            continue
        if confidence >= _LEAST and any(finding.severity != "info" for _, finding in reasons):
            weighed.append((min(confidence, 1.0), one, reasons))
    weighed.sort(key=lambda entry: -entry[0])
    causes: list[Finding] = []
    explained: set[str] = set()
    for confidence, one, reasons in weighed:
        if all(finding.rule in explained for _, finding in reasons):
            continue
        mine = [
            f for name, f in found.items() if name not in explained and (name in one.reasons or name in one.explains)
        ]
        explained |= {*one.reasons, *one.explains}
        causes.append(_as_finding(one, confidence, [finding for _, finding in reasons], mine))
    return causes


def _as_finding(one: Cause, confidence: float, reasons: list[Finding], symptoms: list[Finding]) -> Finding:
    order = {finding.rule: place for place, finding in enumerate(reasons)}
    symptoms = sorted(symptoms, key=lambda f: order.get(f.rule, len(order)))
    ends = [f.last_step for f in symptoms if f.last_step is not None]
    return Finding(
        one.summary,
        next((f.first_step for f in reasons if f.first_step is not None), None),
        max(ends, default=None),
        severity=max((f.severity for f in symptoms or reasons), key=SEVERITIES.index),
        layers=next((f.layers for f in reasons if f.layers), ()),
        evidence={"speaks_for_it": [f.rule for f in reasons]},
        confidence=confidence,
        recommendation=one.remedy,
        rule=one.name,
        link=f"docs/rules/causes.md#{one.name}",
        symptoms=tuple(symptoms),
    )


def unexplained(findings: Iterable[Finding], causes: Iterable[Finding]) -> list[Finding]:
    """The findings that are no cause's symptom, in their order."""
    told = {symptom.rule for one in causes for symptom in one.symptoms}
    return [finding for finding in findings if finding.rule not in told]
