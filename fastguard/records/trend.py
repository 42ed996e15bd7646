"""The current, first and best level of a series: exponential averages, and spikes above them."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .codec import Count, Part, Spread
from .running import HUGE, within

NUM_FIRST = 10
NUM_SPIKES = 64
SPIKE_Z = 6.0
_WARM_UP = 20
_RATE = 1 / 32
_LIMIT_Z = 3.0  # the limit for a jump in the averages, and for the continuation of a spike
_NEW_LEVEL = 10  # a spike that lasts this many steps is a new level
_isfinite = math.isfinite


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


class Trend(Part):
    """A series in constant memory. Non-finite values are left out; others are limited to ±1e150.

    The mean is exponential over about 32 values, after a plain mean at first. The spread is that of the differences
    between neighbours, so that a slope does not count as noise. From the 21st value on, a value more than 6 standard
    deviations above the mean is a spike, which continues while values within two steps are 3 above it. For mean and
    spread a jump is limited to 3 standard deviations, so that one spike does not hide the next; after ten steps it
    counts in full, as a new level.

    Attributes:
        count: values so far.
        first: median of the first ten.
        mean, std: mean and spread now.
        best, best_step: the smallest mean so far (from the tenth value on), and its step.
        last: the newest value.
        spikes: the newest 64 spikes.

    >>> trend = Trend()
    >>> for step in range(50):
    ...     trend.add(step, 19.0 if step == 40 else 1.0 + step % 2)
    >>> trend.spikes[0].first_step, trend.spikes[0].value
    (40, 19.0)
    """

    __slots__ = ("_firsts", "_var", "best", "best_step", "count", "first", "last", "mean", "spikes")
    count: Count
    first: float
    mean: float
    _var: Spread
    best: float
    best_step: int
    last: float
    _firsts: list[float]
    spikes: deque[Spike]

    def __init__(self) -> None:
        self.count = 0
        self.first = self.mean = self._var = 0.0
        self._firsts = []
        self.best = math.inf
        self.best_step = -1
        self.last = math.nan
        self.spikes = deque(maxlen=NUM_SPIKES)

    def add(self, step: int, value: float) -> None:
        """Takes the value of one step. Cost: 0.7 us."""
        if not -HUGE < value < HUGE:
            if not _isfinite(value):
                return
            value = within(value)
        self.count = count = self.count + 1
        if count <= _WARM_UP:
            self._warm_up(value, count)
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

    def _warm_up(self, value: float, count: int) -> None:
        """The first twenty values; an outlier among them must not hide later spikes."""
        firsts = self._firsts
        firsts.append(value)
        if count <= NUM_FIRST:
            self.first = _median(firsts)
        self.mean += (value - self.mean) / count
        if count == _WARM_UP:
            self.mean = min(self.mean, _median(firsts[-NUM_FIRST:]))
            spread = 1.05 * _median([abs(b - a) for a, b in itertools.pairwise(firsts)])
            self._var = spread * spread

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

    @property
    def firsts(self) -> list[float]:
        """The first twenty values."""
        return list(self._firsts)

    @property
    def std(self) -> float:
        """Spread of the values around their trend; 0.0 before the twentieth."""
        return math.sqrt(self._var)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])
