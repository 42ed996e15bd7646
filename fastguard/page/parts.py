"""What a page says, as plain data: findings, the ribbon, tensors, differences between runs."""

from __future__ import annotations

import inspect
import math
import sys
from array import array
from dataclasses import dataclass
from typing import Any

from .._text import NAME_WIDTH, listed, shown
from ..diagnosis import RULES, Finding
from ..report import Report
from ..report.showing import steps_of
from ..visualization.curves import worst
from ..visualization.ribbon import STATES
from ..visualization.runs import DrawnRun

_WIDTH = 1000  # of the ribbon, in parts
_MAX_EVENTS, _MAX_NAMES = 8, 8
_MAX_VALUES = 1 << 17  # in the lines of all tensors together
# A value of such a line, in two bytes: 0 for what was not there, up to `_TOP` a norm, by its logarithm.
_TOP, _ZERO, _BAD = 65_000, 65_534, 65_535
# Height and shade: told apart in greyscale too.
LOOKS = {
    "good": (40, "#7fb8a4"),
    "clipped": (60, "#e6c229"),
    "resumed": (80, "#56b4e9"),
    "rolled back": (85, "#9b5de5"),
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
    return Card(
        number,
        finding.rule,
        finding.severity,
        shown(finding.summary, 2000),
        steps_of(finding),
        finding.first_step,
        finding.last_step,
        listed(finding.layers, 8),
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
            height, colour = LOOKS.get(state, (0, "none"))
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


def module_rows(report: Report) -> dict[str, Any]:
    """A row for each module whose activations were sampled, in the order of execution: the newest sample."""
    columns = ["module", "kind", "mean", "std", "zeros", "saturated", "dead units", "units", "not finite"]
    keys = ("mean", "std", "zero_ratio", "saturation_ratio")
    last: tuple[str, ...] = ()
    if any(row["is_choice"] for row in report.modules):
        last, columns = ("entropy", "max_logit", "max_load"), [*columns, "entropy", "largest logit", "largest load"]
    rows = [
        [
            shown(row["module"], NAME_WIDTH),
            shown(row["family"], NAME_WIDTH),
            *(_plain(row[key]) for key in keys),
            *(row[key] for key in ("num_dead_units", "num_units", "num_nonfinite")),
            *(_plain(row[key]) for key in last),
        ]
        for row in report.modules
    ]
    return {"columns": columns, "rows": rows}


def cost_rows(report: Report) -> list[tuple[str, str]]:
    """What guarding and each sink cost, as far as anybody measured it: a log does not say."""
    numbers, rows = report.numbers, []
    if "overhead_mean_us" in numbers:
        told = f"{numbers['overhead_mean_us']:.3g} us a step on average"
        if "overhead_median_us" in numbers:
            told += f", median {numbers['overhead_median_us']:.3g} us"
        rows.append(("guarding", f"{told}; {numbers['overhead_total_s']:.3g} s in all"))
    if "num_collectives_per_step" in numbers:
        sent = f"{numbers['collective_bytes_per_step']:.0f} bytes from each rank"
        rows.append(("ranks", f"{numbers['num_collectives_per_step']:.3g} collectives a step, {sent}"))
    for sink in report.sinks:
        lost = f"; {sink['num_lost']} records lost" if sink["num_lost"] else ""
        told = f"{sink['mean_us']:.3g} us a step on average; {sink['total_s']:.3g} s in all{lost}"
        rows.append((f"sink {shown(sink['name'], NAME_WIDTH)}", told))
    return rows


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


def tensor_lines(run: DrawnRun) -> tuple[dict[str, Any], bytes]:
    """The norm of each tensor at the sampled steps, in the order of `tensor_rows`.

    Of more than 131,072 values, the largest of neighbouring steps stand for all of them.

    Returns:
        The steps, and the logarithms that 1 and the largest code stand for; the values, two bytes each, a row a tensor.
    """
    grid = run.grids["norm"]
    names = run.in_order(grid.rows)
    width = max(1, math.ceil(len(grid) * len(names) / _MAX_VALUES))
    places = range(0, len(grid), width)
    steps = [grid.steps[min(place + width, len(grid)) - 1][1] for place in places]
    lines = [grid.values(name) for name in names]
    if width > 1:
        lines = [[worst(line[place : place + width]) for place in places] for line in lines]
    known = [value for line in lines for value in line if 0.0 < value < math.inf]
    low, high = (math.log(min(known)), math.log(max(known))) if known else (0.0, 0.0)
    per_log = (_TOP - 1) / (high - low) if high > low else 0.0

    def code(value: float) -> int:
        if 0.0 < value < math.inf:
            return 1 + round((math.log(value) - low) * per_log)
        return 0 if math.isnan(value) else _ZERO if value == 0.0 else _BAD

    codes = array("H", [code(value) for line in lines for value in line])
    if sys.byteorder == "big":
        codes.byteswap()
    return {"steps": steps, "low": low, "high": high, "top": _TOP, "zero": _ZERO, "bad": _BAD}, codes.tobytes()


def _last(grid: Any, name: str) -> float:
    values = grid.values(name) if name in grid.rows else ()
    return next((value for value in reversed(values) if value == value and value < math.inf), math.nan)


def _plain(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
