"""Scaling spikes back to the usual norm."""

from __future__ import annotations

import math
from typing import Any

from ..records import values
from .policy import NO_LIMITS, ClipPolicy, SortedWindow, finite_numbers

_TO_SIGMA = 1.4826  # from a median deviation to the standard deviation of a normal distribution
_TAIL, _TAIL_SIGMAS = 0.9, 1.2816  # where the upper tail begins, of a normal distribution
_LEVEL = 17  # the newest norms, of which a burst of eight is not the half
_EARLY = 12.0
_BURST = 8  # steps


class Spikes(ClipPolicy):
    """Scales a norm that is far above the usual back to it, and leaves all others alone.

    x = ln(norm before clipping), m = median of the last 17, M = median of the last `window`
    d = x - m before each of the last `window` steps that were not spikes
    spread = max(median |d - median(d)| * 1.48, (90 % quantile of d - median(d)) / 1.28)
    trigger = exp(max(m + k * spread, m + ln ratio, M + ln ratio)); target = exp(m)

    A spike is a norm far above the newest ones, measured by the run's own noise, and above the long-term median. The
    policy starts at the second step; while it knows few norms, the trigger is higher by a factor of 1 + (12 /
    number)^1.5. Spikes often come in bursts: in the seven steps after one, only `ratio` counts and m keeps its value,
    so a burst of eight is scaled as a whole. A rise that lasts for nine steps becomes the new level.

    Args:
        max_norm: also clip to this norm, as `GlobalNorm` does; None for no such limit.
        window: number of norms to look at, >= 32.
        k: standard deviations of the logarithm. A smaller `k` catches more spikes and scales more healthy steps: on
            recorded runs of small models 0.1 to 0.3 % of the steps with 3.5, and 0.4 to 0.7 % with 2.5.
        ratio: a norm below this multiple of the median is never a spike, > 1.

    Raises:
        ValueError: a setting is out of its range.

    Source: our own; the median of logarithms follows Iglewicz and Hoaglin (1993).

    Cost: 8 us a step on the host; no sync.

    >>> policy = Spikes()
    >>> for step in range(128):
    ...     policy.observe(1.0 + 0.1 * math.sin(step))
    >>> trigger, target = policy.limits()
    >>> round(trigger, 1), round(target, 1)
    (1.9, 1.0)
    """

    is_sound = True

    def __init__(self, max_norm: float | None = None, *, window: int = 128, k: float = 3.5, ratio: float = 1.9) -> None:
        window = values.at_least(32, "window", window)
        self.max_norm = math.inf if max_norm is None else values.positive("max_norm", max_norm, "None is no limit.")
        self.k, self.ratio = values.positive("k", k, ""), values.between(1.0, math.inf, "ratio", ratio)
        self._newest, self._logs, self._apart = SortedWindow(_LEVEL), SortedWindow(window), SortedWindow(window)
        self._num_wary, self._before = 0, 0.0  # steps to come after a spike; the level before it
        self._ask()

    def _ask(self) -> None:
        """Level and trigger, as logarithms, and the limits that follow."""
        most = (self.max_norm, self.max_norm) if self.max_norm < math.inf else NO_LIMITS
        self._level, self._height, self._limits = 0.0, math.inf, most
        if not self._logs:
            return
        level, apart, spread = self._newest.quantile(0.5), self._apart, 0.0
        if len(apart) > 1:
            middle = apart.quantile(0.5)
            tail = (apart.quantile(_TAIL) - middle) / _TAIL_SIGMAS
            spread = max(_TO_SIGMA * apart.median_deviation(middle), tail)
        self._level, self._height = level, self._height_above(level, self.k * spread)
        if self._num_wary:
            wary = self._height_above(self._before, 0.0)
            self._height, level = min(self._height, wary), min(self._before, level)
        trigger = _exp(self._height)
        if trigger <= self.max_norm:
            self._limits = trigger, min(_exp(level), self.max_norm)

    def _height_above(self, level: float, spread: float) -> float:
        least = math.log(self.ratio)
        height = level + max(least, spread) + math.log1p((_EARLY / len(self._logs)) ** 1.5)
        return max(height, self._logs.quantile(0.5) + least)

    def limits(self) -> tuple[float, float]:
        return self._limits

    def observe(self, norms: Any, loss: float | None = None) -> None:
        if not norms > 0.0:
            return  # nothing went back, which says nothing of the usual
        x = math.log(norms)
        if self._num_wary:
            self._num_wary -= 1
        elif self._logs and x > self._height:
            self._num_wary, self._before = _BURST - 1, self._level
        if self._logs and x <= self._height:
            self._apart.add(x - self._level)
        self._newest.add(x)
        self._logs.add(x)
        self._ask()

    def state_dict(self) -> dict[str, Any]:
        wary = [float(self._num_wary), self._before]
        return {"log_norms": list(self._logs.values), "apart": list(self._apart.values), "wary": wary}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        logs, apart = (values.entry(state, key, finite_numbers) for key in ("log_norms", "apart"))
        wary = values.entry(state, "wary", lambda value: finite_numbers(values.row(value, 2)))
        self._num_wary, self._before = values.count(wary[0]), wary[1]
        self._logs.restart(logs[-self._logs.size :])
        self._newest.restart(logs[-_LEVEL:])
        self._apart.restart(apart[-self._apart.size :])
        self._ask()

    def __repr__(self) -> str:
        return f"Spikes({'' if self.max_norm == math.inf else f'max_norm={self.max_norm:g}'})"


def _exp(x: float) -> float:
    return math.exp(min(x, 709.0)) or math.ulp(0.0)
