"""Where a series stands, where it began and how good it was: exponential averages, and jumps away from them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

NUM_FIRST = 10
NUM_SPIKES = 64
SPIKE_Z = 6.0
_WARM_UP = 20
_RATE = 1 / 32
_LIMIT_Z = 3.0  # what a jump counts for in the averages
_isfinite = math.isfinite


class Spike(NamedTuple):
    """Values far above their average, in a row: the steps, the largest value, and average and spread before it."""

    first_step: int
    last_step: int
    value: float
    mean: float
    std: float

    @property
    def z(self) -> float:
        """How many standard deviations the largest value lies above the average before it."""
        return (self.value - self.mean) / (self.std + 1e-6 * abs(self.mean) + 1e-300)


class Trend:
    """A series in constant memory. Non-finite values are left out.

    Averages are exponential over about 32 values, after plain ones at first. A value more than 6 standard deviations
    above the average, from the 21st on, is a spike; it enters the average as 3 standard deviations, so that one spike
    does not hide the next, and a new level is still learnt.

    Attributes:
        count: values so far.
        first: mean of the first ten.
        mean, std: the averages now.
        best, best_step: the least average so far (from the tenth value on), and when it was reached.
        last: the newest value.
        spikes: the newest 64 spikes.

    >>> trend = Trend()
    >>> for step in range(50):
    ...     trend.add(step, 9.0 if step == 40 else 1.0 + step % 2)
    >>> trend.spikes[0].first_step, trend.spikes[0].value
    (40, 9.0)
    """

    __slots__ = ("_var", "best", "best_step", "count", "first", "last", "mean", "spikes")

    def __init__(self) -> None:
        self.count = 0
        self.first = self.mean = self._var = 0.0
        self.best = math.inf
        self.best_step = -1
        self.last = math.nan
        self.spikes: deque[Spike] = deque(maxlen=NUM_SPIKES)

    def add(self, step: int, value: float) -> None:
        """Takes the value of one step. Cost: 0.5 us."""
        if not _isfinite(value):
            return
        self.count = count = self.count + 1
        self.last = value
        mean = self.mean
        delta = value - mean
        if count <= NUM_FIRST:
            self.first += (value - self.first) / count
        elif count > _WARM_UP and delta > 0.0:
            std = math.sqrt(self._var)
            if delta > SPIKE_Z * (std + 1e-6 * abs(mean)):
                self._note_spike(step, value, std)
                delta = _LIMIT_Z * std + 1e-6 * abs(mean)
        rate = _RATE if count >= 32 else 1.0 / count
        self.mean = mean = mean + rate * delta
        self._var = (1.0 - rate) * (self._var + rate * delta * delta)
        if count >= NUM_FIRST and mean < self.best:
            self.best = mean
            self.best_step = step

    def _note_spike(self, step: int, value: float, std: float) -> None:
        if self.spikes and step - self.spikes[-1].last_step <= 1:
            old = self.spikes[-1]
            self.spikes[-1] = old._replace(last_step=step, value=max(old.value, value))
        else:
            self.spikes.append(Spike(step, step, value, self.mean, std))

    @property
    def std(self) -> float:
        """Spread around the average, exponentially weighted; 0.0 before there were two values."""
        return math.sqrt(self._var)

    def state(self) -> list[object]:
        """Everything, as numbers and lists of numbers."""
        numbers: list[object] = [self.count, self.first, self.mean, self._var, self.best, self.best_step, self.last]
        return [*numbers, [list(spike) for spike in self.spikes]]

    def load(self, state: Sequence[object]) -> None:
        """Takes back what `state` gave."""
        self.count, self.first, self.mean, self._var, self.best, self.best_step, self.last = state[:7]  # type: ignore
        self.spikes.clear()
        self.spikes.extend(Spike._make(values) for values in state[7])  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"Trend({self.state()})"
