"""The charts of a page: which there are, what is told of each in words, and why others are left out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._text import shown
from ..stats.magnitudes import MagnitudeHistogram
from ..visualization import (
    plot_activations,
    plot_clip_rate,
    plot_gradient_norm,
    plot_layers,
    plot_learning_rate,
    plot_loss,
    plot_loss_scale,
    plot_magnitudes,
    plot_updates,
)
from ..visualization.layers import SHADED, histograms
from ..visualization.runs import DrawnRun
from .parts import Card

MAX_ROWS = 256  # of a heat map
_DIGITS, _DIGITS_OF_CELLS = 5, 4
_MAX_TOLD = 16
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
    """A figure as plain data, and the same in words and numbers, for those who do not see it.

    `group` is "layers" for those of which a page shows one at a time.
    """

    name: str
    title: str
    figure: dict[str, Any]
    told: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    height: int = 340
    group: str = ""


def charts_of(runs: Sequence[DrawnRun], cards: Sequence[Card]) -> tuple[list[Chart], list[str]]:
    """The charts that there is something to draw of, and why the others are not there."""
    charts: list[Chart] = []
    left_out: list[str] = []
    for name, title, plot in _CHARTS:
        try:
            figure = plot(list(runs))
        except ValueError as error:
            left_out.append(f"{title}: {error}.")
            continue
        _flag(figure, cards)
        charts.append(_of_series(name, title, figure))
    for name, title, draw in _MAPS:
        try:
            charts.append(_of_cells(f"layers-{name}", title, draw(runs[0])))
        except ValueError as error:
            left_out.append(f"Layers by {title}: {error}.")
    try:
        charts.append(_of_magnitudes(runs[0]))
    except ValueError as error:
        left_out.append(f"Magnitudes: {error}.")
    return charts, left_out


def _of_series(name: str, title: str, figure: Any) -> Chart:
    rows = []
    for trace in figure.data:
        if trace.mode == "markers" and trace.yaxis == "y2":
            rows.append([trace.name, f"at step {_listed(trace.x)}", "", "", ""])
            continue
        values = [(y, x) for x, y in zip(trace.x, trace.y) if isinstance(y, (int, float))]
        if values and not (trace.name or "").endswith("least to largest"):
            at = [f"{y:.4g} (step {x})" for y, x in (values[0], values[-1], min(values), max(values))]
            rows.append([trace.name, *at])
    told = "; ".join(f"{row[0]}: {row[1]}" + (f" to {row[2]}" if row[2] else "") for row in rows)
    return Chart(name, title, _plain(figure, _DIGITS), told, ("series", "first", "last", "least", "largest"), rows)


def _of_cells(name: str, title: str, figure: Any) -> Chart:
    """A heat map: the rows with the largest values are told."""
    heat = figure.data[0]
    is_log = bool(heat.colorbar.title.text)
    bad = {trace.name: trace for trace in figure.data}.get("NaN or Inf")
    found = []
    for place, (label, values) in enumerate(zip(heat.y, heat.z)):
        known = [(value, step) for value, step in zip(values, heat.x) if value is not None]
        steps = [step for step, one in zip(heat.x, bad.z[place] if bad else ()) if one]
        if known or steps:
            top, step = max(known, default=(-math.inf, 0))
            newest = known[-1][0] if known else math.nan
            found.append((len(steps), top, label, step, newest, steps))
    found.sort(key=lambda one: one[:2], reverse=True)
    rows = [
        [label, _number(top, is_log), str(step) if top > -math.inf else "-", _number(newest, is_log), _listed(steps)]
        for _, top, label, step, newest, steps in found[:_MAX_TOLD]
    ]
    told = f"{len(heat.y)} rows by {len(heat.x)} sampled steps, {heat.x[0]} to {heat.x[-1]}"
    if rows:
        told += f"; the largest value: {rows[0][0]}, {rows[0][1]} at step {rows[0][2]}"
    head = ("rows with the largest values", "largest", "at step", "newest", "NaN or Inf at steps")
    plain = _plain(figure, _DIGITS_OF_CELLS)
    for trace in plain["data"]:
        if any(" ... " in label for label in trace["y"]):
            continue  # which tensor of a group it is, only the text says
        trace.pop("text", None)
        value = "NaN or Inf" if trace["name"] == "NaN or Inf" else "%{z:.4g}"
        trace["hovertemplate"] = f"step %{{x}}<br>%{{y}}: {value}<extra></extra>"
    height = min(700, 140 + 9 * len(heat.y))
    return Chart(name, title, plain, told, head, rows, height, "layers")


def _of_magnitudes(run: DrawnRun) -> Chart:
    by_name = histograms(run)
    figure = plot_magnitudes(by_name)
    rows = []
    for name, one in by_name.items():
        for kind in SHADED:
            shares = one.underflow_ratio(kind), one.subnormal_ratio(kind), one.overflow_ratio(kind)
            rows.append([shown(name), kind, *(f"{share:.3g}" for share in shares)])
    told = "; ".join(_spread(shown(name), one) for name, one in by_name.items())
    head = ("what", "format", "share below it", "share that loses bits", "share above it")
    return Chart("magnitudes", figure.layout.title.text, _plain(figure, _DIGITS), told, head, rows, 420)


def _spread(name: str, one: MagnitudeHistogram) -> str:
    exponents = list(one.counts) or [0]
    return f"{name}: from 2^{exponents[0]} to 2^{exponents[-1] + 1}"


def _number(value: float, is_log: bool) -> str:
    return f"{10**value if is_log else value:.4g}" if math.isfinite(value) else "-"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:_MAX_TOLD])) + (", ..." if len(steps) > _MAX_TOLD else "") or "-"


def _flag(figure: Any, cards: Sequence[Card]) -> None:
    """The findings' numbers, at their steps; those of one step in one flag."""
    look = {"yref": "paper", "yanchor": "bottom", "showarrow": False, "bordercolor": "#888888", "borderpad": 1}
    at = sorted((card.first_step, card.number) for card in cards if card.first_step is not None)
    for step, numbers in itertools.groupby(at, lambda one: one[0]):
        figure.add_annotation(x=step, y=1.0, text=",".join(str(number) for _, number in numbers), **look)


def _plain(figure: Any, digits: int) -> dict[str, Any]:
    plain: dict[str, Any] = _rounded(figure.to_plotly_json(), digits)
    layout = plain["layout"]
    for key in ("template", "title"):
        layout.pop(key, None)
    if figure.data[0].type == "scatter":  # a legend below the axis, however many lines it has
        layout["legend"].update(yref="container", y=0, yanchor="bottom")
        layout["margin"]["b"] = 90
        layout["xaxis"]["title"]["standoff"] = 6
        layout["yaxis"]["nticks"] = 8
        values = [y for trace in figure.data for y in trace.y if isinstance(y, (int, float)) and 0.0 < y < math.inf]
        if layout["yaxis"]["type"] == "log" and values:  # else plotly names every digit
            span = max(values) / min(values)
            layout["yaxis"]["dtick"] = "D2" if span < 300.0 else 1 if span < 1e8 else None
    layout["margin"]["t"] = 60 if figure.data[0].type == "bar" else 26
    return plain


def _rounded(value: Any, digits: int) -> Any:
    """Plain data with as many digits as a chart can show; what is not finite is None."""
    if isinstance(value, dict):
        return {key: _rounded(one, digits) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one, digits) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
