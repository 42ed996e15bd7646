"""Figures by layer: gradient flow and heat maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import style
from .runs import DrawnRun, runs_of
from .style import Mark, worst

MAX_ROWS = 512
_MEASURES = {
    "norm": ("norm", "gradient norm", True),
    "update": ("update", "|update| / |weights|", True),
    "zeros": ("zeros", "share of zeros in the gradient", False),
    "saturation": ("saturated", "share of saturated activations", False),
    "max": ("max", "largest |gradient|", True),
}
_ACTIVATIONS = {
    "zeros": ("near zero", "share of (near) zero activations", False),
    "saturation": ("saturated", "share of saturated activations", False),
    "dead": ("dead", "share of dead units", False),
    "entropy": ("entropy", "entropy of attention and routers, as a share of its maximum", False),
}


def _one(source: Any, what: str) -> DrawnRun:
    runs = runs_of(source)
    if len(runs) > 1:
        raise ValueError(f"{what} shows one run, got {len(runs)}. Make a figure of each")
    return runs[0]


def plot_gradient_flow(source: Any, *, index: int = -1) -> Any:
    """Root mean square and largest |gradient| of each tensor at one sampled step, from the first layer to the last.

    If the bars get shorter towards the left, gradients vanish on their way to the first layers. The well-known figure
    of this name shows means of |gradient|, which are not recorded; the root mean square is never smaller.

    Args:
        source: a guard, a `TrainingHistory`, the path of a log.
        index: index among the steps with a table; -1 is the newest.

    Returns:
        A `plotly.graph_objects.Figure`. Marks along the top show tensors with NaN or Inf.

    Raises:
        ImportError: plotly is missing.
        ValueError: several runs; no table of tensors; no such step.

    Cost: as for `plot_loss`.
    """
    run = _one(source, "a gradient flow")
    grid = run.grids["rms"]
    if not -len(grid) <= index < len(grid):
        raise ValueError(f"there are {len(grid)} steps with a table of tensors, none with index {index}")
    rms, largest = grid.column(index), run.grids["max"]
    highest = largest.column(index) if len(largest) == len(grid) else {}
    names = run.in_order(rms)
    first, last = grid.steps[index]
    when = f"step {last}" if first == last else f"steps {first} to {last}, the largest of each"
    made = style.figure(f"Gradient flow, {when}", "|gradient|", log=True, x="tensor, from the input to the output")
    for name, values, colour in (("largest", highest, 5), ("root mean square", rms, 0)):
        if values:
            y = [values[name] if 0.0 < values[name] < math.inf else None for name in names]  # the axis is logarithmic
            made.add_bar(x=[*map(style.text, names)], y=y, name=name, marker={"color": style.COLOURS[colour]})
    bad = [Mark(style.text(name), style.text(name), 1) for name in names if math.isinf(rms[name])]
    style.add_rails(made, [("NaN or Inf", "bad", bad)], "tensor")
    return made.update_layout(barmode="overlay", hovermode="x").update_xaxes(type="category")


def plot_layers(source: Any, value: str = "norm", *, max_rows: int = MAX_ROWS) -> Any:
    """A heat map of layers by sampled steps, the first layer at the top.

    If there are more than `max_rows` tensors, neighbours in the model share a row, which shows their largest value and
    the names of the first and the last.

    Args:
        source: a guard, a `TrainingHistory`, the path of a log. A history has no tables, so its gradients have two
            columns: the first samples and the recent ones.
        value: "norm" or "max" of gradients, "update" over weights, share of "zeros" in gradients, "saturation" of
            activations.
        max_rows: the largest number of rows.

    Returns:
        A `plotly.graph_objects.Figure`. NaN and Inf are red.

    Raises:
        ImportError: plotly is missing.
        ValueError: there are several runs, `value` is unknown, or it was not sampled.

    Cost: as for `plot_loss`.
    """
    return _heat_map(source, value, _MEASURES, max_rows)


def plot_activations(source: Any, value: str = "dead") -> Any:
    """A heat map of modules by sampled steps: the share of dead units, of (near) zero or of saturated activations; or
    the entropy of attention and routers, as a share of its maximum.

    Args:
        source: a guard, a `TrainingHistory`, the path of a log.
        value: "dead", "zeros", "saturation" or "entropy".

    Returns:
        A `plotly.graph_objects.Figure`.

    Raises:
        ImportError: plotly is missing.
        ValueError: there are several runs, `value` is unknown, or no activations were sampled, as
            `wrap(..., activations=True)` does.

    Cost: as for `plot_loss`.
    """
    return _heat_map(source, value, _ACTIVATIONS, MAX_ROWS)


def _heat_map(source: Any, value: str, measures: Mapping[str, tuple[str, str, bool]], max_rows: int) -> Any:
    if value not in measures:
        raise ValueError(f"`value` must be one of {', '.join(measures)}; got {value!r}")
    key, title, is_log = measures[value]
    run = _one(source, "a heat map")
    grid = run.grids[key]
    if not grid.rows:
        raise ValueError(f"{run.name!r} has no samples of this: {title}")
    names = run.in_order(grid.rows)
    size = -(-len(names) // max(1, max_rows))
    groups = [names[i : i + size] for i in range(0, len(names), size)]
    labels = [style.text(g[0] if len(g) == 1 else f"{g[0]} ... {g[-1]}") for g in groups]
    values, bad, labels_of_cells = [], [], []
    for group in groups:
        rows = [grid.values(name) for name in group]
        columns = list(zip(*rows))
        top = [worst(column) for column in columns]
        values.append([_shade(one, is_log) for one in top])
        bad.append([1.0 if math.isinf(one) else None for one in top])
        labels_of_cells.append([_label_of(group, column, one) for column, one in zip(columns, top)])
    x = [last for _, last in grid.steps]
    made = style.figure(title[0].upper() + title[1:], "")
    bar: dict[str, Any] = {"title": {"text": "log10" if is_log else ""}}
    limits = {} if is_log else {"zmin": 0.0, "zmax": 1.0}
    hover = {"text": labels_of_cells, "hovertemplate": "step %{x}<br>%{text}<extra></extra>", "hoverongaps": False}
    made.add_heatmap(x=x, y=labels, z=values, colorscale="Cividis", colorbar=bar, name=title, **limits, **hover)
    if any(one is not None for row in bad for one in row):
        red = [[0.0, style.RED], [1.0, style.RED]]
        made.add_heatmap(x=x, y=labels, z=bad, colorscale=red, showscale=False, name="NaN or Inf", **hover)
    made.update_layout(hovermode="closest", margin={"l": 200})
    made.update_xaxes(type="category" if len(x) < 3 else "linear")
    made.update_yaxes(autorange="reversed", type="category", nticks=40)
    return made


def _shade(value: float, is_log: bool) -> float | None:
    if not math.isfinite(value):
        return None
    if not is_log:
        return value
    return math.log10(value) if value > 0.0 else None


def _label_of(names: Sequence[str], values: Sequence[float], top: float) -> str:
    """The value of a cell, and which tensor of the group has it."""
    if math.isnan(top):
        return ""
    name = next(name for name, value in zip(names, values) if value == top)
    return f"{style.text(name)}: " + ("NaN or Inf" if math.isinf(top) else f"{top:.4g}")
