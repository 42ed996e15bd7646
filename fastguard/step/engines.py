"""What measures gradients on a device: Triton's kernels, or plain torch operations. The CPU's own way is `kernels`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from .. import kernels
from ..clip.limits import factors_of
from ..errors import UnsupportedTensorError
from ..kernels import triton
from ..kernels.reference import tensor_columns, wide_dtype
from ..kernels.slots import Slot, StepOptions
from ..kernels.tensors import OVERLAP, may_overlap, plain
from ..records.columns import INDEX, POWERS
from ..records.slot import NARROW, NORM

_GPUS = ("cuda", "xpu", "mps")


class NoEngineError(Exception):
    """No engine can read all of the gradients: some are on another device, say."""


def engine_for(device: torch.device, backend: str) -> type[Engine] | None:
    """What measures on `device` without waiting for it; None where the host may as well compute by itself. On the CPU
    only `backend` "triton" has an engine: interpreted."""
    if device.type == "cpu":
        return triton.Workspace if backend == "triton" else None
    if device.type not in _GPUS or backend == "cpu":
        return None
    chosen = kernels.registry.choose(device, backend)
    return triton.Workspace if chosen.name == "triton" and chosen.accepts(device) else TorchEngine


class TorchPlan(NamedTuple):
    """The tensors themselves: nothing is kept from step to step."""

    tensors: Sequence[torch.Tensor]
    is_plain: bool = True


class TorchEngine:
    """Measures, decides and scales on one device in plain torch operations: the definition of what `triton.Workspace`
    does. It stands in where there is no Triton: on Apple's GPUs, on an old one, or with FASTGUARD_BACKEND=reference.
    Many small launches, temporary memory, but no sync.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = wide_dtype(device)
        # A list that became a tensor on the device at each step would be waited for.
        self._powers = torch.tensor(POWERS, dtype=self.dtype, device="cpu").to(device)

    def plan(self, tensors: Sequence[torch.Tensor], *, writable: bool = False) -> TorchPlan:
        """`tensors`, which must all be on this device."""
        for i, tensor in enumerate(tensors):
            if tensor.device != self.device:
                raise UnsupportedTensorError(i, f"must be on {self.device}, got {tensor.device}")
        return TorchPlan(tensors)

    @torch.no_grad()
    def measure(self, plan: TorchPlan, slot: Slot, options: StepOptions) -> None:
        """Statistics, and a decision, into `slot`. Cost: about a dozen launches and passes a tensor, and a float64 copy
        of at most 2^20 elements at a time."""
        norm_sq = torch.zeros((), dtype=self.dtype, device=self.device)
        if plan.tensors:
            rows = torch.stack([tensor_columns(plain(t, i)) for i, t in enumerate(plan.tensors)])
            rows = rows * self._inverse(options) ** self._powers
            slot.rows[: len(rows)].copy_(rows)
            sums = rows.sum(0)
            norm_sq = sums[INDEX["sum_sq"]].masked_fill(sums[INDEX["num_infs"]] > 0, math.inf)
            norm_sq = norm_sq.masked_fill(sums[INDEX["num_nans"]] > 0, math.nan)
        slot.step.fill_(options.step)
        slot.total.copy_(norm_sq)
        self._decide(norm_sq, slot, options)

    @torch.no_grad()
    def scale(self, plan: TorchPlan, slot: Slot) -> None:
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

    def _inverse(self, options: StepOptions) -> torch.Tensor:
        """What rows are multiplied by, rounded as `GradScaler.unscale_` rounds it."""
        if options.scale is None:
            return torch.ones((), dtype=self.dtype, device=self.device)
        return options.scale.to(self.dtype).reciprocal().float().to(self.dtype)

    def _decide(self, norm_sq: torch.Tensor, slot: Slot, options: StepOptions) -> None:
        norm = norm_sq.sqrt()
        finite = norm.isfinite()
        coefficient = factors_of(norm, options.trigger, options.max_norm).masked_fill(~finite, 1.0)
        skip = ~finite if options.skip_nonfinite else torch.zeros_like(finite)
        if options.max_norm == 0.0:
            skip = skip | (finite & (norm > options.trigger))
        if options.found_inf is not None:
            skip = skip | (options.found_inf != 0)  # a NaN flag is a flag
        coefficient = coefficient.masked_fill(skip, 1.0)
        factor = coefficient
        if not options.unscales_itself:
            factor = torch.where(skip, coefficient, coefficient * self._inverse(options))
        scale = torch.ones_like(norm) if options.scale is None else options.scale.to(self.dtype)
        slot.words[NORM:NARROW].copy_(torch.stack([norm, coefficient, factor, scale]))
        slot.skip_flag.copy_(skip)
        slot.divisor.copy_(scale / coefficient)


Engine: TypeAlias = TorchEngine | triton.Workspace
