"""A whole run in a fixed number of buckets, to plot a million steps."""

from __future__ import annotations

import math
from typing import NamedTuple

from .codec import Count, Length, Part
from .running import HUGE, within

NUM_BUCKETS = 256


class Summary(NamedTuple):
    """The values of one series in one bucket; 0 and NaNs if there are none."""

    num: int
    min: float
    max: float
    mean: float
    last: float


_NOTHING = Summary(0, math.nan, math.nan, math.nan, math.nan)


class Bucket(NamedTuple):
    """Some steps in a row. Skipped and non-finite steps count in `num_steps` only."""

    first_step: int
    last_step: int
    num_steps: int
    loss: Summary
    norm: Summary
    lr: Summary


class _Open(Part):
    """A summary that still gets values."""

    __slots__ = ("count", "last", "max", "min", "total")
    count: Count
    total: float
    min: float
    max: float
    last: float

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

    def close(self) -> Summary:
        if not self.count:
            return _NOTHING
        return Summary(self.count, self.min, self.max, self.total / self.count, self.last)


def _halved(closed: list[Bucket]) -> list[Bucket]:
    """Merges each bucket with the next. Makes no call per summary, because one step pays for them all."""
    merged = []
    for first, second in zip(closed[::2], closed[1::2]):
        series = []
        for a, b in zip(first[3:], second[3:]):
            if a.num and b.num:
                num = a.num + b.num
                mean = a.mean * (a.num / num) + b.mean * (b.num / num)
                a = Summary(num, min(a.min, b.min), max(a.max, b.max), mean, b.last)
            series.append(a if a.num else b)
        merged.append(Bucket(first.first_step, second.last_step, first.num_steps + second.num_steps, *series))
    return merged


class Overview(Part):
    """Smallest, largest, mean and last loss, norm and learning rate of every part of a run.

    There are at most 256 buckets of equal length; when they are full, neighbours are merged, and the length doubles.

    >>> overview = Overview()
    >>> for step in range(1_000):
    ...     overview.add(step, loss=1.0 / (step + 1), norm=1.0, lr=None)
    >>> len(overview.buckets), overview.steps_per_bucket, overview.buckets[0].loss.max
    (250, 4, 1.0)
    """

    __slots__ = ("_closed", "_first", "_last", "_num", "_open", "steps_per_bucket")
    steps_per_bucket: Length
    _first: int
    _last: int
    _num: Count
    _open: tuple[_Open, _Open, _Open]
    _closed: list[Bucket]

    def __init__(self) -> None:
        self.steps_per_bucket = 1
        self._closed = []
        self._open = (_Open(), _Open(), _Open())
        self._first = self._last = self._num = 0

    def add(self, step: int, loss: float | None, norm: float | None, lr: float | None) -> None:
        """Takes one step; None is for a number that is unknown or must not count. Cost: 0.7 us; 0.2 ms a doubling."""
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

    def _close_bucket(self) -> None:
        closed, steps_per_bucket = [*self._closed, self._open_bucket()], self.steps_per_bucket
        if len(closed) >= NUM_BUCKETS:
            closed, steps_per_bucket = _halved(closed), 2 * steps_per_bucket
        fresh = (_Open(), _Open(), _Open())
        # No calls from here on, so no interrupt comes in between.
        self._closed, self.steps_per_bucket, self._open, self._num = closed, steps_per_bucket, fresh, 0

    def _open_bucket(self) -> Bucket:
        return Bucket(self._first, self._last, self._num, *(series.close() for series in self._open))

    @property
    def buckets(self) -> list[Bucket]:
        """Oldest first; the last may hold fewer steps than `steps_per_bucket`."""
        return [*self._closed, self._open_bucket()] if self._num else list(self._closed)
