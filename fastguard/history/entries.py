"""What a history keeps of single steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..stats.running import HUGE

_isfinite = math.isfinite


class Entry(NamedTuple):
    """One step in a window. What is not known is None; `norm` is before clipping and may be NaN or Inf."""

    step: int
    norm: float
    clip_coef: float
    skipped: bool
    loss: float | None
    val_loss: float | None
    lr: float | None
    loss_scale: float | None
    overhead_s: float | None

    @property
    def clipped_norm(self) -> float:
        """The norm after clipping."""
        return self.norm * self.clip_coef

    @property
    def is_clean(self) -> bool:
        """Whether the step may enter a baseline: not skipped, and its norm finite."""
        return not self.skipped and _isfinite(self.norm)


class Entries:
    """Steps in a row of which there is nothing but numbers, as columns.

    Args:
        steps, norms, clip_coefs, skipped: one each a step, as in `Entry`.
        losses, lrs, loss_scales: likewise, or None where none of the steps has one.

    Attributes:
        ranges: least and largest of norms, losses, learning rates and scales, in this order; zeros of what is None.
        are_usual: whether none was skipped, all norms are above 0, and every number lies within ±1e150.
    """

    __slots__ = ("are_usual", "clip_coefs", "loss_scales", "losses", "lrs", "norms", "ranges", "skipped", "steps")

    def __init__(
        self,
        steps: Sequence[int],
        norms: Sequence[float],
        clip_coefs: Sequence[float],
        skipped: Sequence[bool],
        losses: Sequence[float] | None,
        lrs: Sequence[float] | None,
        loss_scales: Sequence[float] | None,
    ) -> None:
        self.steps, self.norms, self.clip_coefs, self.skipped = steps, norms, clip_coefs, skipped
        self.losses, self.lrs, self.loss_scales = losses, lrs, loss_scales
        self.are_usual = True not in skipped
        self.ranges: list[tuple[float, float]] = []
        for values in (norms, losses, lrs, loss_scales):
            low, high = (0.0, 0.0) if values is None else (min(values), max(values))
            self.ranges.append((low, high))
            # NaN passes `min` and `max`, not the sum.
            self.are_usual &= low > -HUGE and high < HUGE and (values is None or _isfinite(sum(values)))
        self.are_usual &= self.ranges[0][0] > 0.0

    def newest(self, num: int) -> Iterator[Entry]:
        """The newest `num`, oldest first."""
        begin = max(0, len(self.steps) - num)
        nothing = itertools.repeat(None)
        columns = self.steps, self.norms, self.clip_coefs, self.skipped, self.losses, None, self.lrs, self.loss_scales
        cut = (nothing if column is None else column[begin:] for column in columns)
        return map(tuple.__new__, itertools.repeat(Entry), zip(*cut, nothing))  # `_make` without its check

    def __iter__(self) -> Iterator[Entry]:
        return self.newest(len(self.steps))

    def __len__(self) -> int:
        return len(self.steps)


class NonFiniteEvent(NamedTuple):
    """A step whose gradients held NaN or Inf, or whose norm overflowed.

    `names` are the first eight of `num_tensors` bad tensors, in backward order: the first is the likeliest origin.
    """

    step: int
    names: tuple[str, ...]
    num_tensors: int
    num_nans: int
    num_infs: int
    skipped: bool
    loss_scale: float | None


class LoneElement(NamedTuple):
    """A clean step at which one element held nearly all of the gradient: its tensor, |g|, and the tensor's usual norm.

    `usual` is 0.0 where the tensor had not been looked at before.
    """

    step: int
    name: str
    value: float
    usual: float


class Total(NamedTuple):
    """All gradient elements of a clean step together: their sum, the largest |g|, and the largest that |sum| can be.

    `names` are the first four tensors that have an element as large as the largest.
    """

    step: int
    sum: float
    largest: float
    bound: float
    names: tuple[str, ...] = ()


class Validation(NamedTuple):
    """One validation: the step it came with, its loss, and the smoothed training loss at that step (NaN if none)."""

    step: int
    val_loss: float
    train_loss: float
