"""What a page says, as plain data: findings, the ribbon, tensors, differences between runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._text import NAME_WIDTH, listed, shown
from ..diagnosis import RULES, Finding
from ..report import Report
from ..visualization.ribbon import STATES
from ..visualization.runs import DrawnRun

_WIDTH = 1000  # of the ribbon, in parts
_MAX_EVENTS, _MAX_NAMES = 8, 8
# Height and shade: told apart in greyscale too.
_LOOKS = {
    "good": (40, "#7fb8a4"),
    "clipped": (60, "#e6c229"),
    "resumed": (80, "#56b4e9"),
    "skipped": (90, "#6c757d"),
    "not finite": (100, "#c1121f"),
}


@dataclass(frozen=True)
class Card:
    """A finding, as a page shows it. `number` is that of its flag on the charts."""

    number: int
    rule: str
    severity: str
    summary: str
    steps: str
    first_step: int | None
    last_step: int | None
    layers: str
    evidence: tuple[tuple[str, str], ...]
    remedy: str
    about: str
    reads: str
    source: str


def cards_of(report: Report) -> list[Card]:
    """The report's findings, in its order."""
    return [_card(number, finding) for number, finding in enumerate(report.findings, 1)]


def _card(number: int, finding: Finding) -> Card:
    rule = RULES.get(finding.rule)
    first, last = finding.first_step, finding.last_step
    steps = "" if first is None else f"step {first}" if first == last or last is None else f"steps {first} to {last}"
    return Card(
        number,
        finding.rule,
        finding.severity,
        shown(finding.summary, 2000),
        steps,
        first,
        last,
        listed(finding.layers, 8) if finding.layers else "",
        tuple((key, _short(value)) for key, value in finding.evidence.items()),
        finding.recommendation,
        "" if rule is None else inspect.cleandoc(rule.check.__doc__ or ""),
        "" if rule is None else rule.reads,
        "" if rule is None else rule.source,
    )


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return listed([str(one) for one in value], 8)
    return shown(value, NAME_WIDTH)


def ribbon_svg(run: DrawnRun) -> list[dict[str, Any]]:
    """The ribbon as bars of an SVG of 1000 by 100: neighbours of one state are one bar."""
    bars: list[dict[str, Any]] = []
    for place, state in enumerate(run.ribbon.worst(_WIDTH)):
        if bars and bars[-1]["state"] == state:
            bars[-1]["width"] += 1
        else:
            height, colour = _LOOKS.get(state, (0, "none"))
            bars.append({"x": place, "width": 1, "y": 100 - height, "height": height, "fill": colour, "state": state})
    return [bar for bar in bars if bar["state"] != STATES[0]]


def infection(run: DrawnRun) -> list[dict[str, Any]]:
    """For steps that were not finite: the tensors in backward order, the likeliest origin first."""
    history = run.history
    events = {event.step: event for event in (*history.first_events, *history.last_events)}
    found = [event for _, event in sorted(events.items()) if event.names]
    return [
        {
            "step": event.step,
            "names": [shown(name, NAME_WIDTH) for name in event.names[:_MAX_NAMES]],
            "more": event.num_tensors - len(event.names[:_MAX_NAMES]),
            "told": f"{event.num_nans} NaN and {event.num_infs} Inf in {event.num_tensors} tensors, "
            + ("skipped" if event.skipped else "taken all the same"),
        }
        for event in found[:_MAX_EVENTS]
    ]


def tensor_rows(run: DrawnRun) -> dict[str, Any]:
    """A row for each tensor, in the order of the model: what it was like at the newest sample, and at worst."""
    norm, top, zeros, update = (run.grids[key] for key in ("norm", "max", "zeros", "update"))
    names = run.in_order(norm.rows)
    rows = []
    for name in names:
        norms = [value for value in norm.values(name) if not math.isnan(value)]
        finite = [value for value in norms if value < math.inf]
        rows.append(
            [
                shown(name, NAME_WIDTH),
                _plain(finite[-1] if finite else math.nan),
                _plain(max(finite, default=math.nan)),
                _plain(_last(top, name)),
                _plain(_last(zeros, name)),
                _plain(_last(update, name)),
                sum(value == math.inf for value in norms),
            ]
        )
    columns = ["tensor", "norm", "largest norm", "largest |g|", "zeros", "update / weights", "not finite in samples"]
    return {"columns": columns, "rows": rows}


def _last(grid: Any, name: str) -> float:
    values = grid.values(name) if name in grid.rows else ()
    return next((value for value in reversed(values) if value == value and value < math.inf), math.nan)


def _plain(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def parting(runs: Sequence[DrawnRun]) -> list[str]:
    """For each run but the first: from which step on its losses are others than the first one's."""
    told = []
    base = {point.last_step: point.middle for point in runs[0].curves["loss"].points}
    for run in runs[1:]:
        common = [(p.last_step, p.middle) for p in run.curves["loss"].points if p.last_step in base]
        first = next((step for step, loss in common if loss != base[step]), None)
        if not common:
            told.append(f"{run.name}: no step in common with {runs[0].name}")
        elif first is None:
            told.append(f"{run.name}: the same losses as {runs[0].name} at all {len(common)} steps in common")
        else:
            told.append(f"{run.name}: parts from {runs[0].name} at step {first}")
    return told


def differences(runs: Sequence[DrawnRun], reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    """A row for each number that the runs differ in."""
    keys = dict.fromkeys(key for report in reports for key in report.numbers)
    rows: list[tuple[str, list[str]]] = [("status", [str(report.status) for report in reports])]
    rows += [(key, [_number(report.numbers.get(key)) for report in reports]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
