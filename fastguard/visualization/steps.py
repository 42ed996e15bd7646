"""Figures of one value per step: loss, norm, learning rate, update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..records.running import quantiles
from . import style
from .runs import DrawnRun, runs_of
from .style import MAX_POINTS, Curve, Mark, Stretch, marks_of, mean

_WINDOW, _MIN_WINDOW = 0.05, 20  # of the clip rate: a share of the run, but at least 20 steps


def _names(runs: list[DrawnRun], what: str) -> list[str]:
    """The names of lines, with the run if there are several."""
    return [what] if len(runs) == 1 else [f"{run.name}, {what}" for run in runs]


def _add_curves(made: Any, runs: list[DrawnRun], what: str, curve_of: Callable[[DrawnRun], Curve]) -> None:
    for run, name, colour in zip(runs, _names(runs, what), style.COLOURS):
        style.add_curve(made, curve_of(run), name, colour)


def plot_loss(source: Any) -> Any:
    """Loss and validation loss by step. Marks along the top show losses that are NaN or Inf.

    Args:
        source: a guard, a `TrainingHistory`, the path of a log; up to eight of them in a list, or in a dict by name.

    Returns:
        A `plotly.graph_objects.Figure`. For more than 2000 steps it shows the median of neighbours in a band from the
        smallest to the largest.

    Raises:
        ImportError: plotly is missing.
        ValueError: there is no step, or none with a loss.
        OSError: a log cannot be read.

    Cost: for a log, one pass over it, 25 us a line, and 5 MB for any length.
    """
    runs = runs_of(source)
    made = style.figure("Loss", "loss")
    rails: list[tuple[str, str, list[Mark]]] = []
    for run, name, val_name, colour in zip(runs, _names(runs, "loss"), _names(runs, "validation loss"), style.COLOURS):
        style.add_curve(made, run.curves["loss"], name, colour)
        beside = colour if len(runs) > 1 else style.COLOURS[1]
        style.add_curve(made, run.curves["val_loss"], val_name, beside, dash="dot")
        rails.append((f"{name} not finite", "bad", marks_of(run.rails["bad"])))
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
    rails: list[tuple[str, str, list[Mark]]] = []
    for run, name, colour in zip(runs, _names(runs, "norm"), style.COLOURS):
        if run.history.num_clipped and len(runs) == 1:
            style.add_curve(made, run.curves["clipped norm"], f"{name} after clipping", style.COLOURS[2], dash="dot")
        style.add_curve(made, run.curves["norm"], name, colour)
        limit, whose = run.history.model.clip_limit, "" if len(runs) == 1 else f"{run.name}, "
        if limit is not None and 0.0 < limit < math.inf:
            beside = colour if len(runs) > 1 else style.GREY
            style.add_line(made, style.span([run.curves["norm"]]), [limit] * 2, f"{whose}clip limit {limit:g}", beside)
        for kind in ("NaN", "Inf", "skipped", "zero"):
            rails.append((whose + ("norm of zero" if kind == "zero" else kind), kind, marks_of(run.rails[kind])))
    style.add_rails(made, rails)
    return made


def plot_learning_rate(source: Any) -> Any:
    """The learning rate of the first group by step, on a logarithmic axis if it spans more than a factor of 100.

    Args, Returns, Cost: as for `plot_loss`.

    Raises:
        ValueError: no step has a learning rate. Others as for `plot_loss`.
    """
    runs = runs_of(source)
    values = [p.middle for run in runs for p in run.curves["lr"].points]
    if not values:
        raise ValueError("no step has a learning rate")
    is_wide = min(values) > 0.0 and max(values) > 100.0 * min(values)
    made = style.figure("Learning rate", "learning rate", log=is_wide)
    _add_curves(made, runs, "learning rate", lambda run: run.curves["lr"])
    if min(values) == max(values) > 0.0:
        made.update_yaxes(range=[0.0, 2.0 * values[0]])  # plotly would show 3e-4 on an axis from -1 to 1
    return made


def plot_clip_rate(source: Any) -> Any:
    """The share of steps that were clipped: a rolling mean over 5 % of the run, but at least 20 steps.

    Args, Returns, Cost: as for `plot_loss`. For a history it covers the window.

    Raises:
        ValueError: no step was clipped. Others as for `plot_loss`.
    """
    runs = runs_of(source)
    if not any(point.high for run in runs for point in run.curves["clipped"].points):
        raise ValueError("no step was clipped")
    made = style.figure("Clip rate", "share of steps clipped")
    _add_curves(made, runs, "clipped", _clip_rate)
    made.update_yaxes(range=[0.0, 1.0], tickformat=".0%")
    return made


def _clip_rate(run: DrawnRun) -> Curve:
    points, curve = run.curves["clipped"].points, Curve(MAX_POINTS)
    window = max(_MIN_WINDOW, round(_WINDOW * (points[-1].last_step - points[0].first_step + 1)))
    recent: deque[Stretch] = deque()
    for point in points:
        recent.append(point)
        while recent[0].last_step <= point.last_step - window:
            recent.popleft()
        curve.add(point.last_step, mean([one.middle for one in recent]))
    return curve


def plot_loss_scale(source: Any) -> Any:
    """The loss scale of a GradScaler by step, on a logarithmic axis. It falls when half precision overflows.

    Args, Returns, Cost: as for `plot_loss`.

    Raises:
        ValueError: no step had a loss scale. Others as for `plot_loss`.
    """
    made = style.figure("Loss scale", "loss scale", log=True)
    _add_curves(made, runs_of(source), "loss scale", lambda run: run.curves["loss_scale"])
    if not made.data:
        raise ValueError(
            "no step had a loss scale: there is no GradScaler, or it unscaled the gradients before the step"
        )
    return made


def plot_updates(source: Any) -> Any:
    """Norm of the update over norm of the weights at the sampled steps: the median of all weights, in a band from the
    smallest to the largest. A line marks 1e-3, which is usual for Adam.

    Args, Returns, Cost: as for `plot_loss`.

    Raises:
        ValueError: no update was measured, as `wrap(..., weights=True)` does. Others as for `plot_loss`.
    """
    runs = runs_of(source)
    made = style.figure("Updates", "|update| / |weights|", log=True)
    _add_curves(made, runs, "update / weights", _over_weights)
    if not made.data:
        raise ValueError("no update was measured. Pass `weights=True` to `fastguard.wrap`")
    style.add_line(made, style.span([_over_weights(run) for run in runs]), [1e-3, 1e-3], "1e-3", style.GREY)
    return made


def _over_weights(run: DrawnRun) -> Curve:
    """A point for each column of the grid of updates."""
    grid, curve = run.grids["update"], Curve(MAX_POINTS)
    for place, (first, last) in enumerate(grid.steps):
        values = [value for value in grid.column(place).values() if 0.0 < value < math.inf]
        if values:
            curve.add_stretch(Stretch(first, last, min(values), quantiles(values, (0.5,))[0], max(values)))
    return curve


def plot_lr_finder(result: Any) -> Any:
    """The losses of a learning-rate range test, and the suggested learning rate.

    Args:
        result: what `LearningRateFinder.find` or `range_test` returned, or a dict of such results by name.

    Returns:
        A `plotly.graph_objects.Figure`.

    Raises:
        ImportError: plotly is missing.
        ValueError: a result has no point.

    Cost: 14 ms.
    """
    results = dict(result) if isinstance(result, Mapping) and "losses" not in result else {"": result}
    made = style.figure("Learning-rate range test", "loss", x="learning rate")
    made.update_xaxes(type="log")
    for (name, one), colour in zip(results.items(), style.COLOURS):
        if not one["lrs"]:
            raise ValueError("the range test has no point to plot: its first loss was not finite")
        whose, losses, suggested = f"{name}: " if name else "", list(one["losses"]), one["suggested_lr"]
        made.add_scatter(x=list(one["lrs"]), y=losses, name=style.text(f"{whose}loss"), line={"color": colour})
        ends = [min(losses), max(losses)]
        style.add_line(made, [suggested] * 2, ends, f"{whose}suggested {suggested:.3g}", colour)
    return made
