"""The list of all checks, how a function becomes one, and which root causes their findings come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...diagnosis import CAUSES, Finding
from ...diagnosis.finding import SEVERITIES
from ...diagnosis.registry import Rule, make_rule

CHECKS: dict[str, Check] = {}
_TRIAL = 3  # depth of what trial steps come to, whatever is behind it
_ONLY_HERE = {
    "samples-mixed": "A sample's output depends on the other samples of its batch.",
    "shape-mismatch": "Shapes do not fit together in the first step.",
    "error-in-first-step": "The first step raises an error.",
}


@dataclass(frozen=True, slots=True)
class Check(Rule):
    """A rule about a training that has not begun: it is asked of an `Evidence` instead of a history.

    Attributes:
        depth: 0 for what was given (data, loss, parameters, settings), 1 for initial weights, 2 for how signals flow
            through the model, from 3 on for what trial steps come to. A deeper finding follows from a shallower one.
    """

    depth: int = 0

    @property
    def page(self) -> str:
        """The page that explains it, from the root of the repository."""
        return f"docs/rules/{self.name}.md"


def check(name: str, *, cause: str, depth: int = 0, **about: Any) -> Callable[[Callable[..., Finding | None]], Check]:
    """Registers a function of `Evidence` as a check that speaks for `cause`. `about`: other attributes of a rule."""

    def register(function: Callable[..., Finding | None]) -> Check:
        thresholds = make_rule(function, name).thresholds
        summary = _ONLY_HERE.get(cause) or CAUSES[cause].summary
        CHECKS[name] = Check(name, function, thresholds, depth=depth, cause=(cause, summary), **about)
        return CHECKS[name]

    return register


def find_causes(findings: Iterable[Finding]) -> list[Finding]:
    """The root causes, the most severe and surest first, each with the findings it explains as `symptoms`.

    The shallowest finding names a cause, the most severe and surest among equals. All deeper ones follow from it, and
    name no cause; unless they are critical, it is not, and they are no trial steps.
    """
    left = [f for f in findings if f.severity != "info"]
    causes = []
    while left:
        first = min(left, key=lambda f: (CHECKS[f.rule].depth, *(-part for part in f.weight)))
        name, depth = _cause_of(first), CHECKS[first.rule].depth
        reasons = sorted((f for f in left if _cause_of(f) == name), key=lambda f: f.weight, reverse=True)
        severity = reasons[0].severity
        followed = [
            f
            for f in left
            if f not in reasons
            and CHECKS[f.rule].depth > depth
            and (SEVERITIES.index(f.severity) <= SEVERITIES.index(severity) or CHECKS[f.rule].depth >= _TRIAL)
        ]
        left = [f for f in left if f not in reasons and f not in followed]
        causes.append(
            Finding(
                _ONLY_HERE.get(name) or CAUSES[name].summary,
                severity=severity,
                layers=next((f.layers for f in reasons if f.layers), ()),
                evidence={"speaks_for_it": [f.rule for f in reasons]},
                confidence=1.0 - math.prod(1.0 - f.confidence for f in reasons),
                recommendation=reasons[0].recommendation,
                rule=name,
                link=f"docs/rules/causes.md#{name}" if name in CAUSES else reasons[0].link,
                symptoms=(*reasons, *followed),
            )
        )
    return sorted(causes, key=lambda one: one.weight, reverse=True)


def _cause_of(finding: Finding) -> str:
    known = CHECKS[finding.rule].cause
    return str(finding.evidence.get("cause", known[0] if known else ""))
