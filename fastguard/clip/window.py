"""The newest numbers in a window, in the order of their coming and of their size."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Any

from ..records import values


class SortedWindow:
    """Up to `size` numbers, the newest. Cost of `add`: 1 us, whatever the size up to some thousands."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: deque[float] = deque()
        self.ordered: list[float] = []

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        """Takes a finite number, and drops the oldest for it."""
        self.values.append(value)
        insort(self.ordered, value)
        if len(self.values) > self.size:
            del self.ordered[bisect_left(self.ordered, self.values.popleft())]

    def quantile(self, share: float) -> float:
        """With linear interpolation, as `numpy.quantile`; NaN of nothing."""
        if not self.ordered:
            return math.nan
        place = share * (len(self.ordered) - 1)
        below = min(int(place), max(0, len(self.ordered) - 2))
        low = self.ordered[below]
        return low if len(self.ordered) == 1 else low + (place - below) * (self.ordered[below + 1] - low)

    def median_deviation(self, centre: float) -> float:
        """The (upper) median of |value - centre|. Cost: 2 us; no pass over the window."""
        ordered, rank = self.ordered, len(self.ordered) // 2
        # Sorted deviations are those below the centre, backwards, merged with those above: the one with `rank`
        # smaller ones is found by halving how many of these come from below.
        split = bisect_left(ordered, centre)
        low, high = max(0, rank - (len(ordered) - split)), min(rank, split)
        while low < high:
            taken = (low + high) // 2  # from below; rank - taken from above
            if centre - ordered[split - taken - 1] < ordered[split + rank - taken - 1] - centre:
                low = taken + 1
            else:
                high = taken
        below = centre - ordered[split - low - 1] if low < split else math.inf
        above = ordered[split + rank - low] - centre if split + rank - low < len(ordered) else math.inf
        return min(below, above)

    def restart(self, kept: Iterable[float]) -> None:
        """Goes on with `kept` alone."""
        self.values = deque(kept)
        self.ordered = sorted(self.values)

    def state(self) -> list[float]:
        """As plain data."""
        return list(self.values)


def finite_numbers(value: Any) -> list[float]:
    """What a saved window must be; raises a MisfitError for anything else."""
    numbers = [float(number) for number in values.each(values.number, value)]
    if not all(map(math.isfinite, numbers)):
        raise values.MisfitError("must be finite numbers")
    return numbers
