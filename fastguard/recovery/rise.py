"""Whether a loss stays above its earlier level, also by little, and whether the model is to blame: cumulative sums."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from ..records.codec import Count, Part

_ALLOWANCE, _CLIPPED = 0.75, 2.0  # standard deviations of one loss
_ODD, _SUSPECT, ALARM = 2.0, 5.0, 12.0
_NUM_NEWEST, _NUM_USUAL = 8, 128
_HIGHER = 1.25  # times the earlier learning rate, above which it explains a higher loss
_SURE, _MOST_ASKED = 6.0, 32  # of a trial


def _score(loss: float, level: float, spread: float) -> float:
    return max(-_CLIPPED, min((loss - level) / spread, _CLIPPED)) if math.isfinite(loss) else _CLIPPED


class LossRise(Part):
    """Adds up how far losses lie above their earlier level, by Page's test.

    sum = max(0, sum + min((loss - level) / spread, 2) - 0.75). A rise by one standard deviation reaches the alarm, 12,
    within 48 losses, one by 2 or more within 10; noise does not.

    Source: E. S. Page, Continuous inspection schemes, Biometrika 41 (1954), 100-115.
    """

    sum: float = 0.0  # see above; at most twice the alarm
    known: float = 0.0  # the largest rise that was accepted
    num_resting: Count = 0  # number of losses to leave out
    num_suspect: Count = 0  # suspect losses in a row
    _lr: float = math.inf  # of the newest loss
    _lr_before: float = math.inf  # of those that the level is of
    _newest: deque[float]  # losses since then

    def __init__(self) -> None:
        self._newest = deque(maxlen=_NUM_NEWEST)

    def see(self, loss: float, lr: float | None, level: float, spread: float) -> None:
        """Adds a loss, given the level and the standard deviation `spread` of earlier losses."""
        self._lr = 0.0 if lr is None else lr
        if self._lr < self._lr_before:
            self._lr_before = self._lr
        elif not self.is_suspect:  # a rate ten times as high is the normal one after 200 losses
            self._lr_before += (self._lr - self._lr_before) / _NUM_USUAL
        if self.num_resting:
            self.num_resting -= 1
            return
        score = _score(loss, level, max(spread, 2.0 * self.known))
        self.sum = min(max(0.0, self.sum + score - _ALLOWANCE), 2.0 * ALARM)
        if self.sum <= 0.0:
            self._newest.clear()
        else:
            self._newest.append(loss if math.isfinite(loss) else math.inf)
        self.num_suspect = self.num_suspect + 1 if self.is_suspect else 0

    @property
    def is_odd(self) -> bool:
        """Whether the last two losses or so were higher."""
        return self.sum > _ODD

    @property
    def is_suspect(self) -> bool:
        """Whether it may be about to stay higher, so that level and spread must not change."""
        return self.sum > _SUSPECT

    @property
    def is_explained(self) -> bool:
        """Whether the learning rate is higher than before, which explains a higher loss."""
        return self._lr > _HIGHER * self._lr_before

    @property
    def level(self) -> float:
        """Median of the newest losses while they are higher; NaN otherwise."""
        return median(self._newest) if self._newest else math.nan

    def calm(self) -> None:
        """Resets the sum: the loss is at its level."""
        self.sum, self.num_suspect = 0.0, 0
        self._newest.clear()

    def accept(self, rise: float, num_resting: int) -> None:
        """Accepts a rise."""
        self.calm()
        self.known, self.num_resting = max(self.known, rise), num_resting


class Trial:
    """Whether losses are lower with a snapshot, by Wald's test between their level before and after the rise."""

    def __init__(self, level: float, risen: float, spread: float) -> None:
        self.rise, self._middle, self._spread = risen - level, (level + risen) / 2.0, spread
        self._sum, self.num_asked = 0.0, 0

    def see(self, loss: float) -> None:
        """Adds a loss of the restored snapshot."""
        self._sum += _score(loss, self._middle, self._spread)
        self.num_asked += 1

    @property
    def is_lower(self) -> bool | None:
        """Whether the model had become worse; None while that is not known."""
        if abs(self._sum) >= _SURE or self.num_asked >= _MOST_ASKED:
            return self._sum < 0.0
        return None
