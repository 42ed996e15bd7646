"""Clipping to a percentile of the norms so far."""

from __future__ import annotations

import math
from typing import Any

from ..records import values
from .policy import NO_LIMITS, ClipPolicy, SortedWindow, finite_numbers


class Percentile(ClipPolicy):
    """Clips the norm of all gradients to the `p`-th percentile of the last `window` norms.

    trigger = target = percentile(norms before clipping, p)

    Args:
        p: in percent, from 0 to 100. On a healthy run (100 - p) % of the steps are clipped.
        window: number of norms to look at.
        min_steps: number of steps before clipping begins.

    Raises:
        ValueError: `p` is not from 0 to 100, or `window` < `min_steps`, or `min_steps` < 1.

    Source: AutoClip (Seetharaman et al. 2020) with p=10. It looks at all norms of the run, including the present one;
    ours looks at a window of past norms, so the limit is known before the step.

    Cost: 2 us a step on the host; no sync.

    >>> policy = Percentile(50, min_steps=3)
    >>> for norm in (1.0, 2.0, 9.0):
    ...     policy.observe(norm)
    >>> policy.limits()
    (2.0, 2.0)
    """

    is_sound = True

    def __init__(self, p: float = 95.0, window: int = 1000, *, min_steps: int = 10) -> None:
        if not 0.0 <= p <= 100.0:
            raise ValueError(f"`p` must be from 0 to 100, got {p!r}")
        if not 1 <= values.at_least(1, "min_steps", min_steps) <= values.at_least(1, "window", window):
            raise ValueError(f"`min_steps` must be from 1 to `window` ({window!r}), got {min_steps!r}")
        self.p, self.min_steps = float(p), min_steps
        self._norms = SortedWindow(window)

    def limits(self) -> tuple[float, float]:
        if len(self._norms) < self.min_steps:
            return NO_LIMITS
        limit = self._norms.quantile(self.p / 100.0)
        return limit, limit or math.ulp(0.0)  # a limit of 0 is no reason to skip

    def observe(self, norms: Any, loss: float | None = None) -> None:
        self._norms.add(norms)

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms.restart(values.entry(state, "norms", finite_numbers)[-self._norms.size :])

    def __repr__(self) -> str:
        return f"Percentile({self.p:g}, window={self._norms.size})"
