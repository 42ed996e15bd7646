"""How many steps the demo trains, and the learning rate of each."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_NUM_AFTER_POISON = 5
_FIRST_REVIEW = 4  # the first steps also warm caches and pools up
_STEPS_A_REVIEW = 8
_NUM_REVIEWS_KEPT = 4


class Pace:
    """A number of steps that shrinks while this machine is too slow for the time there is.

    Args:
        wanted: steps to take if time allows; exactly these without a deadline.
        deadline: in seconds of `time.perf_counter`; None for no limit.

    Attributes:
        num_steps: steps to take, as it looks now.
        poison_at: the step whose batch is poisoned: in the middle, with at least five after it.
    """

    def __init__(self, wanted: int, deadline: float | None = None) -> None:
        self.wanted = wanted
        self.deadline = deadline
        self.num_steps = wanted
        self.poison_at = wanted // 2
        self._pace: deque[tuple[int, float]] = deque(maxlen=_NUM_REVIEWS_KEPT)

    @property
    def is_cut(self) -> bool:
        """Whether there will be fewer steps than wanted."""
        return self.num_steps < self.wanted

    def review(self, step: int) -> None:
        """Called before each step: fits the steps that remain to the pace of the newest 24."""
        if self.deadline is None or step < _FIRST_REVIEW or (step - _FIRST_REVIEW) % _STEPS_A_REVIEW:
            return
        self._pace.append((step, time.perf_counter()))
        (first, then), (_, now) = self._pace[0], self._pace[-1]
        if first == step:
            return
        affordable = step + int((self.deadline - now) / (now - then) * (step - first))
        if step <= self.poison_at:
            self.poison_at = max(step, min(affordable, self.wanted) // 2)
        self.num_steps = max(min(affordable, self.wanted), step + 1, self.poison_at + 1 + _NUM_AFTER_POISON)

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
        return warm_up_cosine(max(1, self.num_steps // 10), self.num_steps, floor=0.1)(step)


def warm_up_cosine(num_warm: int, num_steps: int, floor: float = 0.05) -> Callable[[int], float]:
    """A schedule: linear over `num_warm` steps, then a cosine down to `floor`."""

    def factor(step: int) -> float:
        if step < num_warm:
            return (step + 1) / num_warm
        progress = min(1.0, (step - num_warm) / max(1, num_steps - num_warm))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
