"""How large updates are relative to the weights, over a whole run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Sequence
from typing import NamedTuple

from .codec import Count, Part
from .running import quantiles
from .samples import WeightStats

NUM_RECENT = 64
MIN_NUMEL = 16
SETTLED = 20  # steps after which an optimizer's averages no longer depend on their start at zero


class UpdateRatio(NamedTuple):
    """The median over all weights of update norm / weight norm at one sampled step, and the lr if known."""

    step: int
    ratio: float
    lr: float | None


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias by its name, such as `bias`, or `bias_ih_l0` of a recurrent layer.

    >>> is_bias("layers.0.bias"), is_bias("debiased.weight")
    (True, False)
    """
    return name.rpartition(".")[2].startswith("bias")


class UpdateRatios(Part):
    """The first sample, the largest of the twenty steps after it and the largest since, and the newest 64.

    Attributes:
        count: samples so far; 0 while no update was measured.
        first, early, peak: the three samples; None while there is none.
        recent: the newest, oldest first, including `first` as long as there is room.
    """

    __slots__ = ("count", "early", "first", "peak", "recent")
    count: Count
    first: UpdateRatio | None
    early: UpdateRatio | None
    peak: UpdateRatio | None
    recent: deque[UpdateRatio]

    def __init__(self) -> None:
        self.count = 0
        self.first = self.early = self.peak = None
        self.recent = deque(maxlen=NUM_RECENT)

    def add(self, step: int, weights: Sequence[WeightStats], lr: float | None, chosen: Container[str] | None) -> None:
        """Takes one sampled step: the weights in `chosen`, or, if that is None, all but biases and small ones.

        Cost: 0.5 us a weight.
        """
        ratios = [
            ratio
            for w in weights
            if (ratio := w.update_ratio) is not None
            and math.isfinite(ratio)
            and (w.name in chosen if chosen is not None else w.numel >= MIN_NUMEL and not is_bias(w.name))
        ]
        if not ratios:
            return
        sample = UpdateRatio(step, quantiles(ratios, (0.5,))[0], lr)
        self.count += 1
        self.recent.append(sample)
        if self.first is None:
            self.first = sample
        elif step < self.first.step + SETTLED:
            self.early = _larger(self.early, sample)
        else:
            self.peak = _larger(self.peak, sample)


def _larger(known: UpdateRatio | None, sample: UpdateRatio) -> UpdateRatio:
    return sample if known is None or sample.ratio > known.ratio else known
