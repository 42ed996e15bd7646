"""What a history keeps about single steps."""

from __future__ import annotations

import math
from typing import NamedTuple

_isfinite = math.isfinite


class Entry(NamedTuple):
    """One step in a window. Unknown numbers are None; `norm` is before clipping and may be NaN or Inf."""

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
        """Whether the step may enter a baseline: it was not skipped, and its norm is finite."""
        return not self.skipped and _isfinite(self.norm)


class NonFiniteEvent(NamedTuple):
    """A step whose gradients contained NaN or Inf, or whose norm overflowed.

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
    """A clean step at which one element was nearly all of the gradient: its tensor, |g|, and the tensor's usual norm.

    `usual` is 0.0 if there was no earlier sample of the tensor.
    """

    step: int
    name: str
    value: float
    usual: float


class Total(NamedTuple):
    """All gradient elements of a clean step together: their sum, the largest |g|, and an upper bound of |sum|.

    `names` are the first four tensors with an element as large as the largest.
    """

    step: int
    sum: float
    largest: float
    bound: float
    names: tuple[str, ...] = ()


class Validation(NamedTuple):
    """One validation: its step and loss, and the smoothed training loss at that step (NaN if there was none)."""

    step: int
    val_loss: float
    train_loss: float
