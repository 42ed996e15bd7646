"""Series of any length in bounded memory, as figures show them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_MAX_CELLS = 1 << 20


class Stretch(NamedTuple):
    """Some values in a row: the first and last step, the smallest, the median and the largest value."""

    first_step: int
    last_step: int
    low: float
    middle: float
    high: float


class Curve:
    """A series of finite values by step, as at most `max_points` points.

    If there are more, neighbours are merged: smallest and largest values stay exact, the median becomes the mean of
    both medians.

    Args:
        max_points: at least 2.

    Attributes:
        points: oldest first; at most `max_points`.

    >>> curve = Curve(max_points=4)
    >>> for step in range(100):
    ...     curve.add(step, float(step % 10))
    >>> len(curve.points) <= 4, curve.points[0].low, curve.points[0].high, curve.is_merged
    (True, 0.0, 9.0, True)
    """

    def __init__(self, max_points: int) -> None:
        self._max_points = max_points
        self._closed: list[Stretch] = []
        self._steps: list[int] = []
        self._open: list[float] = []
        self._width = 1  # values in a point

    def add(self, step: int, value: float) -> None:
        """Takes the value of one step. Cost: 1 us."""
        self.extend((step,), (value,))

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """As `add` for each. Cost: 0.15 us a value of a long series."""
        place = 0
        while place < len(values):
            end = place + self._width - len(self._open)
            self._steps += steps[place:end]
            self._open += values[place:end]
            place = end
            if len(self._open) >= self._width:
                self._closed.append(self._open_stretch())
                self._steps, self._open = [], []
                self._shrink()

    def add_stretch(self, point: Stretch) -> None:
        """Takes values that are summarised already."""
        self._closed.append(point)
        self._shrink()

    def _shrink(self) -> None:
        if len(self._closed) >= self._max_points:
            last = self._closed[-1:] if len(self._closed) % 2 else []
            self._closed = [_merged(a, b) for a, b in zip(self._closed[::2], self._closed[1::2])] + last
            self._width *= 2

    def _open_stretch(self) -> Stretch:
        values = sorted(self._open)
        half = len(values) // 2
        middle = values[half] if len(values) % 2 else values[half - 1] / 2 + values[half] / 2
        return Stretch(self._steps[0], self._steps[-1], values[0], middle, values[-1])

    @property
    def points(self) -> list[Stretch]:
        return [*self._closed, self._open_stretch()] if self._open else list(self._closed)

    @property
    def is_merged(self) -> bool:
        """Whether a point may be for more than one value."""
        return self._width > 1 or any(point.low != point.high for point in self._closed)

    def __len__(self) -> int:
        return len(self._closed) + bool(self._open)


def _merged(a: Stretch, b: Stretch) -> Stretch:
    middle = a.middle / 2 + b.middle / 2
    return Stretch(a.first_step, b.last_step, min(a.low, b.low), middle, max(a.high, b.high))


class Mark(NamedTuple):
    """Marked steps, or tensors: the first, the last, and their number."""

    first_step: Any
    last_step: Any
    num: int


class Rail:
    """Marked steps. None is dropped: if there are too many to draw, neighbours become one mark.

    >>> rail = Rail(max_marks=2)
    >>> for step in (3, 4, 900):
    ...     rail.add(step)
    >>> rail.marks
    [Mark(first_step=3, last_step=4, num=2), Mark(first_step=900, last_step=900, num=1)]
    """

    def __init__(self, max_marks: int) -> None:
        self._max_marks = max_marks
        self._width = 1  # steps
        self.marks: list[Mark] = []

    def add(self, step: int) -> None:
        """Marks a step. Cost: 0.3 us."""
        self._append(Mark(step, step, 1))
        while len(self.marks) > self._max_marks:
            self._width *= 2
            marks, self.marks = self.marks, []
            for mark in marks:
                self._append(mark)

    def _append(self, mark: Mark) -> None:
        last = self.marks[-1] if self.marks else None
        if last is not None and last.first_step // self._width == mark.last_step // self._width:
            steps = last.first_step, last.last_step, mark.first_step, mark.last_step
            self.marks[-1] = Mark(min(steps), max(steps), last.num + mark.num)
        else:
            self.marks.append(mark)

    @property
    def count(self) -> int:
        """The number of marked steps."""
        return sum(mark.num for mark in self.marks)


class Grid:
    """Values by name and step: a row for each name, in the order of first appearance, a column for each sampled step.

    If there are more than `max_columns`, or a million values, neighbours are merged, and the larger value counts. A
    value that is not finite is Inf, and so the largest; a missing value is NaN.

    Attributes:
        rows: the place of each name.
    """

    def __init__(self, max_columns: int) -> None:
        self._max_columns = max_columns
        self._width, self._num_open = 1, 0
        self.rows: dict[str, int] = {}
        self._names: tuple[str, ...] = ()
        self._columns: list[tuple[int, int, array[float]]] = []

    def add(self, step: int, names: Iterable[str], values: Iterable[float]) -> None:
        """Takes the values at a step. Cost: 0.2 us a name."""
        rows, names, values = self.rows, tuple(names), [value if value < math.inf else math.inf for value in values]
        if names == self._names:  # nearly always
            column = array("f", values)
        else:
            column = array("f", [math.nan]) * len(rows)
            for name, value in zip(names, values):
                place = rows.get(name)
                if place is None:
                    place = rows[name] = len(rows)
                    column.append(math.nan)
                column[place] = value
            self._names = tuple(rows) if len(names) == len(rows) else ()
        if self._num_open and self._columns:
            self._columns[-1] = _worst(self._columns[-1], (step, step, column))
        else:
            self._columns.append((step, step, column))
        self._num_open = (self._num_open + 1) % self._width
        if len(self._columns) > max(2, min(self._max_columns, _MAX_CELLS // (len(rows) or 1))):
            last = self._columns[-1:] if len(self._columns) % 2 else []
            self._columns = [_worst(a, b) for a, b in zip(self._columns[::2], self._columns[1::2])] + last
            self._num_open += self._width if last else 0
            self._width *= 2

    @property
    def steps(self) -> list[tuple[int, int]]:
        """First and last step of each column."""
        return [(first, last) for first, last, _ in self._columns]

    def values(self, name: str) -> list[float]:
        """The row of `name`."""
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


def worst(values: Sequence[float]) -> float:
    """The largest value that is not missing; NaN if all are."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)
