"""A whole run in a fixed number of buckets, for plots of a million steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from ..stats import values
from ..stats.part import COUNT, NUMBER, WHOLE, Kind, Part, plain, rows
from ..stats.running import HUGE, within

NUM_BUCKETS = 256


class Summary(NamedTuple):
    """The values of one series in one bucket; `num` 0 and NaNs where there were none."""

    num: int
    min: float
    max: float
    mean: float
    last: float


_NOTHING = Summary(0, math.nan, math.nan, math.nan, math.nan)


class Bucket(NamedTuple):
    """Some steps in a row. Skipped and non-finite steps are counted among `num_steps`, and left out of the rest."""

    first_step: int
    last_step: int
    num_steps: int
    loss: Summary
    norm: Summary
    lr: Summary


class _Open(Part):
    """A summary that is still filling."""

    __slots__ = ("count", "last", "max", "min", "total")
    _fields: ClassVar = {"count": COUNT, **dict.fromkeys(("total", "min", "max", "last"), NUMBER)}

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.min = math.inf
        self.max = -math.inf
        self.last = math.nan

    def add(self, value: float) -> None:
        if -HUGE < value < HUGE:
            self.total += value
        elif math.isfinite(value):
            self.total += within(value)
        else:
            return
        self.count += 1
        self.last = value
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value

    def extend(self, values: Sequence[float]) -> None:
        """As `add` for each of some; all lie within ±1e150."""
        total = self.total
        for value in values:  # not `sum`, which rounds otherwise
            total += value
        self.total = total
        self.count += len(values)
        self.last = values[-1]
        self.min, self.max = min(self.min, min(values)), max(self.max, max(values))

    def close(self) -> Summary:
        if not self.count:
            return _NOTHING
        return Summary(self.count, self.min, self.max, self.total / self.count, self.last)


def _merge_summaries(a: Summary, b: Summary) -> Summary:
    if not a.num or not b.num:
        return a if a.num else b
    num = a.num + b.num
    mean = a.mean * (a.num / num) + b.mean * (b.num / num)
    return Summary(num, min(a.min, b.min), max(a.max, b.max), mean, b.last)


def merge(a: Bucket, b: Bucket) -> Bucket:
    """`a` and the bucket that follows it, as one."""
    parts = (_merge_summaries(x, y) for x, y in zip(a[3:], b[3:]))
    return Bucket(a.first_step, b.last_step, a.num_steps + b.num_steps, *parts)


def _bucket(plain: Any) -> Bucket:
    if len(values.row(plain)) != len(Bucket._fields):
        raise values.MisfitError(f"must have {len(Bucket._fields)} entries, got {len(plain)}")
    return Bucket(*values.each(values.whole, plain[:3]), *values.each(values.tuple_of(Summary), plain[3:]))


def _load_series(plain: Any, series: tuple[_Open, ...]) -> tuple[_Open, ...]:
    if len(values.row(plain)) != len(series):
        raise values.MisfitError(f"must have {len(series)} entries, got {len(plain)}")
    return tuple(values.at(i, one.loaded, plain[i]) for i, one in enumerate(series))


_SERIES = Kind(
    lambda series: [one.state() for one in series], _load_series, lambda series: tuple(one.copy() for one in series)
)


class Overview(Part):
    """Least, largest, mean and last loss, norm and learning rate of every stretch of a run.

    At most 256 buckets of equally many steps; when they are full, neighbours are merged and each holds twice as many.

    >>> overview = Overview()
    >>> for step in range(1_000):
    ...     overview.add(step, loss=1.0 / (step + 1), norm=1.0, lr=None)
    >>> len(overview.buckets), overview.steps_per_bucket, overview.buckets[0].loss.max
    (250, 4, 1.0)
    """

    __slots__ = ("_closed", "_first", "_last", "_num", "_open", "steps_per_bucket")
    _fields: ClassVar = {
        "steps_per_bucket": plain(values.length),
        **dict.fromkeys(("_first", "_last"), WHOLE),
        "_num": COUNT,
        "_open": _SERIES,
        "_closed": rows(_bucket),
    }

    def __init__(self) -> None:
        self.steps_per_bucket = 1
        self._closed: list[Bucket] = []
        self._open = (_Open(), _Open(), _Open())
        self._first = self._last = self._num = 0

    def add(self, step: int, loss: float | None, norm: float | None, lr: float | None) -> None:
        """Takes one step; None for what is not known or shall not count. Cost: 0.7 us, and 0.2 ms each doubling."""
        if not self._num:
            self._first = step
        self._last = step
        self._num += 1
        losses, norms, lrs = self._open
        if loss is not None:
            losses.add(loss)
        if norm is not None:
            norms.add(norm)
        if lr is not None:
            lrs.add(lr)
        if self._num >= self.steps_per_bucket:
            self._close_bucket()

    def extend(self, steps: Sequence[int], *columns: Sequence[float] | None) -> None:
        """As `add` for each of `steps`; all values lie within ±1e150. Cost: 0.2 us a step.

        Args:
            columns: losses, norms and learning rates, one each a step, or None.
        """
        place = 0
        while place < len(steps):
            if self._num >= self.steps_per_bucket:  # an interrupt came before it could be closed
                self._close_bucket()
            if not self._num:
                self._first = steps[place]
            end = min(len(steps), place + self.steps_per_bucket - self._num)
            for series, column in zip(self._open, columns):
                if column is not None:
                    series.extend(column[place:end])
            self._last = steps[end - 1]
            self._num += end - place
            place = end
            if self._num >= self.steps_per_bucket:
                self._close_bucket()

    def grown(self, steps: Sequence[int], *columns: Sequence[float] | None) -> Overview:
        """Another one, as this is after `extend`."""
        twin = self.twin()
        losses, norms, lrs = self._open
        twin._closed, twin._open = self._closed[:], (losses.twin(), norms.twin(), lrs.twin())
        twin.extend(steps, *columns)
        return twin

    def _close_bucket(self) -> None:
        closed, steps_per_bucket = [*self._closed, self._open_bucket()], self.steps_per_bucket
        if len(closed) >= NUM_BUCKETS:
            closed, steps_per_bucket = [merge(a, b) for a, b in zip(closed[::2], closed[1::2])], 2 * steps_per_bucket
        fresh = (_Open(), _Open(), _Open())
        # From here on no call is made, after which an interrupt could come.
        self._closed, self.steps_per_bucket, self._open, self._num = closed, steps_per_bucket, fresh, 0

    def _open_bucket(self) -> Bucket:
        return Bucket(self._first, self._last, self._num, *(series.close() for series in self._open))

    @property
    def buckets(self) -> list[Bucket]:
        """Oldest first; the last may hold fewer steps than `steps_per_bucket`."""
        return [*self._closed, self._open_bucket()] if self._num else list(self._closed)
