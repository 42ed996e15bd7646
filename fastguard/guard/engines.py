"""What measures gradients on a device: Triton's kernels, or plain torch operations. The CPU's own way is `kernels`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .. import kernels
from ..errors import UnsupportedTensorError
from ..kernels import triton
from ..kernels.reference import tensor_columns, wide_dtype
from ..kernels.slots import Slot
from ..kernels.tensors import OVERLAP, may_overlap, plain
from ..stats.columns import INDEX, POWERS
from ..stats.slot import NARROW, NORM

_GPUS = ("cuda", "xpu", "mps")


class ElsewhereError(Exception):
    """A gradient is on a device for which there is no engine."""


class Question(NamedTuple):
    """What a step asks for; `fastguard.kernels.triton.Workspace.measure` tells what each part means.

    Attributes:
        scale, found_inf: 0-dim float32 tensors on the device, or None.
    """

    step: int = 0
    scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    max_norm: float = math.inf
    skip_nonfinite: bool = True
    unscales_itself: bool = False
    trigger: float = -1.0


class Engine(Protocol):
    """Measures, decides and scales on one device. Everything is queued; nothing waits.

    Attributes:
        device: with its index.
        dtype: of the words of a slot.
        remembers_plans: whether a plan is the same object when the same tensors come back.
    """

    device: torch.device
    dtype: torch.dtype
    remembers_plans: bool

    def __init__(self, device: torch.device) -> None: ...

    def plan(self, tensors: Sequence[torch.Tensor], *, writable: bool = False) -> Any:
        """What the other methods work from; `plan(tensors).is_plain` says whether `scale` takes it too."""

    def measure(self, plan: Any, slot: Slot, question: Question, *, decide: bool = True) -> None: ...

    def decide(self, totals: torch.Tensor, slot: Slot, question: Question) -> None: ...

    def scale(self, plan: Any, slot: Slot) -> None: ...


def engine_for(device: torch.device, backend: str) -> type[Engine] | None:
    """What measures on `device` without waiting for it; None where the host may as well compute by itself.

    Args:
        backend: "auto" or a name, from `kernels.resolve_backend`. On the CPU only "triton" has an engine: interpreted.
    """
    if device.type == "cpu":
        return TritonEngine if backend == "triton" else None
    if device.type not in _GPUS or backend == "cpu":
        return None
    return TritonEngine if kernels.takes_triton(device, backend) else TorchEngine


class TorchPlan(NamedTuple):
    """The tensors themselves: nothing is kept from step to step."""

    tensors: Sequence[torch.Tensor]
    is_plain: bool = True


class TorchEngine:
    """`Engine` in plain torch operations: the definition of what `TritonEngine` does.

    It stands in where there is no Triton: on Apple's GPUs, on an old one, or with FASTGUARD_BACKEND=reference. Many
    small launches, temporary memory, but no sync.
    """

    remembers_plans = False

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
    def measure(self, plan: TorchPlan, slot: Slot, question: Question, *, decide: bool = True) -> None:
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

    def _inverse(self, question: Question) -> torch.Tensor:
        """What rows are multiplied by, rounded as `GradScaler.unscale_` rounds it."""
        if question.scale is None:
            return torch.ones((), dtype=self.dtype, device=self.device)
        return question.scale.to(self.dtype).reciprocal().float().to(self.dtype)

    def _decide(self, norm_sq: torch.Tensor, slot: Slot, question: Question) -> None:
        norm = norm_sq.sqrt()
        finite = norm.isfinite()
        is_torchs = question.trigger < 0.0
        over = finite & (norm > question.trigger)
        coefficient = (question.max_norm / (norm + (1e-6 if is_torchs else 0.0))).clamp(max=1.0).masked_fill(~over, 1.0)
        skip = ~finite if question.skip_nonfinite else torch.zeros_like(finite)
        if question.max_norm == 0.0:
            skip = skip | over
        if question.found_inf is not None:
            skip = skip | (question.found_inf != 0)  # a NaN flag is a flag
        coefficient = coefficient.masked_fill(skip, 1.0)
        factor = coefficient
        if not question.unscales_itself:
            factor = torch.where(skip, coefficient, coefficient * self._inverse(question))
        scale = torch.ones_like(norm) if question.scale is None else question.scale.to(self.dtype)
        slot.words[NORM:NARROW].copy_(torch.stack([norm, coefficient, factor, scale]))
        slot.skip_flag.copy_(skip)
        slot.divisor.copy_(scale / coefficient)


class TritonEngine:
    """`Engine` by Triton's kernels: `Workspace`, which works with addresses, for slots and tensors."""

    dtype = torch.float64
    remembers_plans = True

    def __init__(self, device: torch.device) -> None:
        self._workspace = triton.Workspace(device)
        self.device = self._workspace.device
        self.plan = self._workspace.plan

    def measure(self, plan: Any, slot: Slot, question: Question, *, decide: bool = True) -> None:
        step, scale, found_inf, max_norm, skip_nonfinite, unscales_itself, trigger = question
        self._workspace.measure(
            plan,
            slot.address,
            step=step,
            scale_address=0 if scale is None else scale.data_ptr(),
            found_inf_address=0 if found_inf is None else found_inf.data_ptr(),
            max_norm=max_norm,
            trigger=trigger,
            skip_nonfinite=skip_nonfinite,
            unscales_itself=unscales_itself,
            decide=decide,
        )

    def decide(self, totals: torch.Tensor, slot: Slot, question: Question) -> None:
        _, scale, found_inf, max_norm, skip_nonfinite, unscales_itself, trigger = question
        self._workspace.decide(
            totals.data_ptr(),
            totals.numel(),
            slot.address,
            scale_address=0 if scale is None else scale.data_ptr(),
            found_inf_address=0 if found_inf is None else found_inf.data_ptr(),
            max_norm=max_norm,
            trigger=trigger,
            skip_nonfinite=skip_nonfinite,
            unscales_itself=unscales_itself,
        )

    def scale(self, plan: Any, slot: Slot) -> None:
        self._workspace.scale(plan, slot.factor_address)
