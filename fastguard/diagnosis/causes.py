"""From symptoms to root causes: which one thing explains several findings, and how surely.

A cause is possible if none of its needs is False and no finding rules it out. The weights of its signs make a score.
The scores of all causes, and that of "unknown", which is zero, make shares of one (softmax). The surest is reported if
it outweighs "unknown"; then the others, for what it does not explain. The confidence in a report is how often a cause
with such a share was right on new runs (`fitted.confidence`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..records import TrainingHistory
from ..records.failures import Failures
from . import fitted
from .finding import SEVERITIES, Finding, by_sign, listed, sign_of
from .registry import SIGNS, families_of

# From finding, history, and all findings by rule.
Weight = float | Callable[[Finding, TrainingHistory, Mapping[str, Finding]], float]
# Whether a fact allows a cause: True, False, or None where it is not known.
Need = Callable[[TrainingHistory], bool | None]
CAUSES: dict[str, Cause] = {}
UNKNOWN = "unknown"
_GROUPS = {
    "standstill": "loss-not-decreasing loss-at-chance bounded-output inputs-without-effect",
    "unsteady": "growing-norm norm-spike loss-spike loss-divergence no-warm-up update-ratio-high clip-rate-high",
    "nonfinite": "non-finite-gradients non-finite-loss skip-run",
}
_LEAST = 0.35
_LIKELY = 0.6


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that can be wrong with a run.

    Attributes:
        name: a noun phrase, like "learning-rate-too-high".
        summary: what it is, in a sentence.
        remedy: what to do.
        reasons: signs of rules that speak for it, each with a weight from 0 to 1, or a function for one.
        explains: further rules that fire where it is at work, and say nothing for it by themselves.
        needs: facts, each True, False or None (not known): one that is False rules the cause out.
        unless: signs that rule it out.
    """

    name: str
    summary: str
    remedy: str
    reasons: Mapping[str, Weight]
    explains: frozenset[str] = field(default_factory=frozenset)
    needs: tuple[Need, ...] = ()
    unless: frozenset[str] = field(default_factory=frozenset)

    def can_be(self, found: Mapping[str, Finding], history: TrainingHistory) -> bool:
        """Whether no fact and no warning rules it out."""
        is_ruled_out = any(name in found and _warns(found[name]) for name in self.unless)
        return not is_ruled_out and all(need(history) is not False for need in self.needs)

    def signs(self, found: Mapping[str, Finding], history: TrainingHistory) -> dict[str, float]:
        """How strongly each of its reasons speaks for it, above 0 up to 1; a remark counts half."""
        strengths = {}
        for name, weight in self.reasons.items():
            finding = found.get(name)
            if finding is None:
                continue
            value = weight(finding, history, found) if callable(weight) else weight
            strength = value * finding.confidence * (1.0 if _warns(finding) else 0.5)
            if strength > 0.0:
                strengths[name] = strength
        return strengths

    def score(self, signs: Mapping[str, float]) -> float:
        """The logarithm of its odds against "unknown", if it were the only cause."""
        weights = fitted.WEIGHTS.get(self.name, {})
        total = sum(weights.get(name, fitted.USUAL_WEIGHT) * strength for name, strength in signs.items())
        return total + fitted.OFFSETS.get(self.name, fitted.USUAL_OFFSET)


def cause(
    name: str,
    summary: str,
    remedy: str,
    reasons: Mapping[str, Weight],
    explains: str = "",
    *,
    needs: Sequence[Need] = (),
    unless: str = "",
) -> Cause:
    """Registers a cause in `CAUSES`, in place of one of that name.

    `explains` and `unless` are names with blanks between them; in `explains` those of `_GROUPS` stand for several.
    """
    names = " ".join(_GROUPS.get(one, one) for one in explains.split()).split()
    explained = frozenset(SIGNS[one].whole if one in SIGNS else one for one in names)
    made = Cause(name, summary, remedy, reasons, explained, tuple(needs), frozenset(unless.split()))
    CAUSES[name] = made
    return made


def evidence_for(
    findings: Iterable[Finding], history: TrainingHistory, *, failures: Failures | None = None
) -> dict[str, dict[str, float]]:
    """The signs that speak for each possible cause. The weights are fitted on these."""
    found = by_sign(findings)
    failures = Failures() if failures is None else failures
    evidence = {}
    for one in CAUSES.values():
        if one.reasons.keys().isdisjoint(found):
            continue
        try:
            signs = one.signs(found, history)
            if signs and one.can_be(found, history):
                evidence[one.name] = signs
        except Exception as error:
            failures.note(f"cause {one.name!r}", error, "It was not weighed.")
    return evidence


def shares(scores: Mapping[str, float]) -> dict[str, float]:
    """The probability of each cause, and of "unknown", from their scores."""
    highest = max(0.0, *scores.values()) if scores else 0.0
    powers = {name: math.exp(score - highest) for name, score in scores.items()}
    powers[UNKNOWN] = math.exp(-highest)
    total = sum(powers.values())
    return {name: power / total for name, power in powers.items()}


def find_causes(
    findings: Iterable[Finding], history: TrainingHistory, *, failures: Failures | None = None
) -> list[Finding]:
    """The root causes of `findings`, the most severe and surest first, each with its findings as its `symptoms`.

    A finding is a symptom of at most one cause. Findings of severity "info" alone make no cause. If something critical
    remains unexplained, or no cause was found for a warning, the last one is "unknown". A cause that raises is left
    out, and logged to the logger `fastguard`.

    Args:
        findings: the result of `diagnose`.
        history: the run they were found in.
        failures: counts the causes that raise; each is logged once.

    Cost: 50 us.
    """
    wholes = {finding.rule: finding for finding in findings}
    found = by_sign(wholes.values())
    evidence = evidence_for(found.values(), history, failures=failures)
    told: list[Finding] = []
    rivals: dict[str, dict[str, float]] = {}  # the scores when each reported cause was chosen
    while evidence:
        scores = {name: CAUSES[name].score(signs) for name, signs in evidence.items()}
        confidence = shares({name: score + _tried(name, history) for name, score in scores.items()})
        best = max(evidence, key=lambda name: (confidence[name], name))
        if confidence[best] < max(_LEAST, confidence[UNKNOWN]):
            break
        one, signs = CAUSES[best], evidence.pop(best)
        mine = _symptoms(one, signs, found)
        if any(map(_warns, mine)):
            told.append(_as_finding(one, confidence[best], signs, found, mine, wholes))
            rivals[best] = scores
            found = {name: finding for name, finding in found.items() if finding not in mine}
            evidence = {name: {s: v for s, v in signs.items() if s in found} for name, signs in evidence.items()}
        evidence = {n: signs for n, signs in evidence.items() if any(s in found and _warns(found[s]) for s in signs)}
    told = [dataclasses.replace(one, confidence=_beside_others(one.rule, rivals)) for one in told]
    told.sort(key=_rank, reverse=True)  # equals stay as surely as they were chosen
    told = [_trusted(one, history) for one in told]
    if history.model.experiments:
        told.sort(key=lambda one: (_rank(one), one.confidence), reverse=True)
    left = [finding for finding in found.values() if finding.severity != "info"]
    if left and (not told or any(finding.severity == "critical" for finding in left)):
        told.append(_unknown(left, told, wholes))
    return told


def _beside_others(name: str, rivals: Mapping[str, Mapping[str, float]]) -> float:
    """The share of a cause once those that explain other findings no longer compete with it."""
    return shares({other: score for other, score in rivals[name].items() if other == name or other not in rivals})[name]


def _trusted(one: Finding, history: TrainingHistory) -> Finding:
    """A cause as it is reported: its share moves to the evidence, and its summary gains what was tried."""
    confidence = fitted.confidence(one.rule, one.confidence, len(families_of(one.symptoms)))
    evidence = {**one.evidence, "share": one.confidence}
    tried = [experiment["text"] for experiment in history.model.experiments if one.rule in experiment["causes"]]
    if tried:
        odds = confidence / (1.0 - confidence) * math.exp(_tried(one.rule, history))
        confidence, evidence["before_it_was_tried"] = odds / (1.0 + odds), confidence
    return dataclasses.replace(one, summary=" ".join([one.summary, *tried]), confidence=confidence, evidence=evidence)


def _tried(name: str, history: TrainingHistory) -> float:
    """The logarithm of the likelihood ratio of a cause in all experiments about it; 0 without any."""
    ratios = [experiment["ratio"] for experiment in history.model.experiments if name in experiment["causes"]]
    return sum(map(math.log, ratios))


def _rank(one: Finding) -> int:
    """The severity if the cause is clearly likelier than not; a doubtful one comes after sure ones."""
    return SEVERITIES.index(one.severity) if one.confidence >= _LIKELY else 0


def _warns(finding: Finding) -> bool:
    """Whether it is more than a remark, or would be if no other reported the same event."""
    return finding.severity != "info" or "told_by" in finding.evidence


def _symptoms(one: Cause, signs: Mapping[str, float], found: Mapping[str, Finding]) -> list[Finding]:
    """The findings that it explains: none that is more severe than the worst that speaks for it."""
    worst = max(SEVERITIES.index(found[name].severity) for name in signs)
    mine = [finding for name, finding in found.items() if name in one.reasons or finding.rule in one.explains]
    return [finding for finding in mine if sign_of(finding) in signs or SEVERITIES.index(finding.severity) <= worst]


def _as_finding(
    one: Cause,
    confidence: float,
    signs: Mapping[str, float],
    found: Mapping[str, Finding],
    symptoms: list[Finding],
    wholes: Mapping[str, Finding],
) -> Finding:
    reasons = [found[name] for name in sorted(signs, key=lambda name: -signs[name])]
    order = {sign_of(finding): place for place, finding in enumerate(reasons)}
    symptoms = sorted(symptoms, key=lambda f: order.get(sign_of(f), len(order)))
    ends = [f.last_step for f in symptoms if f.last_step is not None]
    return Finding(
        one.summary,
        next((f.first_step for f in reasons if f.first_step is not None), None),
        max(ends, default=None),
        severity=max(("warning" if "told_by" in f.evidence else f.severity for f in symptoms), key=SEVERITIES.index),
        layers=_place(reasons, symptoms),
        evidence={"speaks_for_it": [sign_of(f) for f in reasons]},
        confidence=confidence,
        recommendation=one.remedy,
        rule=one.name,
        link=f"docs/rules/causes.md#{one.name}",
        symptoms=tuple(wholes[name] for name in dict.fromkeys(f.rule for f in symptoms)),
    )


def _place(reasons: Sequence[Finding], symptoms: Iterable[Finding]) -> tuple[str, ...]:
    """The layers of the first reason that names some; a module that made NaN of finite inputs comes first."""
    first = next((f for f in reasons if f.layers), None)
    origin = next((f.layers for f in symptoms if f.evidence.get("is_origin")), ())
    if first is None or (origin and sign_of(first) == "non-finite-gradients"):
        return origin
    return first.layers


def _unknown(left: list[Finding], told: list[Finding], wholes: Mapping[str, Finding]) -> Finding:
    left = sorted(left, key=lambda finding: finding.weight, reverse=True)
    steps = [f.first_step for f in left if f.first_step is not None]
    ends = [f.last_step for f in left if f.last_step is not None]
    names = list(dict.fromkeys(f.rule for f in left))
    return Finding(
        f"Something {'else ' * bool(told)}is wrong, and the evidence does not single out a cause: {listed(names)}.",
        min(steps, default=None),
        max(ends, default=None),
        severity=left[0].severity,
        layers=_place(left, left),
        confidence=0.0,
        recommendation="Read the findings one by one. Guarding activations (activations=True) and weights "
        "(weights=10), or fastguard.preflight before the run, may show more.",
        rule=UNKNOWN,
        link=f"docs/rules/causes.md#{UNKNOWN}",
        symptoms=tuple(wholes[name] for name in names),
    )


def unexplained(findings: Iterable[Finding], causes: Iterable[Finding]) -> list[Finding]:
    """The findings that no cause explains, in their order."""
    told = by_sign(symptom for one in causes for symptom in one.symptoms)
    return [finding for finding in findings if sign_of(finding) not in told]
