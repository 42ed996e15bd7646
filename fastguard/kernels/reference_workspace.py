"""Plain PyTorch again, for a guard that must not wait: statistics, decision and scaling, all on the device.

The definition of what `triton.Workspace` does, and what stands in for it where there is no Triton: on Apple's GPUs, on
an old one, or with FASTGUARD_BACKEND=reference. Many small launches, temporary memory, but no sync.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import UnsupportedTensorError
from ..stats.columns import INDEX, POWERS
from .reference import tensor_columns, wide_dtype
from .slot import Slot
from .tensors import OVERLAP, may_overlap, plain


class Question(NamedTuple):
    """What a step asks for; `triton.Workspace.measure` tells what each part means.

    Attributes:
        scale, found_inf: 0-dim float32 tensors on the device, or None.
    """

    step: int = 0
    scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    max_norm: float = math.inf
    skip_nonfinite: bool = True
    unscales_itself: bool = False


class ReferencePlan(NamedTuple):
    """The tensors themselves: nothing is kept from step to step."""

    tensors: Sequence[torch.Tensor]
    is_plain: bool = True


class ReferenceWorkspace:
    """`plan`, `measure`, `decide` and `scale` as torch operations. All of them queue work and return."""

    remembers_plans = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = wide_dtype(device)
        # A list that became a tensor on the device at each step would be waited for.
        self._powers = torch.tensor(POWERS, dtype=self.dtype).to(device)

    def plan(self, tensors: Sequence[torch.Tensor], *, writable: bool = False) -> ReferencePlan:
        """`tensors`, which must all be on this device."""
        for i, tensor in enumerate(tensors):
            if tensor.device != self.device:
                raise UnsupportedTensorError(i, f"must be on {self.device}, got {tensor.device}")
        return ReferencePlan(tensors)

    @torch.no_grad()
    def measure(self, plan: ReferencePlan, slot: Slot, question: Question, *, decide: bool = True) -> None:
        """Statistics, and a decision, into `slot`.

        Cost: about a dozen passes over each tensor, as many launches, and a float64 copy of at most 2^20 elements at a
        time; no sync.
        """
        norm_sq = torch.zeros((), dtype=self.dtype, device=self.device)
        if plan.tensors:
            rows = torch.stack([tensor_columns(plain(t, i)) for i, t in enumerate(plan.tensors)])
            rows = rows * self._inverse(question) ** self._powers
            slot.rows[: len(rows)].copy_(rows)
            sums = rows.sum(0)
            norm_sq = sums[INDEX["sum_sq"]].masked_fill(sums[INDEX["num_infs"]] > 0, math.inf)
            norm_sq = norm_sq.masked_fill(sums[INDEX["num_nans"]] > 0, math.nan)
        slot.step.fill_(question.step)
        slot.total.copy_(norm_sq)
        if decide:
            self._decide(norm_sq, slot, question)

    @torch.no_grad()
    def decide(self, totals: torch.Tensor, slot: Slot, question: Question) -> None:
        """The decision of `measure`, from the totals of several devices."""
        norm_sq = totals.sum()
        slot.total.copy_(norm_sq)
        self._decide(norm_sq, slot, question)

    @torch.no_grad()
    def scale(self, plan: ReferencePlan, slot: Slot) -> None:
        """x *= factor, with one rounding; reads and writes the tensors also where the factor is 1."""
        views = [plain(t, i, writable=True) for i, t in enumerate(plan.tensors)]
        for i, view in enumerate(views):
            if may_overlap(view):
                raise UnsupportedTensorError(i, OVERLAP)
        for view in views:
            real = torch.view_as_real(view) if view.is_complex() else view
            compute = real.dtype if real.dtype in (torch.float32, torch.float64) else torch.float32
            factor = slot.factor.to(compute)
            if real.dtype is compute:
                real.mul_(factor)
            else:  # the product is rounded to half precision, the factor is not
                real.copy_(real.to(compute) * factor)

    def _inverse(self, question: Question) -> torch.Tensor:
        """What rows are multiplied by, rounded as `GradScaler.unscale_` rounds it."""
        if question.scale is None:
            return torch.ones((), dtype=self.dtype, device=self.device)
        return question.scale.to(self.dtype).reciprocal().float().to(self.dtype)

    def _decide(self, norm_sq: torch.Tensor, slot: Slot, question: Question) -> None:
        norm = norm_sq.sqrt()
        finite = norm.isfinite()
        coefficient = (question.max_norm / (norm + 1e-6)).clamp(max=1.0).masked_fill(~finite, 1.0)
        skip = ~finite if question.skip_nonfinite else torch.zeros_like(finite)
        if question.found_inf is not None:
            skip = skip | (question.found_inf != 0)  # a NaN flag is a flag
        coefficient = coefficient.masked_fill(skip, 1.0)
        factor = coefficient
        if not question.unscales_itself:
            factor = torch.where(skip, coefficient, coefficient * self._inverse(question))
        scale = torch.ones_like(norm) if question.scale is None else question.scale.to(self.dtype)
        slot.words[1:5].copy_(torch.stack([norm, coefficient, factor, scale]))
        slot.skip_flag.copy_(skip)
        slot.divisor.copy_(scale / coefficient)
