"""The charts of a page, a description of each in words, and why others are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._text import count, number
from ..diagnosis import Finding
from ..visualization import (
    plot_activations,
    plot_clip_rate,
    plot_gradient_norm,
    plot_layers,
    plot_learning_rate,
    plot_loss,
    plot_loss_scale,
    plot_updates,
)
from ..visualization.runs import DrawnRun
from ..visualization.style import text

MAX_ROWS = 256  # of a heat map
_MIN_SAMPLES = 3  # a chart of fewer shows less than a sentence
_DIGITS, _DIGITS_OF_CELLS = 5, 4
_MAX_LISTED = 16
_CHARTS = (
    ("loss", "Loss", plot_loss),
    ("norm", "Gradient norm", plot_gradient_norm),
    ("clip-rate", "Clip rate", plot_clip_rate),
    ("lr", "Learning rate", plot_learning_rate),
    ("loss-scale", "Loss scale", plot_loss_scale),
    ("updates", "Updates", plot_updates),
)
_MAPS: tuple[tuple[str, str, Callable[[DrawnRun], Any]], ...] = (
    ("norm", "gradient norm", lambda run: plot_layers(run, "norm", max_rows=MAX_ROWS)),
    ("update", "update / weights", lambda run: plot_layers(run, "update", max_rows=MAX_ROWS)),
    ("zeros", "zeros in the gradient", lambda run: plot_layers(run, "zeros", max_rows=MAX_ROWS)),
    ("saturation", "saturated activations", lambda run: plot_layers(run, "saturation", max_rows=MAX_ROWS)),
    ("dead", "dead units", lambda run: plot_activations(run, "dead")),
    ("entropy", "entropy of attention and routers", lambda run: plot_activations(run, "entropy")),
    ("near-zero", "activations near zero", lambda run: plot_activations(run, "zeros")),
)


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
    makers += [(f"Layers by {title}", partial(_of_cells, name, title, draw, runs[0])) for name, title, draw in _MAPS]
    charts: list[Chart] = []
    left_out: list[str] = []
    for title, make in makers:
        try:
            charts.append(make())
        except ValueError as error:
            left_out.append(f"{title}: {error}.")
    return charts, left_out


def _check_samples(num: int) -> None:
    if num < _MIN_SAMPLES:
        raise ValueError(f"{count(num, 'sample')}, too few to plot")


def _of_series(name: str, title: str, plot: Any, runs: Sequence[DrawnRun], findings: Sequence[Finding]) -> Chart:
    figure = plot(list(runs))
    _check_samples(max(len(trace.x) for trace in figure.data))
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
    plain = _plain(figure, _DIGITS)
    if len(runs) == 1:
        _mark_findings(plain["layout"], findings, runs[0])
    for trace in plain["data"]:  # the run that it belongs to
        own = [
            (len(run.name), place) for place, run in enumerate(runs) if trace["name"].startswith(f"{text(run.name)},")
        ]
        trace["meta"] = max(own, default=(0, 0))[1]
    return Chart(name, title, plain, words, ("series", "first", "last", "smallest", "largest"), rows)


def _of_cells(name: str, title: str, draw: Callable[[DrawnRun], Any], run: DrawnRun) -> Chart:
    """A heat map, with its largest value, and the steps of NaN and Inf, in words."""
    figure = draw(run)
    heat = figure.data[0]
    _check_samples(len(heat.x))
    cells = [(z, y, x) for y, row in zip(heat.y, heat.z) for x, z in zip(heat.x, row) if z is not None]
    words = f"{len(heat.y)} rows by {len(heat.x)} sampled steps, {heat.x[0]} to {heat.x[-1]}"
    if cells:
        top, label, step = max(cells)
        words += f"; the largest value: {label}, {number(10**top if heat.colorbar.title.text else top)} at step {step}"
    for bad in figure.data[1:]:
        words += f"; NaN or Inf at step {_listed([x for x, *column in zip(bad.x, *bad.z) if any(column)])}"
    plain = _plain(figure, _DIGITS_OF_CELLS)
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


def _plain(figure: Any, digits: int) -> dict[str, Any]:
    plain: dict[str, Any] = _rounded(figure.to_plotly_json(), digits)
    layout = plain["layout"]
    for key in ("template", "title"):
        layout.pop(key, None)
    if figure.data[0].type == "scatter":  # the legend is below the axis, however many lines it has
        layout["legend"].update(yref="container", y=0, yanchor="bottom")
        layout["margin"]["b"] = 90 if len(figure.data) > 1 else 50
        layout["xaxis"]["title"]["standoff"] = 6
        layout["yaxis"]["nticks"] = 8
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
