"""The words of a report: its verdict, causes and findings. The text and the page show the same."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from .._text import count, listed, number, prose, shown
from ..diagnosis import Finding, Severity

_WIDTH = 100
_MAX_LAYERS = 3
Block = tuple[str, str, list[str]]  # severity ("cause" for a cause), headline and paragraphs


def blocks(causes: Iterable[Finding], findings: Iterable[Finding]) -> Iterator[Block]:
    """The causes, each with its findings, and then the other findings. Only the first of a cause has its remedy."""
    told: set[str] = set()
    for one in causes:
        sureness = f" (confidence {one.confidence:.2f})" if one.confidence else ""  # "unknown" has none
        likelihood = "Possible" if 0.0 < (one.confidence or 0.0) < 0.5 else "Likely"
        seen = f"seen as: {', '.join(symptom.rule for symptom in one.symptoms)}"
        paragraphs = [one.summary, seen, f"what to do: {one.recommendation}"]
        yield "cause", f"{likelihood} cause: {one.rule}{sureness}{_place_of(one)}", paragraphs
        for place, symptom in enumerate(one.symptoms):
            told.add(symptom.rule)
            yield _block(symptom, with_remedy=place == 0)
    for finding in findings:
        if finding.rule not in told:
            yield _block(finding)


def _block(finding: Finding, *, with_remedy: bool = True) -> Block:
    paragraphs = [finding.summary]
    if finding.evidence:
        paragraphs.append("evidence: " + ", ".join(f"{k} {number(v)}" for k, v in finding.evidence.items()))
    if finding.recommendation and with_remedy:
        paragraphs.append(f"what to do: {finding.recommendation}")
    return finding.severity, headline(finding), paragraphs


def headline(finding: Finding) -> str:
    """Severity, rule, steps and layers of a finding: "[warning] norm-spike, steps 3 to 5, in a, b"."""
    return f"[{finding.severity}] {shown(finding.rule)}{_place_of(finding)}"


def num_of_each(findings: Iterable[Finding]) -> str:
    """How many findings there are of each severity: "1 critical problem, 2 warnings"."""
    nums = Counter(finding.severity for finding in findings)
    nouns: dict[Severity, str] = {"critical": "critical problem", "warning": "warning", "info": "remark"}
    return ", ".join(count(nums[it], nouns[it]) for it in nouns if nums[it]) or "no problems found"


def _place_of(finding: Finding) -> str:
    first, last = finding.first_step, finding.last_step
    steps = "" if first is None else f", step {first}" if last in (None, first) else f", steps {first} to {last}"
    layers = listed(finding.layers, _MAX_LAYERS)
    return steps + (f", in {layers}" if layers else "")


def wrap(text: Any, indent: str, hang: str | None = None) -> list[str]:
    """`text`, escaped, in lines of at most 100 characters."""
    return textwrap.wrap(
        prose(text),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  " if hang is None else hang,
        break_on_hyphens=False,
        expand_tabs=False,
    )
