"""How often to sample, so that samples stay within their share of the training time."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

_RECENT_COSTS = 3
_RECENT_STEPS = 20
_GROWTH = 4  # at most, of the interval from one sample to the next


class Cost(NamedTuple):
    """Cost so far."""

    seconds: float  # host time spent in the monitor
    share: float  # of the time since the end of the first step; 0.0 before the second
    # num_samples, num_steps: sampled steps, and all steps
    num_samples: int
    num_steps: int
    interval: int  # steps from one sample to the next at present

    def describe(self, budget: float | None) -> str:
        """One line, with the allowed share."""
        limit = "" if budget is None else f", {budget:.1%} allowed"
        steps = "step" if self.interval == 1 else f"{self.interval} steps"
        return (
            f"sampled {self.num_samples} of {self.num_steps} steps, now every {steps}; "
            f"took {self.seconds * 1e3:.3g} ms ({self.share:.2%} of the time{limit})"
        )


class Budget:
    """Stretches the interval between samples to a multiple of `every` that keeps their cost within `share`.

    A sample costs the least of the last three, without the very first, which loads and compiles; a step takes the
    median of the last twenty. The interval grows at most fourfold at once, so that one slow sample decides little.
    """

    def __init__(self, every: int, share: float | None) -> None:
        self.every, self.share, self.interval = every, share, every
        self.num_samples = self.num_steps = 0
        self._spent_s = self._elapsed_s = self._since_sample_s = self._spent_of_elapsed_s = 0.0
        self._costs: deque[float] = deque(maxlen=_RECENT_COSTS)
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step(self, seconds: float | None, cost_s: float, sampled: bool, num_steps: int = 1) -> None:
        """Takes the steps since the last call: their time if known, the monitor's part, if the last was sampled."""
        self.num_steps += num_steps
        self._spent_s += cost_s
        self._since_sample_s += cost_s  # figures may arrive, and be counted, some steps later
        if seconds is not None:
            self._elapsed_s += seconds
            self._spent_of_elapsed_s += cost_s
            self._steps.append(max(0.0, seconds - cost_s) / num_steps)
        if not sampled:
            return
        self.num_samples += 1
        if self.num_samples > 1:
            self._costs.append(self._since_sample_s)
        if self._costs and self._steps and self.share is not None:
            step_s = max(statistics.median(self._steps), 1e-9)
            needed = math.ceil(min(self._costs) / (self.share * step_s * self.every))
            self.interval = self.every * max(1, min(needed, _GROWTH * self.interval // self.every))
        self._since_sample_s = 0.0

    def cost(self) -> Cost:
        share = self._spent_of_elapsed_s / self._elapsed_s if self._elapsed_s else 0.0
        return Cost(self._spent_s, share, self.num_samples, self.num_steps, self.interval)
