"""The contents of a page about one run, as plain data: key numbers, findings, the ribbon, tensors, modules."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from .._text import NAME_WIDTH, count, duration, listed, number, shown
from ..diagnosis import RULES, Finding, Rule
from ..report import Report
from ..report.report import steps_of
from ..visualization.runs import STATES, DrawnRun
from ..visualization.style import worst

_WIDTH = 1000  # parts of the ribbon
_MAX_EVENTS, _MAX_NAMES = 8, 8
_MAX_VALUES = 1 << 17  # values in the lines of all tensors together
_WORDS = {
    "lr": "learning rate",
    "val": "validation",
    "coef": "coefficient",
    "std": "standard deviation",
    "rms": "root mean square",
    "nonfinite": "not finite",
    "threshold": "limit",
    "nans": "NaN",
    "infs": "Inf",
    "us": "(us)",
}
# Height and shade: distinct in greyscale too.
LOOKS = {
    "good": (40, "#7fb8a4"),
    "clipped": (60, "#e6c229"),
    "resumed": (80, "#56b4e9"),
    "rolled back": (85, "#9b5de5"),
    "skipped": (90, "#6c757d"),
    "not finite": (100, "#c1121f"),
}


def cards_of(report: Report) -> list[dict[str, Any]]:
    """The findings of the report, in its order, each with its number on the charts."""
    return [
        {
            "number": place,
            "finding": one,
            "summary": shown(one.summary, 2000),
            "steps": steps_of(one),
            "layers": "" if all(name in one.summary for name in one.layers) else listed(one.layers, 8),
            "evidence": [(in_words(key), _in_words(value)) for key, value in one.evidence.items()],
            "rule": RULES.get(one.rule),
            "about": _about(RULES.get(one.rule)),
        }
        for place, one in enumerate(report.findings, 1)
    ]


def _about(rule: Rule | None) -> str:
    """The docstring of a rule, with the values of thresholds in place of their names."""
    if rule is None:
        return ""
    values: dict[str, Any] = dict(rule.thresholds)
    text = " ".join((rule.check.__doc__ or "").split())
    return re.sub(r"`(\w+)`", lambda found: number(values.get(found[1], found[1])), text)


def in_words(key: str) -> str:
    """A key of evidence, or of the numbers of a report, in words.

    >>> in_words("last_num_nans"), in_words("lr"), in_words("is_certain"), in_words("the rule x")
    ('last NaN', 'learning rate', 'certain', 'the rule x')
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
        return shown(key, NAME_WIDTH)
    return " ".join(_WORDS.get(part, part) for part in key.split("_") if part not in ("num", "is"))


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return listed([str(one) for one in value], 8)
    return shown(number(value), NAME_WIDTH)


def key_numbers(run: DrawnRun, report: Report) -> dict[str, tuple[str, str]]:
    """The row on top of the page: each number by name, with a number to compare it with."""
    numbers = report.numbers
    rows: dict[str, tuple[str, str]] = {}
    for key, name in (("loss", "Final loss"), ("val_loss", "Validation loss")):
        if f"{key}_last" in numbers:
            best = min(run.curves[key].points, key=lambda point: point.low, default=None)
            at = f"best {number(best.low)} at step {best.last_step}" if best else ""
            rows[name] = (number(numbers[f"{key}_last"]), at)
    clock = run.curves["time"].points
    taken = clock[-1].high - clock[0].low if clock else 0.0
    rows["Steps"] = (f"{numbers['num_steps']:,}", f"the last is step {run.ribbon.last_step}")
    for key, name, which in (("skip", "Skipped", "steps"), ("clip", "Clipped", "good steps")):
        if f"{key}_rate" in numbers:
            rate = f"{100.0 * numbers[f'{key}_rate']:.3g} % of the {which}"
            rows[name] = (f"{numbers[f'num_{key}ped']:,}", rate)
    if taken > 0.0:
        rows["Run time"] = (duration(taken), f"{numbers['num_steps'] / taken:.3g} steps a second")
    if "overhead_mean_us" in numbers:
        rows["Guarding"] = (duration(1e-6 * numbers["overhead_mean_us"]), "a step on average")
    last = run.history.last
    if last is not None and last.gradients.total_elements:
        rows["Parameters"] = (f"{last.gradients.total_elements:,}", "with a gradient")
    return rows


def clock(run: DrawnRun) -> tuple[list[int], list[float]]:
    """Steps in rising order, and the seconds from the first step to each."""
    steps: list[int] = []
    seconds: list[float] = []
    points = run.curves["time"].points
    for point in points:
        taken = round(point.high - points[0].low, 3)
        if not steps or (point.last_step > steps[-1] and taken >= seconds[-1]):
            steps.append(point.last_step)
            seconds.append(taken)
    return steps, seconds


def ribbon_svg(run: DrawnRun) -> list[dict[str, Any]]:
    """The ribbon as bars of an SVG of 1000 by 100: neighbours with the same state are one bar."""
    bars: list[dict[str, Any]] = []
    for place, state in enumerate(run.ribbon.worst(_WIDTH)):
        if bars and bars[-1]["state"] == state:
            bars[-1]["width"] += 1
        else:
            height, colour = LOOKS.get(state, (0, "none"))
            bars.append({"x": place, "width": 1, "y": 100 - height, "height": height, "fill": colour, "state": state})
    return [bar for bar in bars if bar["state"] != STATES[0]]


def infection(run: DrawnRun) -> list[dict[str, Any]]:
    """The tensors with NaN or Inf in backward order, the likeliest origin first, and the steps at which it was so."""
    history = run.history
    events = {event.step: event for event in (*history.first_events, *history.last_events)}
    steps: dict[tuple[Any, ...], list[int]] = {}
    for step, event in sorted(events.items()):
        if event.names:
            found = f"{event.num_nans} NaN and {event.num_infs} Inf in {count(event.num_tensors, 'tensor')}"
            what = f"{found}, {'' if event.skipped else 'not '}skipped"
            steps.setdefault((event.names[:_MAX_NAMES], event.num_tensors, what), []).append(step)
    return [
        {
            "when": f"Step{'s' * (len(at) > 1)} {listed(at, 8)}",
            "names": [shown(name, NAME_WIDTH) for name in names],
            "more": num - len(names),
            "what": what,
        }
        for (names, num, what), at in list(steps.items())[:_MAX_EVENTS]
    ]


def module_rows(report: Report) -> dict[str, Any]:
    """A row for each sampled module with its newest sample; modules that the findings name come first."""
    about = {name for finding in report.findings for name in finding.layers}
    found = sorted(report.modules, key=lambda row: (row["module"] not in about, not row["num_nonfinite"]))
    columns = ["module", "kind", "mean", "std", "zeros", "saturated", "dead units", "units", "not finite"]
    keys = ("mean", "std", "zero_ratio", "saturation_ratio")
    last: tuple[str, ...] = ()
    if any(row["is_choice"] for row in found):
        last, columns = ("entropy", "max_logit", "max_load"), [*columns, "entropy", "largest logit", "largest load"]
    rows = [
        [
            shown(row["module"], NAME_WIDTH),
            shown(row["family"], NAME_WIDTH),
            *(_plain(row[key]) for key in keys),
            *(row[key] if row["num_units"] else None for key in ("num_dead_units", "num_units")),
            row["num_nonfinite"],
            *(_plain(row[key]) for key in last),
        ]
        for row in found
    ]
    return {"columns": columns, "rows": rows}


def tensor_names(run: DrawnRun, findings: Sequence[Finding]) -> list[str]:
    """Names of tensors: first those in the findings and the first NaN or Inf, then the others by largest norm."""
    events = [*run.history.first_events, *run.history.last_events]
    about = [name for finding in findings for name in finding.layers]
    about += [name for event in sorted(events, key=lambda event: event.step)[:1] for name in event.names]
    place = {name: i for i, name in enumerate(dict.fromkeys(about))}
    grid = run.grids["norm"]

    def order(name: str) -> tuple[int, float]:
        finite = [value for value in grid.values(name) if value < math.inf]
        return place.get(name, len(place)), -max(finite, default=0.0)

    return sorted(run.in_order(grid.rows), key=order)


def tensor_rows(run: DrawnRun, names: Sequence[str]) -> dict[str, Any]:
    """A row for each tensor, with its newest and its worst values."""
    norm, top, zeros, update = (run.grids[key] for key in ("norm", "max", "zeros", "update"))
    steps = [first for first, _ in norm.steps]
    rows = []
    for name in names:
        values = norm.values(name)
        finite = [value for value in values if value < math.inf]
        rows.append(
            [
                shown(name, NAME_WIDTH),
                _plain(finite[-1] if finite else math.nan),
                _plain(max(finite, default=math.nan)),
                _plain(_last(top, name)),
                _plain(_last(zeros, name)),
                _plain(_last(update, name)),
                next((step for step, value in zip(steps, values) if value == math.inf), None),
            ]
        )
    columns = ["tensor", "norm", "largest norm", "largest |g|", "zeros", "update / weights", "first NaN or Inf at step"]
    return {"columns": columns, "rows": rows}


def tensor_lines(run: DrawnRun, names: Sequence[str]) -> dict[str, Any]:
    """The norm of each tensor at the sampled steps, one row for each tensor; -1 is for NaN and Inf.

    If there are more than 131,072 values, the largest of neighbouring steps is kept.
    """
    grid = run.grids["norm"]
    width = max(1, math.ceil(len(grid) * len(names) / _MAX_VALUES))
    places = range(0, len(grid), width)
    lines = []
    for name in names:
        line = grid.values(name)
        line = [worst(line[place : place + width]) for place in places] if width > 1 else line
        lines.append([-1 if value == math.inf else _plain(value) for value in line])
    return {"steps": [grid.steps[min(place + width, len(grid)) - 1][1] for place in places], "rows": lines}


def _last(grid: Any, name: str) -> float:
    values = grid.values(name) if name in grid.rows else ()
    return next((value for value in reversed(values) if value == value and value < math.inf), math.nan)


def _plain(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
