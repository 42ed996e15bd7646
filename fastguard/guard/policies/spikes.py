"""Scaling spikes back to the usual norm."""

from __future__ import annotations

import math
from typing import Any

from ...stats import values
from .policy import NO_LIMITS, ClipPolicy
from .window import SortedWindow, finite_numbers

_TO_SIGMA = 1.4826  # from a median deviation to the standard deviation of a normal distribution
_TAIL = 0.9  # the share of norms below which the upper tail begins
_TAIL_SIGMAS = 1.2816
_RECENT, _HIGH = 16, 14  # of so many newest norms so many that are high are a new level


class Spikes(ClipPolicy):
    """Scales a norm far above the usual back to the median, and leaves all others alone.

    x = ln(norm before clipping) over the last `window` steps, m = median(x)
    spread = max(median |x - m| * 1.48, (90 % quantile of x - m) / 1.28)
    trigger = exp(m) * max(ratio, exp(k * spread)); target = exp(m)

    Norms of spikes are in the window as they were, where the median does not feel them. While it holds few norms the
    trigger is higher, by 1 + (16 / number)^1.5: it watches from the second step on. Where 14 of the last 16 norms lie
    nearer to the trigger than to the median, that is another level: the window begins anew with these 16, and nothing
    is scaled on its account any longer. A burst of eight spikes is no level.

    Args:
        max_norm: never above this norm either, as `GlobalNorm`; None for no such limit.
        window: how many norms are looked at, >= 32.
        k: standard deviations of the logarithm.
        ratio: no norm below so many times the median is a spike, > 1.

    Raises:
        ValueError: a setting is out of its range.

    Source: our own; the median of logarithms as in Iglewicz and Hoaglin (1993).

    Cost: 5 us a step on the host; no sync.

    >>> policy = Spikes()
    >>> for step in range(64):
    ...     policy.observe(1.0 + 0.1 * math.sin(step))
    >>> trigger, target = policy.limits()
    >>> round(trigger, 1), round(target, 1)
    (2.1, 1.0)
    """

    is_sound = True

    def __init__(self, max_norm: float | None = None, *, window: int = 128, k: float = 3.5, ratio: float = 1.9) -> None:
        if window < 2 * _RECENT:
            raise ValueError(f"`window` must be >= {2 * _RECENT}, got {window!r}")
        if not 1.0 < ratio < math.inf:
            raise ValueError(f"`ratio` must be > 1, got {ratio!r}")
        self.max_norm = math.inf if max_norm is None else values.positive("max_norm", max_norm, "None is no limit.")
        self.k, self.ratio = values.positive("k", k, ""), float(ratio)
        self._logs = SortedWindow(window)
        self._limits: tuple[float, float] | None = None

    def limits(self) -> tuple[float, float]:
        if self._limits is None:
            self._limits = self._limits_now()
        return self._limits

    def _limits_now(self) -> tuple[float, float]:
        most = (self.max_norm, self.max_norm) if self.max_norm < math.inf else NO_LIMITS
        if not self._logs:
            return most
        middle = self._logs.quantile(0.5)
        height = self._height(middle)
        trigger, target = _exp(middle + height), _exp(middle)
        return (trigger, min(target, self.max_norm)) if trigger <= self.max_norm else most

    def _height(self, middle: float) -> float:
        """How far the trigger lies above the median, as a logarithm."""
        logs = self._logs
        tail = (logs.quantile(_TAIL) - middle) / _TAIL_SIGMAS
        spread = max(_TO_SIGMA * logs.median_deviation(middle), tail)
        return max(math.log(self.ratio), self.k * spread) + math.log1p((16.0 / len(logs)) ** 1.5)

    def observe(self, norms: Any, loss: float | None = None) -> None:
        if not norms > 0.0:
            return  # nothing went back, which says nothing of the usual
        logs = self._logs
        x = math.log(norms)
        if len(logs) >= 2 * _RECENT:
            middle = logs.quantile(0.5)
            high = middle + 0.5 * self._height(middle)
            if x > high and sum(other > high for other in list(logs.values)[1 - _RECENT :]) + 1 >= _HIGH:
                logs.restart(list(logs.values)[1 - _RECENT :])
        logs.add(x)
        self._limits = None

    def state_dict(self) -> dict[str, Any]:
        return {"log_norms": self._logs.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logs.restart(values.entry(state, "log_norms", finite_numbers)[-self._logs.size :])
        self._limits = None

    def __repr__(self) -> str:
        return f"Spikes({'' if self.max_norm == math.inf else f'max_norm={self.max_norm:g}'})"


def _exp(x: float) -> float:
    return math.exp(min(x, 709.0)) or math.ulp(0.0)
