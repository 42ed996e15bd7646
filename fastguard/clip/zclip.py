"""Clipping by the z-score of the norm."""

from __future__ import annotations

import math
from typing import Any

from ..records import values
from .policy import ClipPolicy

_TO = ("mean", "limit")


class ZClip(ClipPolicy):
    """Clips the norm of all gradients if it is more than `z` standard deviations above its running mean.

    trigger = mean + z * std; target = mean, or the trigger itself
    mean <- alpha * mean + (1 - alpha) * x; var <- alpha * var + (1 - alpha) * (x - mean)^2, x the clipped norm

    Args:
        z: standard deviations.
        alpha: how much of mean and variance to keep at each step, from 0 to 1.
        warmup: number of first steps that give the first mean and variance; only `max_norm` clips them.
        to: "mean", or "limit": mean + z * std.
        max_norm: also clip to this norm; None for no such limit.

    Raises:
        ValueError: a setting is out of its range.

    Source: ZClip (Kumar et al. 2025). Its default lowers the target as the norm grows, which needs the norm of the step
    itself, and it also clips to 1.0. It learns from clipped norms, so it never stops clipping after a lasting rise;
    `Spikes` does.

    Cost: 1 us a step on the host; no sync.
    """

    is_sound = True

    def __init__(
        self, z: float = 2.5, alpha: float = 0.97, *, warmup: int = 25, to: str = "mean", max_norm: float | None = None
    ) -> None:
        if to not in _TO:
            raise ValueError(f"`to` must be one of {list(_TO)}, got {to!r}")
        self.z, self.alpha = values.positive("z", z, ""), values.between(0.0, 1.0, "alpha", alpha)
        self.warmup, self.to = values.at_least(2, "warmup", warmup), to
        self.max_norm = math.inf if max_norm is None else values.positive("max_norm", max_norm, "None is no limit.")
        self._count, self._mean, self._var = 0, 0.0, 0.0

    def limits(self) -> tuple[float, float]:
        if self._count < self.warmup:
            return self.max_norm, self.max_norm
        trigger = min(self._mean + self.z * math.sqrt(self._var), self.max_norm)
        target = min(self._mean if self.to == "mean" else trigger, self.max_norm)
        return trigger, target or math.ulp(0.0)

    def observe(self, norms: Any, loss: float | None = None) -> None:
        trigger, target = self.limits()
        norm = target if norms > trigger else norms
        self._count += 1
        if self._count <= self.warmup:  # Welford's way to the mean and variance of the first ones
            before = norm - self._mean
            self._mean += before / self._count
            self._var += (before * (norm - self._mean) - self._var) / self._count
        else:
            self._mean = self.alpha * self._mean + (1.0 - self.alpha) * norm
            self._var = self.alpha * self._var + (1.0 - self.alpha) * (norm - self._mean) ** 2

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "var": self._var}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        count = values.entry(state, "count", values.count)
        mean, var = (float(values.entry(state, key, values.spread)) for key in ("mean", "var"))
        self._count, self._mean, self._var = count, mean, var

    def __repr__(self) -> str:
        return f"ZClip(z={self.z:g}, alpha={self.alpha:g})"
