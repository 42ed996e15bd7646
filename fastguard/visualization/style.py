"""The look that all figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._text import NAME_WIDTH, shown
from ..errors import missing_package
from .curves import Curve, Rail

# Distinct with any colour vision, also in print: Okabe and Ito 2008.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a7500")
RED = "#c1121f"
GREY = "#6c757d"
_RAIL = (0.93, 1.0)  # the part of the height for marks of steps
_MARKS = {
    "NaN": ("x", RED),
    "Inf": ("triangle-up", RED),
    "bad": ("x", RED),
    "skipped": ("line-ns-open", GREY),
    "zero": ("circle-open", GREY),
}


def graph_objects() -> Any:
    """`plotly.graph_objects`.

    Raises:
        ImportError: plotly is not installed; the message says how to install it.
    """
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise missing_package("fastguard.visualization", "plotly", error, "report") from error
    return graph_objects


def text(name: object) -> str:
    """`name` with HTML and control characters escaped: plotly interprets some HTML."""
    return shown(name, NAME_WIDTH).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def translucent(colour: str) -> str:
    """The colour of a band."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def figure(title: str, y: str, *, log: bool = False, x: str = "step") -> Any:
    """An empty figure."""
    made = graph_objects().Figure()
    made.update_layout(
        title={"text": text(title)},
        template="plotly_white",
        hovermode="x unified",
        margin={"l": 70, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": -0.2},
        xaxis={"title": {"text": x}},
        yaxis={"title": {"text": y}, "type": "log" if log else "linear", "exponentformat": "power" if log else "B"},
    )
    return made


def add_curve(made: Any, curve: Curve, name: str, colour: str, *, dash: str = "solid", what: str = "median") -> None:
    """A line. If a point is for more than one value: their median, in a band from the smallest to the largest."""
    points = curve.points
    if not points:
        return
    lines = graph_objects().Scatter
    x = [point.last_step for point in points]
    if curve.is_merged:
        outline = [point.high for point in points] + [point.low for point in reversed(points)]
        band = {
            "mode": "lines",
            "fill": "toself",
            "fillcolor": translucent(colour),
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": False,
        }
        made.add_trace(
            lines(x=x + x[::-1], y=outline, name=text(f"{name}: smallest to largest"), legendgroup=name, **band)
        )
        name = f"{name}: {what}"
    made.add_trace(
        lines(
            x=x,
            y=[point.middle for point in points],
            name=text(name),
            legendgroup=name.partition(":")[0],
            mode="lines" if len(points) > 1 else "markers",
            line={"color": colour, "dash": dash},
        )
    )


def add_rails(made: Any, rails: Sequence[tuple[str, str, Rail]], x: str = "step") -> None:
    """Marks along the top for steps without a value on the axis, or that were skipped. None is ever left out.

    Args:
        made: the figure.
        rails: for each, its name, a kind of `_MARKS`, and the steps.
        x: what the marks are for, if not steps.
    """
    rails = [(name, kind, rail) for name, kind, rail in rails if rail.marks]
    if not rails:
        return
    made.update_layout(
        yaxis={"domain": [0.0, _RAIL[0] - 0.02]},
        yaxis2={"domain": list(_RAIL), "range": [-1, len(rails)], "visible": False, "fixedrange": True, "anchor": "x"},
    )
    for height, (name, kind, rail) in enumerate(rails):
        symbol, colour = _MARKS[kind]
        labels = [f"{x} {a}" if a == b else f"{num} of the {x}s {a} to {b}" for a, b, num in rail.marks]
        made.add_trace(
            graph_objects().Scatter(
                x=[mark.first_step for mark in rail.marks],
                y=[height] * len(labels),
                yaxis="y2",
                mode="markers",
                name=text(f"{name} ({rail.count})"),
                marker={"symbol": symbol, "color": colour, "size": 9, "line": {"width": 2, "color": colour}},
                text=labels,
                hovertemplate="%{text}<extra>" + text(name) + "</extra>",
            )
        )


def add_line(made: Any, x: Sequence[float], y: Sequence[float], name: str, colour: str) -> None:
    """A dashed reference line, as a trace: plotly misplaces the labels of its own lines on a log axis."""
    line = {"color": colour, "dash": "dash", "width": 1.5}
    made.add_trace(graph_objects().Scatter(x=list(x), y=list(y), mode="lines", name=text(name), line=line))


def span(curves: Sequence[Curve]) -> tuple[int, int]:
    """First and last step of all curves; (0, 0) without points."""
    points = [point for curve in curves for point in (curve.points[:1] + curve.points[-1:])]
    return min((p.first_step for p in points), default=0), max((p.last_step for p in points), default=0)
