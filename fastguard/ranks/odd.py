"""Outlier ranks and the noise scale, from the norms of each rank's own gradients."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ..records.events import MAX_RANKS

_LIMIT = 5.0  # standard deviations
_OF_MAD, _OF_MEDIAN = (1.4826, 1.2533)  # normal: deviation / MAD, error of a median / of a mean
_LEAST = math.log(1.25)  # also if the others are nearly equal
_WINDOW = 20  # steps
_LEAST_RANKS = 3  # of two, either may be the odd one
_DECAY = 0.99


class OddRanks:
    """Ranks whose own norms differ from the others', step after step.

    A rank's distance is log(norm) minus the ranks' median of it, as a median over the last twenty steps. A rank is odd
    if that is more than five standard deviations, both of the ranks' distances (by their MAD) and of the error of such
    a median, and if its norm is more than a quarter above or a fifth below.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = list(members)
        self._logs: deque[tuple[int, torch.Tensor]] = deque(maxlen=_WINDOW)
        self._since: dict[int, int] = {}  # the first step of those that are odd now
        self._known: dict[int, dict[str, Any]] = {}

    def add(self, first: int, norms: torch.Tensor) -> list[dict[str, Any]] | None:
        """Adds the norms of steps from `first` on (float64, [ranks, steps]); returns all odd ranks if there is news.

        It leaves out steps at which a norm is not finite, or all are 0.
        """
        if len(self._members) < _LEAST_RANKS:
            return None
        logs = norms.clamp_min(torch.finfo(torch.float64).tiny).log()
        says = (norms.isfinite().all(dim=0) & (norms > 0.0).any(dim=0)).tolist()
        self._logs.extend((first + i, logs[:, i]) for i, tells in enumerate(says) if tells)
        if len(self._logs) < _WINDOW:
            return None
        window = torch.stack([one for _, one in self._logs], dim=1)
        distance = _median(window - _median(window, dim=0), dim=1)
        # Of distances from the mean, since of those from the median one is always 0.
        away = window - window.mean(dim=0)
        away = (away - _median(away, dim=1).unsqueeze(1)).abs() / math.sqrt(1.0 - 1.0 / len(self._members))
        scatter = _median(_median(away, dim=1), dim=0)
        limit = max(
            _LEAST,
            _LIMIT * _OF_MAD * float(_median(distance.abs(), dim=0)),
            _LIMIT * _OF_MAD * _OF_MEDIAN * float(scatter) / math.sqrt(_WINDOW),
        )
        odd = [place for place, apart in enumerate(distance.abs().tolist()) if apart > limit]
        self._since = {place: self._since.get(place, self._logs[0][0]) for place in odd}
        news = [self._note(place, math.exp(float(distance[place]))) for place in odd]
        return list(self._known.values())[:MAX_RANKS] if any(news) else None

    def _note(self, place: int, ratio: float) -> bool:
        """Whether there is news about a rank: after twenty steps, and whenever their number has doubled."""
        rank, last = self._members[place], self._logs[-1][0]
        count = last + 1 - self._since[place]
        if rank in self._known and self._known[rank]["num_steps"] * 2 > count:
            return False
        known = {"rank": rank, "num_ranks": len(self._members), "step": self._since[place], "last_step": last}
        self._known[rank] = {**known, "num_steps": count, "ratio": ratio}
        return True


def _median(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The mean of the two middle values, of which torch's median takes the lower."""
    return x.quantile(0.5, dim=dim)


class NoiseScale:
    r"""The gradient noise scale, from norms of gradients of one rank's batch and of the average over the ranks.

    B_simple = tr(Sigma) / |G|^2 of McCandlish et al. 2018 (arXiv:1812.06162), by the estimates of their appendix A.1:

        |G|^2      = (B_big * |G_big|^2 - B_small * |G_small|^2) / (B_big - B_small)
        tr(Sigma)  = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)

    with B_small = 1 and B_big = the number of ranks. So its **unit is the batch that one rank takes a step**; times its
    number of samples it is in samples. |G_small|^2 is the mean over the ranks. Both estimates are averaged over
    the steps, with weights that fall by 0.99 a step, before one is divided by the other: the ratio of two is biased.

    >>> scale = NoiseScale(2)
    >>> for _ in range(20):
    ...     scale.add(3.0, 2.0)  # |G|^2 = 1, tr(Sigma) = 2
    >>> round(scale.value, 9)
    2.0
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._signal = self._noise = 0.0
        self._num_steps = 0

    def add(self, small_sq: float, big_sq: float) -> None:
        """Adds |G_small|^2 and |G_big|^2 of a step."""
        n = self._num_ranks
        self._signal = _DECAY * self._signal + (n * big_sq - small_sq) / (n - 1)
        self._noise = _DECAY * self._noise + (small_sq - big_sq) * n / (n - 1)
        self._num_steps += 1

    @property
    def value(self) -> float | None:
        """B_simple; None before twenty steps, and where the signal is lost in the noise."""
        if self._num_steps < _WINDOW or self._signal <= 0.0 or self._noise < 0.0:
            return None
        return self._noise / self._signal
