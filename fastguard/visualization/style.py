"""Series of any length in bounded memory, and the look that all figures share."""

from __future__ import annotations

import math
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
    """Some values in a row: the first and last step, their number, the smallest, the mean and the largest value."""

    first_step: Any
    last_step: Any
    num: int = 1
    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0


class Bounded:
    """Items in a row, at most `most` of them: if there are more, neighbours are merged."""

    def __init__(self, most: int, merge: Callable[[Any, Any], Any]) -> None:
        self.most, self._merge = most, merge
        self.items: list[Any] = []
        self._width, self._num_open = 1, 0  # of what was added: in an item, and in the last one

    def push(self, item: Any) -> None:
        items = self.items
        items.append(item)
        if self._num_open:
            items[-2:] = [self._merge(*items[-2:])]
        self._num_open = (self._num_open + 1) % self._width
        if len(items) > self.most:
            self._num_open += self._width * (len(items) % 2)  # the last one has no neighbour
            self.items = [*map(self._merge, items[::2], items[1::2]), *items[len(items) - len(items) % 2 :]]
            self._width *= 2


class Curve(Bounded):
    """A series of finite values by step, or of marked steps. Smallest and largest values stay exact."""

    def __init__(self) -> None:
        super().__init__(MAX_POINTS, _merged)

    def add(self, step: int, value: float = 0.0) -> None:
        """Takes the value of a step. Cost: 1 us."""
        self.push(Stretch(step, step, 1, value, value, value))


def _merged(a: Stretch, b: Stretch) -> Stretch:
    num = a.num + b.num
    middle = a.middle * (a.num / num) + b.middle * (b.num / num)
    return Stretch(a.first_step, b.last_step, num, min(a.low, b.low), middle, max(a.high, b.high))


class Grid(Bounded):
    """Values by name and step: a row for each name, in the order of first appearance, a column for each sampled step.

    If there are more than `max_columns`, or a million values, neighbours are merged, and the larger value counts. A
    value that is not finite is Inf, and so the largest; a missing value is NaN.
    """

    def __init__(self, max_columns: int) -> None:
        super().__init__(max_columns, _worst)
        self._max_columns = max_columns
        self.rows: dict[str, int] = {}  # the place of each name

    def add(self, step: int, names: Iterable[str], values: Iterable[float]) -> None:
        """Takes the values at a step. Cost: 0.2 us a name."""
        rows = self.rows
        places = [rows.setdefault(name, len(rows)) for name in names]
        column = array("f", [math.nan]) * len(rows)
        for place, value in zip(places, values):
            column[place] = value if value < math.inf else math.inf
        self.most = max(2, min(self._max_columns, _MAX_CELLS // (len(rows) or 1)))
        self.push((step, step, column))

    @property
    def steps(self) -> list[tuple[int, int]]:
        """First and last step of each column."""
        return [(first, last) for first, last, _ in self.items]

    def values(self, name: str) -> list[float]:
        place = self.rows[name]
        return [column[place] if place < len(column) else math.nan for _, _, column in self.items]

    def column(self, index: int) -> dict[str, float]:
        """The values of one column that are not missing."""
        values = self.items[index][2]
        found = ((name, values[place]) for name, place in self.rows.items() if place < len(values))
        return {name: value for name, value in found if not math.isnan(value)}


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
    points = curve.items
    if not points:
        return
    x = [point.last_step for point in points]
    if any(point.low != point.high for point in points):
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


def add_rails(made: Any, rails: Sequence[tuple[str, str, list[Stretch]]], x: str = "step") -> None:
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
        labels = [f"{x} {a}" if a == b else f"{num} of the {x}s {a} to {b}" for a, b, num, *_ in marks]
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
    points = [point for curve in curves for point in curve.items]
    return min((p.first_step for p in points), default=0), max((p.last_step for p in points), default=0)
