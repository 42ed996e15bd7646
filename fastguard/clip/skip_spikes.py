"""Skipping steps whose norm, or the loss before them, is far above the usual."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from ..records import values
from .policy import NO_LIMITS, ClipPolicy, finite_numbers


class SkipSpikes(ClipPolicy):
    """Skips a step whose norm is more than `sigma` standard deviations above the mean of the last `window` norms.

    It also skips the step after a loss that was as far above earlier losses: a loss is known only after its step.

    trigger = mean + sigma * max(std, 1e-6 * mean); target = 0

    Args:
        sigma: standard deviations.
        window: number of norms and losses to look at, including those of skipped steps, so that skipping ends.
        min_steps: number of steps before skipping begins.
        loss: look at losses, too.

    Raises:
        ValueError: `sigma` is not > 0, or `window` < `min_steps`, or `min_steps` < 2.

    Source: the skipped step of OLMo (Groeneveld et al. 2024), with Levanter's floor under the deviation. In a burst,
    the first spikes raise the deviation and the later ones pass; `Spikes` scales all of them.

    Cost: 2 us a step on the host; no sync.
    """

    is_sound = True

    def __init__(self, sigma: float = 6.0, window: int = 128, *, min_steps: int = 64, loss: bool = True) -> None:
        if not 2 <= values.at_least(2, "min_steps", min_steps) <= values.at_least(2, "window", window):
            raise ValueError(f"`min_steps` must be from 2 to `window` ({window!r}), got {min_steps!r}")
        self.sigma, self.window, self.min_steps = values.positive("sigma", sigma, ""), window, min_steps
        self._watches_loss = loss
        self._norms: deque[float] = deque(maxlen=window)
        self._losses: deque[float] = deque(maxlen=window)
        self._is_loss_high = False
        self._trigger: float | None = None

    def limits(self) -> tuple[float, float]:
        if self._is_loss_high:
            return 0.0, 0.0
        if self._trigger is None:
            self._trigger = self._limit_of(self._norms)
        return NO_LIMITS if self._trigger == math.inf else (self._trigger, 0.0)

    def _limit_of(self, past: deque[float]) -> float:
        if len(past) < self.min_steps:
            return math.inf
        scale = max(map(abs, past)) or 1.0  # squares stay within the floats
        mean = sum(past) / len(past)
        std = scale * math.sqrt(sum(((x - mean) / scale) ** 2 for x in past) / (len(past) - 1))
        return mean + self.sigma * max(std, 1e-6 * abs(mean))

    def observe(self, norms: Any, loss: float | None = None) -> None:
        self._norms.append(norms)
        self._trigger = None
        if self._watches_loss and loss is not None:
            self._is_loss_high = loss > self._limit_of(self._losses)
            self._losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "losses": list(self._losses), "is_loss_high": self._is_loss_high}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        norms, losses = (values.entry(state, key, finite_numbers) for key in ("norms", "losses"))
        self._is_loss_high = values.entry(state, "is_loss_high", values.truth)
        self._norms, self._losses = deque(norms, maxlen=self.window), deque(losses, maxlen=self.window)
        self._trigger = None

    def __repr__(self) -> str:
        return f"SkipSpikes(sigma={self.sigma:g}, window={self.window})"
