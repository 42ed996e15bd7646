"""Series of any length in bounded memory, and the look that all figures share."""

from __future__ import annotations

import itertools
import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .._text import NAME_WIDTH, shown
from ..errors import missing_package

MAX_POINTS = 2000
_MAX_CELLS = 1 << 20
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


class Stretch(NamedTuple):
    """Some values in a row: the first and last step, the smallest, the median and the largest value."""

    first_step: int
    last_step: int
    low: float
    middle: float
    high: float


class Curve:
    """A series of finite values by step, as at most `max_points` points.

    If there are more, neighbours are merged: smallest and largest values stay exact, the `middle` (by
    default the median) becomes the mean of both.
    """

    def __init__(self, max_points: int, middle: Callable[[Sequence[float]], float] = statistics.median) -> None:
        self._max_points, self._width = max_points, 1  # values in a point
        self._middle = middle
        self._closed: list[Stretch] = []
        self._steps: list[int] = []
        self._open: list[float] = []

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Takes the values of some steps. Cost: 1 us each."""
        self._steps += steps
        self._open += values
        begin = 0
        while (end := begin + self._width) <= len(self._open):
            self.add_stretch(self._stretch(self._steps[begin:end], self._open[begin:end]))
            begin = end
        del self._steps[:begin], self._open[:begin]

    def add_stretch(self, point: Stretch) -> None:
        """Takes values that are summarised already."""
        self._closed.append(point)
        if len(self._closed) >= self._max_points:
            self._closed = _in_pairs(self._closed, _merged)
            self._width *= 2

    def _stretch(self, steps: Sequence[int], values: Sequence[float]) -> Stretch:
        return Stretch(steps[0], steps[-1], min(values), self._middle(values), max(values))

    @property
    def points(self) -> list[Stretch]:
        return [*self._closed, self._stretch(self._steps, self._open)] if self._open else list(self._closed)

    @property
    def is_merged(self) -> bool:
        return self._width > 1 or any(point.low != point.high for point in self._closed)


def _merged(a: Stretch, b: Stretch) -> Stretch:
    return Stretch(a[0], b[1], min(a.low, b.low), a.middle / 2 + b.middle / 2, max(a.high, b.high))


def _in_pairs(items: list[Any], merge: Callable[[Any, Any], Any]) -> list[Any]:
    """Half as many: neighbours as one. The last one is left if it has no neighbour."""
    return [*map(merge, items[::2], items[1::2]), *items[len(items) - len(items) % 2 :]]


class Mark(NamedTuple):
    """Marked steps, or tensors: the first, the last, and their number."""

    first_step: Any
    last_step: Any
    num: int


def marks_of(steps: Sequence[int]) -> list[Mark]:
    """The marked steps. None is dropped: if there are too many to draw, neighbours become one mark."""
    width = 1
    while sum(1 for _ in itertools.groupby(steps, width.__rfloordiv__)) > MAX_POINTS:  # by step // width
        width *= 2
    groups = ([*group] for _, group in itertools.groupby(steps, width.__rfloordiv__))
    return [Mark(min(group), max(group), len(group)) for group in groups]


class Grid:
    """Values by name and step: a row for each name, in the order of first appearance, a column for each sampled step.

    If there are more than `max_columns`, or a million values, neighbours are merged, and the larger value counts. A
    value that is not finite is Inf, and so the largest; a missing value is NaN.
    """

    def __init__(self, max_columns: int) -> None:
        self._max_columns = max_columns
        self._width, self._num_open = 1, 0
        self.rows: dict[str, int] = {}  # the place of each name
        self._columns: list[tuple[int, int, array[float]]] = []

    def add(self, step: int, names: Iterable[str], values: Iterable[float]) -> None:
        """Takes the values at a step. Cost: 0.2 us a name."""
        rows = self.rows
        places = [rows.setdefault(name, len(rows)) for name in names]
        column = array("f", [math.nan]) * len(rows)
        for place, value in zip(places, values):
            column[place] = value if value < math.inf else math.inf
        self._columns.append((step, step, column))
        if self._num_open:
            self._columns[-2:] = [_worst(*self._columns[-2:])]
        self._num_open = (self._num_open + 1) % self._width
        if len(self._columns) > max(2, min(self._max_columns, _MAX_CELLS // (len(rows) or 1))):
            self._num_open += self._width * (len(self._columns) % 2)
            self._columns = _in_pairs(self._columns, _worst)
            self._width *= 2

    @property
    def steps(self) -> list[tuple[int, int]]:
        """First and last step of each column."""
        return [(first, last) for first, last, _ in self._columns]

    def values(self, name: str) -> list[float]:
        place = self.rows[name]
        return [column[place] if place < len(column) else math.nan for _, _, column in self._columns]

    def column(self, index: int) -> dict[str, float]:
        """The values of one column that are not missing."""
        values = self._columns[index][2]
        found = ((name, values[place]) for name, place in self.rows.items() if place < len(values))
        return {name: value for name, value in found if not math.isnan(value)}

    def __len__(self) -> int:
        return len(self._columns)


def _worst(a: tuple[int, int, array[float]], b: tuple[int, int, array[float]]) -> tuple[int, int, array[float]]:
    longer, shorter = (a[2], b[2]) if len(a[2]) >= len(b[2]) else (b[2], a[2])
    merged = array("f", [x if x >= y or math.isnan(y) else y for x, y in zip(longer, shorter)])
    merged.extend(longer[len(shorter) :])
    return a[0], b[1], merged


def text(name: object) -> str:
    """`name` with HTML and control characters escaped: plotly interprets some HTML."""
    return shown(name, NAME_WIDTH).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def figure(title: str, y: str, *, log: bool = False, x: str = "step") -> Any:
    """An empty figure; an ImportError says how to install plotly."""
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise missing_package("fastguard.visualization", "plotly", error, "report") from error
    axis = {"type": "log", "exponentformat": "power", "nticks": 8} if log else {}
    return graph_objects.Figure().update_layout(
        title={"text": text(title)},
        template="plotly_white",
        hovermode="x unified",
        margin={"l": 70, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": -0.2},
        xaxis={"title": {"text": x}},
        yaxis={"title": {"text": y}, **axis},
    )


def add_curve(made: Any, curve: Curve, name: str, colour: str, *, dash: str = "solid") -> None:
    """A line. If a point is for more than one value: their middle, in a band from the smallest to the largest."""
    points = curve.points
    if not points:
        return
    x = [point.last_step for point in points]
    if curve.is_merged:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        made.add_scatter(
            x=x + x[::-1],
            y=[point.high for point in points] + [point.low for point in reversed(points)],
            name=text(f"{name}: smallest to largest"),
            legendgroup=name,
            mode="lines",
            fill="toself",
            fillcolor=f"rgba({red},{green},{blue},0.2)",
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
    made.add_scatter(
        x=x,
        y=[point.middle for point in points],
        name=text(name),
        legendgroup=name,
        mode="lines" if len(points) > 1 else "markers",
        line={"color": colour, "dash": dash},
    )


def add_rails(made: Any, rails: Sequence[tuple[str, str, list[Mark]]], x: str = "step") -> None:
    """Marks along the top for steps without a value on the axis, or that were skipped. None is ever left out.

    `rails` has, for each, its name, a kind of `_MARKS`, and the marks, of steps or of what `x` says.
    """
    rails = [rail for rail in rails if rail[2]]
    if not rails:
        return
    made.update_layout(
        yaxis={"domain": [0.0, _RAIL[0] - 0.02]},
        yaxis2={"domain": list(_RAIL), "range": [-1, len(rails)], "visible": False, "fixedrange": True, "anchor": "x"},
    )
    for height, (name, kind, marks) in enumerate(rails):
        symbol, colour = _MARKS[kind]
        labels = [f"{x} {a}" if a == b else f"{num} of the {x}s {a} to {b}" for a, b, num in marks]
        made.add_scatter(
            x=[mark.first_step for mark in marks],
            y=[height] * len(labels),
            yaxis="y2",
            mode="markers",
            name=text(f"{name} ({sum(mark.num for mark in marks)})"),
            marker={"symbol": symbol, "color": colour, "size": 9, "line": {"width": 2, "color": colour}},
            text=labels,
            hovertemplate="%{text}<extra>" + text(name) + "</extra>",
        )


def add_line(made: Any, x: Sequence[float], y: Sequence[float], name: str, colour: str) -> None:
    """A dashed reference line, as a trace: plotly misplaces the labels of its own lines on a log axis."""
    line = {"color": colour, "dash": "dash", "width": 1.5}
    made.add_scatter(x=list(x), y=list(y), mode="lines", name=text(name), line=line)


def span(curves: Sequence[Curve]) -> tuple[int, int]:
    """First and last step of all curves; (0, 0) without points."""
    points = [point for curve in curves for point in (curve.points[:1] + curve.points[-1:])]
    return min((p.first_step for p in points), default=0), max((p.last_step for p in points), default=0)
