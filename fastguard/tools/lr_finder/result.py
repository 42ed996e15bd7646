"""What a range test found, and the rule that reads a learning rate off its curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MIN_POINTS = 10
_KEYS = ("suggested_lr", "lrs", "losses")


@dataclass(frozen=True)
class RangeTest:
    """Losses at rising learning rates, and what they suggest.

    The first three are attributes, keys (`result["suggested_lr"]`, `dict(result)`) and items in this order
    (`suggested_lr, lrs, losses = result`).

    Attributes:
        suggested_lr: where to start.
        lrs, losses: one point a step, without the one at which the test stopped.
        stopped: "nan" or "diverged" at the next learning rate; None if the test went through.
        reason: how the suggestion came about, in words.
    """

    suggested_lr: float
    lrs: list[float]
    losses: list[float]
    stopped: str | None = None
    reason: str = ""

    def keys(self) -> tuple[str, ...]:
        """Names of the three items."""
        return _KEYS

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return getattr(self, _KEYS[key])
        if key not in _KEYS and key not in ("stopped", "reason"):
            raise KeyError(f"a range test has no {key!r}; it has: {', '.join(_KEYS)}, stopped, reason")
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in _KEYS or key in ("stopped", "reason")

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, key) for key in _KEYS)

    def __len__(self) -> int:
        return len(_KEYS)

    def __str__(self) -> str:
        span = f"{self.lrs[0]:.3g} to {self.lrs[-1]:.3g}" if self.lrs else "none"
        end = {None: "to the end", "nan": "until a loss was not finite", "diverged": "until the loss diverged"}
        return (
            f"suggested learning rate: {self.suggested_lr:.3g} ({self.reason})\n"
            f"learning rates tried: {span}, {len(self.lrs)} points, {end[self.stopped]}"
        )


def _slopes(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Slope at each point: through its two neighbours, at the ends through the one."""
    last = len(x) - 1
    neighbours = [(max(i - 1, 0), min(i + 1, last)) for i in range(len(x))]
    return [(y[b] - y[a]) / (x[b] - x[a]) for a, b in neighbours]


def suggest(lrs: Sequence[float], losses: Sequence[float], min_lr: float) -> tuple[float, str]:
    """A learning rate, and why: where the loss falls most steeply over log(lr), a tenth of the points further left.

    >>> suggest([10.0**k for k in range(-6, 6)], [9, 9, 9, 9, 9, 5, 1, 1, 1, 1, 2, 5], 1e-6)[0]
    0.01
    """
    fallback = 10 * min_lr
    if len(lrs) < MIN_POINTS:
        return fallback, f"10 x the smallest: only {len(lrs)} points, and a slope needs {MIN_POINTS}"
    slopes = _slopes([math.log(lr) for lr in lrs], losses)
    steepest = min(range(len(slopes)), key=slopes.__getitem__)
    if slopes[steepest] >= 0:
        return fallback, "10 x the smallest: the loss fell at no learning rate"
    chosen = max(0, steepest - len(lrs) // 10)
    return lrs[chosen], f"the loss falls most steeply at {lrs[steepest]:.3g}; a tenth of the points before that"
