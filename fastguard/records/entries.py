"""What a history keeps of single steps."""

from __future__ import annotations

import math
from typing import NamedTuple

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
