"""Figures of one value per step (loss, norm, learning rate, update), and by layer (gradient flow, heat maps)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ..records.running import quantiles
from . import style
from .runs import DrawnRun, runs_of
from .style import Curve, Stretch

_WINDOW, _MIN_WINDOW = 0.05, 20  # of the clip rate: a share of the run, but at least 20 steps
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
}


def _names(runs: list[DrawnRun], what: str) -> list[str]:
    """The names of lines, with the run if there are several."""
    return [what] if len(runs) == 1 else [f"{run.name}, {what}" for run in runs]


def _add_curves(made: Any, runs: list[DrawnRun], what: str, curves: Sequence[Curve], missing: str) -> Any:
    for curve, name, colour in zip(curves, _names(runs, what), style.COLOURS):
        style.add_curve(made, curve, name, colour)
    if not made.data:
        raise ValueError(missing)
    return made


def plot_loss(source: Any) -> Any:
    """Loss and validation loss by step. Marks along the top show losses that are NaN or Inf.

    Args:
        source: a guard, a `TrainingHistory`, the path of a log; up to eight of them in a list, or in a dict by name.

    Returns:
        A `plotly.graph_objects.Figure`. For more than 2000 steps it shows the mean of neighbours in a band from the
        smallest to the largest.

    Raises:
        ImportError: plotly is missing.
        ValueError: there is no step, or none with a loss.
        OSError: a log cannot be read.

    Cost: for a log, one pass over it, 30 us a line, and 5 MB for any length.
    """
    runs = runs_of(source)
    made = style.figure("Loss", "loss")
    rails: list[tuple[str, str, list[Stretch]]] = []
    for run, name, val_name, colour in zip(runs, _names(runs, "loss"), _names(runs, "validation loss"), style.COLOURS):
        style.add_curve(made, run.curves["loss"], name, colour)
        beside = colour if len(runs) > 1 else style.COLOURS[1]
        style.add_curve(made, run.curves["val_loss"], val_name, beside, dash="dot")
        rails.append((f"{name} not finite", "bad", run.curves["bad"].items))
    if not made.data and not any(marks for _, _, marks in rails):
        raise ValueError("no step has a loss. Pass it to `guard.observe(loss=...)`")
    style.add_rails(made, rails)
    return made


def plot_gradient_norm(source: Any) -> Any:
    """The norm of all gradients together by step, with the clip limit; for a single run also the norm after clipping.

    The axis is logarithmic. Marks along the top show all steps whose norm is NaN, Inf or zero, and all skipped steps.

    Args, Returns, Raises, Cost: as for `plot_loss`.
    """
    runs = runs_of(source)
    made = style.figure("Gradient norm", "norm", log=True)
    rails: list[tuple[str, str, list[Stretch]]] = []
    for run, name, colour in zip(runs, _names(runs, "norm"), style.COLOURS):
        if run.history.num_clipped and len(runs) == 1:
            style.add_curve(made, run.curves["clipped norm"], f"{name} after clipping", style.COLOURS[2], dash="dot")
        style.add_curve(made, run.curves["norm"], name, colour)
        limit, whose = run.history.model.clip_limit, "" if len(runs) == 1 else f"{run.name}, "
        if limit is not None and 0.0 < limit < math.inf:
            beside = colour if len(runs) > 1 else style.GREY
            style.add_line(made, style.span([run.curves["norm"]]), [limit] * 2, f"{whose}clip limit {limit:g}", beside)
        for kind in ("NaN", "Inf", "skipped", "zero"):
            rails.append((whose + ("norm of zero" if kind == "zero" else kind), kind, run.curves[kind].items))
    style.add_rails(made, rails)
    return made


def plot_learning_rate(source: Any) -> Any:
    """The learning rate of the first group by step, on a logarithmic axis if it spans more than a factor of 100.

    Args, Returns, Raises, Cost: as for `plot_loss`. It also raises ValueError if no step has a learning rate.
    """
    runs = runs_of(source)
    curves = [run.curves["lr"] for run in runs]
    values = [point.middle for curve in curves for point in curve.items] or [0.0]
    is_wide = min(values) > 0.0 and max(values) > 100.0 * min(values)
    made = style.figure("Learning rate", "learning rate", log=is_wide)
    if min(values) == max(values) > 0.0:
        made.update_yaxes(range=[0.0, 2.0 * values[0]])  # plotly would show 3e-4 on an axis from -1 to 1
    return _add_curves(made, runs, "learning rate", curves, "no step has a learning rate")


def plot_clip_rate(source: Any) -> Any:
    """The share of steps that were clipped: a rolling mean over 5 % of the run, but at least 20 steps.

    Args, Returns, Raises, Cost: as for `plot_loss`. For a history it covers the window. It also raises ValueError if no
    step was clipped.
    """
    runs = runs_of(source)
    is_clipped = any(point.high for run in runs for point in run.curves["clipped"].items)
    made = style.figure("Clip rate", "share of steps clipped").update_yaxes(range=[0.0, 1.0], tickformat=".0%")
    return _add_curves(made, runs, "clipped", [_clip_rate(r) for r in runs if is_clipped], "no step was clipped")


def _clip_rate(run: DrawnRun) -> Curve:
    points, curve = run.curves["clipped"].items, Curve()
    window = max(_MIN_WINDOW, round(_WINDOW * (points[-1].last_step - points[0].first_step + 1)))
    recent: deque[Stretch] = deque()
    for point in points:
        recent.append(point)
        while recent[0].last_step <= point.last_step - window:
            recent.popleft()
        curve.add(point.last_step, fmean(one.middle for one in recent))
    return curve


def plot_loss_scale(source: Any) -> Any:
    """The loss scale of a GradScaler by step, on a logarithmic axis. It falls when half precision overflows.

    Args, Returns, Raises, Cost: as for `plot_loss`. It also raises ValueError if no step had a loss scale.
    """
    runs, made = runs_of(source), style.figure("Loss scale", "loss scale", log=True)
    missing = "no step had a loss scale: there is no GradScaler, or it unscaled the gradients before the step"
    return _add_curves(made, runs, "loss scale", [run.curves["loss_scale"] for run in runs], missing)


def plot_updates(source: Any) -> Any:
    """Norm of the update over norm of the weights at the sampled steps: the median of all weights, in a band from the
    smallest to the largest. A line marks 1e-3, which is usual for Adam.

    Args, Returns, Raises, Cost: as for `plot_loss`. It also raises ValueError if no update was measured, as
    `wrap(..., weights=True)` does.
    """
    runs, missing = runs_of(source), "no update was measured. Pass `weights=True` to `fastguard.wrap`"
    curves = [_over_weights(run) for run in runs]
    made = style.figure("Updates", "|update| / |weights|", log=True)
    _add_curves(made, runs, "update / weights", curves, missing)
    style.add_line(made, style.span(curves), [1e-3, 1e-3], "1e-3", style.GREY)
    return made


def _over_weights(run: DrawnRun) -> Curve:
    """A point for each column of the grid of updates."""
    grid, curve = run.grids["update"], Curve()
    for place, (first, last) in enumerate(grid.steps):
        values = [value for value in grid.column(place).values() if 0.0 < value < math.inf]
        if values:
            curve.push(Stretch(first, last, 1, min(values), quantiles(values, (0.5,))[0], max(values)))
    return curve


def plot_lr_finder(result: Any) -> Any:
    """The losses of a learning-rate range test, and the suggested learning rate.

    Args:
        result: what `LearningRateFinder.find` or `range_test` returned.

    Returns:
        A `plotly.graph_objects.Figure`.

    Raises:
        ImportError: plotly is missing.
        ValueError: the result has no point.

    Cost: 14 ms.
    """
    if not result["lrs"]:
        raise ValueError("the range test has no point to plot: its first loss was not finite")
    made = style.figure("Learning-rate range test", "loss", x="learning rate")
    made.update_xaxes(type="log")
    losses, suggested = list(result["losses"]), result["suggested_lr"]
    made.add_scatter(x=list(result["lrs"]), y=losses, name="loss", line={"color": style.COLOURS[0]})
    ends = [min(losses), max(losses)]
    style.add_line(made, [suggested] * 2, ends, f"suggested {suggested:.3g}", style.COLOURS[0])
    return made


def _one(source: Any, what: str) -> DrawnRun:
    runs = runs_of(source)
    if len(runs) > 1:
        raise ValueError(f"{what} shows one run, got {len(runs)}. Make a figure of each")
    return runs[0]


def plot_gradient_flow(source: Any) -> Any:
    """Root mean square and largest |gradient| of each tensor at the newest sampled step, from the first layer on.

    If the bars get shorter towards the left, gradients vanish on their way to the first layers. The well-known figure
    of this name shows means of |gradient|, which are not recorded; the root mean square is never smaller.

    Args:
        source: a guard, a `TrainingHistory`, the path of a log.

    Returns, Raises, Cost: as for `plot_loss`. Marks along the top show tensors with NaN or Inf. It also raises
    ValueError for several runs, and if there is no table of tensors.
    """
    run = _one(source, "a gradient flow")
    grid = run.grids["rms"]
    if not grid.rows:
        raise ValueError(f"{run.name!r} has no table of tensors")
    rms, largest = grid.column(-1), run.grids["max"]
    highest = largest.column(-1) if len(largest.items) == len(grid.items) else {}
    names = run.in_order(rms)
    first, last = grid.steps[-1]
    when = f"step {last}" if first == last else f"steps {first} to {last}, the largest of each"
    made = style.figure(f"Gradient flow, {when}", "|gradient|", log=True, x="tensor, from the input to the output")
    for name, values, colour in (("largest", highest, 5), ("root mean square", rms, 0)):
        if values:
            y = [values[name] if 0.0 < values[name] < math.inf else None for name in names]  # the axis is logarithmic
            made.add_bar(x=[*map(style.text, names)], y=y, name=name, marker={"color": style.COLOURS[colour]})
    bad = [Stretch(style.text(name), style.text(name)) for name in names if math.isinf(rms[name])]
    style.add_rails(made, [("NaN or Inf", "bad", bad)], "tensor")
    return made.update_layout(barmode="overlay", hovermode="x").update_xaxes(type="category")


def plot_layers(source: Any, value: str = "norm") -> Any:
    """A heat map of layers by sampled steps, the first layer at the top.

    If there are more than 512 tensors, neighbours in the model share a row, which shows their largest value and
    the names of the first and the last.

    Args:
        source: a guard, a `TrainingHistory`, the path of a log. A history has no tables, so its gradients have two
            columns: the first samples and the recent ones.
        value: "norm" or "max" of gradients, "update" over weights, share of "zeros" in gradients, "saturation" of
            activations.

    Returns, Raises, Cost: as for `plot_loss`. NaN and Inf are red. It also raises ValueError for several runs, an
    unknown `value`, and one that was not sampled.
    """
    return _heat_map(source, value, _MEASURES)


def plot_activations(source: Any, value: str = "dead") -> Any:
    """A heat map of modules by sampled steps: the share of dead units, of (near) zero or of saturated activations.

    Args:
        source: a guard, a `TrainingHistory`, the path of a log.
        value: "dead", "zeros" or "saturation".

    Returns, Raises, Cost: as for `plot_loss`. It also raises ValueError for several runs, an unknown `value`, and if no
    activations were sampled, as `wrap(..., activations=True)` does.
    """
    return _heat_map(source, value, _ACTIVATIONS)


def _heat_map(source: Any, value: str, measures: Mapping[str, tuple[str, str, bool]]) -> Any:
    if value not in measures:
        raise ValueError(f"`value` must be one of {', '.join(measures)}; got {value!r}")
    key, title, is_log = measures[value]
    run = _one(source, "a heat map")
    grid = run.grids[key]
    if not grid.rows:
        raise ValueError(f"{run.name!r} has no samples of this: {title}")
    names = run.in_order(grid.rows)
    size = -(-len(names) // MAX_ROWS)
    groups = [names[i : i + size] for i in range(0, len(names), size)]
    labels = [style.text(g[0] if len(g) == 1 else f"{g[0]} ... {g[-1]}") for g in groups]
    columns = [zip(*(grid.values(name) for name in group)) for group in groups]
    cells = [[_cell(group, values, is_log) for values in row] for group, row in zip(groups, columns)]
    shades, bad, said = ([[cell[part] for cell in row] for row in cells] for part in range(3))
    x = [last for _, last in grid.steps]
    made = style.figure(title[0].upper() + title[1:], "")
    bar: dict[str, Any] = {"title": {"text": "log10" if is_log else ""}}
    limits = {} if is_log else {"zmin": 0.0, "zmax": 1.0}
    hover = {"text": said, "hovertemplate": "step %{x}<br>%{text}<extra></extra>", "hoverongaps": False}
    made.add_heatmap(x=x, y=labels, z=shades, colorscale="Cividis", colorbar=bar, name=title, **limits, **hover)
    if any(one is not None for row in bad for one in row):
        red = [[0.0, style.RED], [1.0, style.RED]]
        made.add_heatmap(x=x, y=labels, z=bad, colorscale=red, showscale=False, name="NaN or Inf", **hover)
    made.update_layout(hovermode="closest", margin={"l": 200})
    made.update_xaxes(type="category" if len(x) < 3 else "linear")
    made.update_yaxes(autorange="reversed", type="category", nticks=40)
    return made


def _cell(names: Sequence[str], values: Sequence[float], is_log: bool) -> tuple[float | None, float | None, str]:
    """The shade of a group's largest value; 1.0 if that is not finite; the value, and which tensor has it."""
    there = [(value, name) for name, value in zip(names, values) if not math.isnan(value)]
    top, name = max(there, key=lambda pair: pair[0], default=(math.nan, ""))
    if not there:
        return None, None, ""
    if math.isinf(top):
        return None, 1.0, f"{style.text(name)}: NaN or Inf"
    shade = top if not is_log else math.log10(top) if top > 0.0 else None
    return shade, None, f"{style.text(name)}: {top:.4g}"
