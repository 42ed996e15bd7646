"""Summaries of a stream of numbers in bounded memory: moments, quantiles, level and spikes, the whole run in buckets.
The C++ extension folds usual steps into the same attributes (csrc/fold.cpp)."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from .codec import Count, Length, Part, Spread

HUGE = 1e150  # whose square is still a float
NUM_BUCKETS = 256
NUM_FIRST = 10
NUM_SPIKES = 64
SPIKE_Z = 6.0
_WARM_UP = 20
_RATE = 1 / 32
_LIMIT_Z = 3.0  # the limit for a jump in the averages, and for the continuation of a spike
_NEW_LEVEL = 10  # a spike that lasts this many steps is a new level
_isfinite = math.isfinite


def within(value: float) -> float:
    """`value` limited to ±1e150, so that squares, sums and differences of such values stay finite."""
    return value if -HUGE < value < HUGE else math.copysign(HUGE, value)


class Summary(NamedTuple):
    """Number, range, mean and last of some values; 0 and NaNs if there are none."""

    num: int
    min: float
    max: float
    mean: float
    last: float


@dataclass(slots=True, repr=False)
class Running(Part):
    """Number, range, sum and last of all values so far. Non-finite values are left out.

    For the sum, values are limited to ±1e150.

    >>> running = Running()
    >>> for value in (1.0, math.nan, 3.0):
    ...     running.add(value)
    >>> running.count, running.min, running.max, running.summary().mean
    (2, 1.0, 3.0, 2.0)
    """

    count: Count = 0
    total: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    last: float = math.nan

    def add(self, value: float | None) -> None:
        """Takes one more value, unless it is None. Cost: 0.3 us."""
        if value is None or not _isfinite(value):
            return
        self.total += within(value)
        self.count += 1
        self.last = value
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value

    def summary(self) -> Summary:
        if not self.count:
            return Summary(0, math.nan, math.nan, math.nan, math.nan)
        return Summary(self.count, self.min, self.max, self.total / self.count, self.last)


def quantiles(values: Iterable[float], q: Sequence[float]) -> tuple[float, ...]:
    """Quantiles `q` of finite `values`, linear between neighbours; NaNs if there are no values.

    >>> quantiles([1.0, 2.0, 4.0], (0.0, 0.5, 0.75))
    (1.0, 2.0, 3.0)
    """
    ordered = sorted(values)
    return tuple(quantile_of_sorted(ordered, share) for share in q)


def quantile_of_sorted(ordered: Sequence[float], share: float) -> float:
    """One quantile of finite numbers in rising order; NaN if there are none."""
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    rest, gap = place - low, ordered[high] - ordered[low]
    if gap < math.inf:
        return ordered[low] + gap * rest
    return ordered[low] * (1.0 - rest) + ordered[high] * rest  # the difference overflows


class Spike(NamedTuple):
    """Values in a row far above their average: the steps, the largest value, and average and spread before it."""

    first_step: int
    last_step: int
    value: float
    mean: float
    std: float

    @property
    def z(self) -> float:
        """How many standard deviations the largest value is above the average before it."""
        return (self.value - self.mean) / (self.std + 1e-6 * abs(self.mean) + 1e-300)


@dataclass(slots=True, repr=False)
class Trend(Part):
    """A series in constant memory. Non-finite values are left out; others are limited to ±1e150.

    The mean is exponential over about 32 values, after a plain mean at first. The spread is that of the differences
    between neighbours, so that a slope does not count as noise. From the 21st value on, a value more than 6 standard
    deviations above the mean is a spike, which continues while values within two steps are 3 above it. For mean and
    spread a jump is limited to 3 standard deviations, so that one spike does not hide the next; after ten steps it
    counts in full, as a new level.

    >>> trend = Trend()
    >>> for step in range(50):
    ...     trend.add(step, 19.0 if step == 40 else 1.0 + step % 2)
    >>> trend.spikes[0].first_step, trend.spikes[0].value
    (40, 19.0)
    """

    count: Count = 0
    first: float = 0.0  # median of the first ten
    mean: float = 0.0
    _var: Spread = 0.0
    best: float = math.inf  # the smallest mean so far (from the tenth value on), and its step
    best_step: int = -1
    last: float = math.nan
    firsts: list[float] = field(default_factory=list)  # twenty
    spikes: deque[Spike] = field(default_factory=lambda: deque(maxlen=NUM_SPIKES))

    def add(self, step: int, value: float) -> None:
        """Takes the value of one step. Cost: 0.7 us."""
        if not _isfinite(value):
            return
        value = within(value)
        self.count = count = self.count + 1
        if count <= _WARM_UP:  # an outlier among these must not hide later spikes
            firsts = self.firsts
            firsts.append(value)
            if count <= NUM_FIRST:
                self.first = median(firsts)
            self.mean += (value - self.mean) / count
            if count == _WARM_UP:
                self.mean = min(self.mean, median(firsts[-NUM_FIRST:]))
                spread = 1.05 * median([abs(b - a) for a, b in itertools.pairwise(firsts)])
                self._var = spread * spread
        else:
            delta, change = value - self.mean, value - self.last
            std = math.sqrt(self._var)
            floor = 1e-6 * abs(self.mean)
            limit = _LIMIT_Z * std + floor
            if delta > limit and self._spike_length(step, value, delta, std + floor) < _NEW_LEVEL:
                delta = limit
            if change > limit:
                change = limit
            elif change < -limit:
                change = -limit
            self.mean += _RATE * delta
            self._var += _RATE * (0.5 * change * change - self._var)
        self.last = value
        if count >= NUM_FIRST and self.mean < self.best:
            self.best = self.mean
            self.best_step = step

    def _spike_length(self, step: int, value: float, delta: float, std: float) -> int:
        """Notes a value far above the mean, and returns for how many steps this has lasted."""
        old = self.spikes[-1] if self.spikes else None
        if old is not None and step - old.last_step <= 2:
            self.spikes[-1] = old._replace(last_step=step, value=max(old.value, value))
            return step - old.first_step + 1
        if delta <= SPIKE_Z * std:
            return _NEW_LEVEL  # within the noise: it counts in full
        self.spikes.append(Spike(step, step, value, self.mean, math.sqrt(self._var)))
        return 1

    std = property(lambda self: math.sqrt(self._var), doc="Spread of the values around the trend; 0.0 before twenty.")


class Bucket(NamedTuple):
    """Some steps in a row. Skipped and non-finite steps count in `num_steps` only."""

    first_step: int
    last_step: int
    num_steps: int
    loss: Summary
    norm: Summary
    lr: Summary


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


@dataclass(slots=True, repr=False)
class Overview(Part):
    """Smallest, largest, mean and last loss, norm and learning rate of every part of a run.

    There are at most 256 buckets of equal length; when they are full, neighbours are merged, and the length doubles.

    >>> overview = Overview()
    >>> for step in range(1_000):
    ...     overview.add(step, loss=1.0 / (step + 1), norm=1.0, lr=None)
    >>> len(overview.buckets), overview.steps_per_bucket, overview.buckets[0].loss.max
    (250, 4, 1.0)
    """

    steps_per_bucket: Length = 1
    _first: int = 0
    _last: int = 0
    _num: Count = 0
    _open: tuple[Running, Running, Running] = field(default_factory=lambda: (Running(), Running(), Running()))
    _closed: list[Bucket] = field(default_factory=list)

    def add(self, step: int, loss: float | None, norm: float | None, lr: float | None) -> None:
        """Takes one step; None is for a number that is unknown or must not count. Cost: 0.7 us; 0.2 ms a doubling."""
        if not self._num:
            self._first = step
        self._last = step
        self._num += 1
        for series, value in zip(self._open, (loss, norm, lr)):
            series.add(value)
        if self._num >= self.steps_per_bucket:
            closed, steps_per_bucket = [*self._closed, self._open_bucket()], self.steps_per_bucket
            if len(closed) >= NUM_BUCKETS:
                closed, steps_per_bucket = _halved(closed), 2 * steps_per_bucket
            fresh = Running(), Running(), Running()
            # No calls from here on, so no interrupt comes in between.
            self._closed, self.steps_per_bucket, self._open, self._num = closed, steps_per_bucket, fresh, 0

    def _open_bucket(self) -> Bucket:
        return Bucket(self._first, self._last, self._num, *(series.summary() for series in self._open))

    @property
    def buckets(self) -> list[Bucket]:
        """Oldest first; the last may hold fewer steps than `steps_per_bucket`."""
        return [*self._closed, self._open_bucket()] if self._num else list(self._closed)
