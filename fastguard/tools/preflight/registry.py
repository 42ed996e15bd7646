"""How a function becomes a check of preflight, and which root causes the findings lead to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ...diagnosis import CAUSES, RULES, Finding
from ...diagnosis.finding import SEVERITIES, Seen
from ...diagnosis.registry import CHECKS as CHECKS
from ...diagnosis.registry import Rule as Rule
from ...diagnosis.registry import rule

_TRIAL = 3  # depth of the trial steps' findings, which follow from anything else
_ONLY_HERE = {
    "samples-mixed": "A sample's output depends on the other samples of its batch.",
    "shape-mismatch": "Shapes do not fit together in the first step.",
    "error-in-first-step": "The first step raises an error.",
}


def check(
    name: str, *, cause: str, like: str = "", **about: Any
) -> Callable[[Callable[..., Finding | Seen | None]], Rule]:
    """Registers a function of an `Evidence` as a check that speaks for `cause`: a rule of stage "before".

    Args:
        name: its name, which no rule has.
        cause: the root cause that it speaks for.
        like: the rule that sees the same fault in a running training; the check has its remedy.
        about: other attributes of a rule.
    """
    summary = _ONLY_HERE.get(cause) or CAUSES[cause].summary
    about.setdefault("remedy", RULES[like].remedy if like else "")
    return rule(name, stage="before", cause=(cause, summary), **about)


def find_causes(findings: Iterable[Finding]) -> list[Finding]:
    """The root causes, the most severe and surest first, each with the findings it explains as `symptoms`.

    The shallowest finding names a cause, the most severe and surest among equals. Deeper ones follow from it and name
    no cause, unless they are critical, it is not, and they do not come from trial steps.
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
