"""The contents of a page, as plain data: key numbers, the ribbon, tensors, modules; charts, with their words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import visualization as draw
from .._text import NAME_WIDTH, count, duration, listed, number, shown
from ..diagnosis import Finding
from ..report import Report
from ..visualization.runs import DrawnRun
from ..visualization.style import text, worst

_WIDTH = 1000  # parts of the ribbon
_MAX_EVENTS, _MAX_NAMES = 8, 8
_MAX_VALUES = 1 << 17  # values in the lines of all tensors together
# Height and shade: distinct in greyscale too.
LOOKS = {
    "good": (40, "#7fb8a4"),
    "clipped": (60, "#e6c229"),
    "resumed": (80, "#56b4e9"),
    "rolled back": (85, "#9b5de5"),
    "skipped": (90, "#6c757d"),
    "not finite": (100, "#c1121f"),
}
MAX_ROWS = 256  # of a heat map
_MIN_SAMPLES = 3  # a chart of fewer shows less than a sentence
_DIGITS, _DIGITS_OF_CELLS = 5, 4
_MAX_LISTED = 16
_CHARTS = (
    ("loss", "Loss", draw.plot_loss),
    ("norm", "Gradient norm", draw.plot_gradient_norm),
    ("clip-rate", "Clip rate", draw.plot_clip_rate),
    ("lr", "Learning rate", draw.plot_learning_rate),
    ("loss-scale", "Loss scale", draw.plot_loss_scale),
    ("updates", "Updates", draw.plot_updates),
)
_MAPS: tuple[tuple[str, str, Callable[[DrawnRun], Any]], ...] = (
    ("norm", "gradient norm", lambda run: draw.plot_layers(run, "norm", max_rows=MAX_ROWS)),
    ("update", "update / weights", lambda run: draw.plot_layers(run, "update", max_rows=MAX_ROWS)),
    ("zeros", "zeros in the gradient", lambda run: draw.plot_layers(run, "zeros", max_rows=MAX_ROWS)),
    ("saturation", "saturated activations", lambda run: draw.plot_layers(run, "saturation", max_rows=MAX_ROWS)),
    ("dead", "dead units", lambda run: draw.plot_activations(run, "dead")),
    ("entropy", "entropy of attention and routers", lambda run: draw.plot_activations(run, "entropy")),
    ("near-zero", "activations near zero", lambda run: draw.plot_activations(run, "zeros")),
)


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
    x = 0
    for state, alike in itertools.groupby(run.ribbon.worst(_WIDTH)):
        width = len([*alike])
        if state in LOOKS:
            height, colour = LOOKS[state]
            bars.append({"x": x, "width": width, "y": 100 - height, "height": height, "fill": colour, "state": state})
        x += width
    return bars


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
    keys = ["module", "family", "mean", "std", "zero_ratio", "saturation_ratio"]
    keys += ["num_dead_units", "num_units", "num_nonfinite"]
    columns = ["module", "kind", "mean", "std", "zeros", "saturated", "dead units", "units", "not finite"]
    if any(row["is_choice"] for row in found):
        keys += ["entropy", "max_logit", "max_load"]
        columns += ["entropy", "largest logit", "largest load"]
    return {"columns": columns, "rows": [[_cell(row, key) for key in keys] for row in found]}


def _cell(row: Mapping[str, Any], key: str) -> Any:
    value = row[key]
    if isinstance(value, str):
        return shown(value, NAME_WIDTH)
    if key.endswith("units") and not row["num_units"]:
        return None
    return _plain(value) if isinstance(value, float) else value


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
    rows = [
        [
            shown(name, NAME_WIDTH),
            _plain(_last(norm, name)),
            _plain(max((value for value in norm.values(name) if value < math.inf), default=math.nan)),
            *(_plain(_last(grid, name)) for grid in (top, zeros, update)),
            next((step for step, value in zip(steps, norm.values(name)) if value == math.inf), None),
        ]
        for name in names
    ]
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


@dataclass(frozen=True)
class Chart:
    """A figure as plain data, and the same in words and numbers, for readers who do not see it.

    `group` is "layers" for the charts that the page shows one at a time.
    """

    name: str
    title: str
    figure: dict[str, Any]
    words: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    height: int = 340
    group: str = ""


def charts_of(runs: Sequence[DrawnRun], findings: Sequence[Finding]) -> tuple[list[Chart], list[str]]:
    """The charts with something to show, and why the others are left out."""
    makers = [(title, partial(_of_series, name, title, plot, runs, findings)) for name, title, plot in _CHARTS]
    makers += [(f"Layers by {title}", partial(_of_cells, name, title, make, runs[0])) for name, title, make in _MAPS]
    charts: list[Chart] = []
    left_out: list[str] = []
    for title, make in makers:
        try:
            charts.append(make())
        except ValueError as error:
            left_out.append(f"{title}: {error}.")
    return charts, left_out


def _of_series(name: str, title: str, plot: Any, runs: Sequence[DrawnRun], findings: Sequence[Finding]) -> Chart:
    figure = plot(list(runs))
    rows = []
    for trace in figure.data:
        if trace.mode == "markers" and trace.yaxis == "y2":
            rows.append([trace.name, f"at step {_listed(trace.x)}", "", "", ""])
            continue
        values = [(y, x) for x, y in zip(trace.x, trace.y) if isinstance(y, (int, float))]
        if values and not (trace.name or "").endswith("smallest to largest"):
            at = [f"{number(y)} (step {x})" for y, x in (values[0], values[-1], min(values), max(values))]
            rows.append([trace.name, *at])
    words = "; ".join(f"{row[0]}: {row[1]}" + (f" to {row[2]}" if row[2] else "") for row in rows)
    plain = _plain_figure(figure, _DIGITS)
    if len(runs) == 1:
        _mark_findings(plain["layout"], findings, runs[0])
    for trace in plain["data"]:  # the run that it belongs to
        own = [
            (len(run.name), place) for place, run in enumerate(runs) if trace["name"].startswith(f"{text(run.name)},")
        ]
        trace["meta"] = max(own, default=(0, 0))[1]
    return Chart(name, title, plain, words, ("series", "first", "last", "smallest", "largest"), rows)


def _of_cells(name: str, title: str, make: Callable[[DrawnRun], Any], run: DrawnRun) -> Chart:
    """A heat map, with its largest value, and the steps of NaN and Inf, in words."""
    figure = make(run)
    heat = figure.data[0]
    cells = [(z, y, x) for y, row in zip(heat.y, heat.z) for x, z in zip(heat.x, row) if z is not None]
    words = f"{len(heat.y)} rows by {len(heat.x)} sampled steps, {heat.x[0]} to {heat.x[-1]}"
    if cells:
        top, label, step = max(cells)
        words += f"; the largest value: {label}, {number(10**top if heat.colorbar.title.text else top)} at step {step}"
    for bad in figure.data[1:]:
        words += f"; NaN or Inf at step {_listed([x for x, *column in zip(bad.x, *bad.z) if any(column)])}"
    plain = _plain_figure(figure, _DIGITS_OF_CELLS)
    for trace in plain["data"]:
        if any(" ... " in label for label in trace["y"]):
            continue  # only the text says which tensor of a group it is
        trace.pop("text", None)
        value = "NaN or Inf" if trace["name"] == "NaN or Inf" else "%{z:.4g}"
        trace["hovertemplate"] = f"step %{{x}}<br>%{{y}}: {value}<extra></extra>"
    height = min(900, 110 + max(9, min(15, 900 // len(heat.y))) * len(heat.y))
    return Chart(f"layers-{name}", title, plain, words, (), (), height, "layers")


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:_MAX_LISTED])) + (", ..." if len(steps) > _MAX_LISTED else "") or "-"


def _mark_findings(layout: dict[str, Any], findings: Sequence[Finding], run: DrawnRun) -> None:
    """Puts the numbers of the findings above the chart: a flag at a step, a line over several steps, in as many rows as
    needed so that none covers another."""
    first, last = run.ribbon.first_step, run.ribbon.last_step
    room = 0.03 * max(1, last - first)  # the width of a number
    places: dict[tuple[int, int], list[str]] = {}
    for place, one in enumerate(findings, 1):
        if one.first_step is not None:
            end = one.first_step if one.last_step is None else one.last_step
            places.setdefault((one.first_step, end), []).append(str(place))
    ends: list[float] = []  # where each row becomes free
    shapes, notes = layout.setdefault("shapes", []), layout.setdefault("annotations", [])
    for (begin, end), numbers in sorted(places.items()):
        row = next((row for row, free in enumerate(ends) if free < begin), len(ends))
        ends[row:] = [max(end, begin + room), *ends[row + 1 :]]
        look = {"yref": "paper", "yanchor": "middle", "yshift": 10 + 16 * row, "showarrow": False, "borderpad": 1}
        middle = (begin + end) / 2 if end - begin > room else begin
        look |= {"bordercolor": "#888888", "bgcolor": "rgba(136,136,136,0.25)", "font": {"size": 10}}
        notes.append({"x": middle, "y": 1.0, "text": ",".join(numbers), **look})
        if end > begin:
            line = {"type": "line", "x0": begin, "x1": end, "yref": "paper", "ysizemode": "pixel", "yanchor": 1.0}
            line |= {"line": {"color": "#888888", "width": 3}, "opacity": 0.6, "layer": "above"}
            shapes.append({**line, "y0": 10 + 16 * row, "y1": 10 + 16 * row})
    layout["margin"]["t"] = max(26, 12 + 16 * len(ends))


def _plain_figure(figure: Any, digits: int) -> dict[str, Any]:
    num = max(len(trace.x) for trace in figure.data)
    if num < _MIN_SAMPLES:
        raise ValueError(f"{count(num, 'sample')}, too few to plot")
    plain: dict[str, Any] = _rounded(figure.to_plotly_json(), digits)
    layout = plain["layout"]
    for key in ("template", "title"):
        layout.pop(key, None)
    if figure.data[0].type == "scatter":  # the legend is below the axis, however many lines it has
        layout["legend"].update(yref="container", y=0, yanchor="bottom")
        layout["margin"]["b"] = 90 if len(figure.data) > 1 else 50
        layout["xaxis"]["title"]["standoff"], layout["yaxis"]["nticks"] = 6, 8
        values = [y for trace in figure.data for y in trace.y if isinstance(y, (int, float)) and 0.0 < y < math.inf]
        if layout["yaxis"]["type"] == "log" and values:  # else plotly labels every digit
            span = max(values) / min(values)
            layout["yaxis"]["dtick"] = "D2" if span < 300.0 else 1 if span < 1e8 else None
    layout["margin"]["t"] = 26
    return plain


def _rounded(value: Any, digits: int) -> Any:
    """Plain data with as many digits as a chart can show; None for NaN and Inf."""
    if isinstance(value, dict):
        return {key: _rounded(one, digits) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one, digits) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
