"""The two ways to measure on a device, behind one interface: Triton's kernels, and plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..kernels import triton
from ..kernels.reference_workspace import Question, ReferenceWorkspace
from ..kernels.slot import Slot

ReferenceEngine = ReferenceWorkspace


class ElsewhereError(Exception):
    """A gradient is on a device for which there is no engine."""


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


class TritonEngine:
    """`Workspace`, which works with addresses, for slots and tensors."""

    dtype = torch.float64
    remembers_plans = True

    def __init__(self, device: torch.device) -> None:
        self._workspace = triton.Workspace(device)
        self.device = self._workspace.device
        self.plan = self._workspace.plan

    def measure(self, plan: Any, slot: Slot, question: Question, *, decide: bool = True) -> None:
        step, scale, found_inf, max_norm, skip_nonfinite, unscales_itself = question
        self._workspace.measure(
            plan,
            slot.address,
            step=step,
            scale_address=0 if scale is None else scale.data_ptr(),
            found_inf_address=0 if found_inf is None else found_inf.data_ptr(),
            max_norm=max_norm,
            skip_nonfinite=skip_nonfinite,
            unscales_itself=unscales_itself,
            decide=decide,
        )

    def decide(self, totals: torch.Tensor, slot: Slot, question: Question) -> None:
        _, scale, found_inf, max_norm, skip_nonfinite, unscales_itself = question
        self._workspace.decide(
            totals.data_ptr(),
            totals.numel(),
            slot.address,
            scale_address=0 if scale is None else scale.data_ptr(),
            found_inf_address=0 if found_inf is None else found_inf.data_ptr(),
            max_norm=max_norm,
            skip_nonfinite=skip_nonfinite,
            unscales_itself=unscales_itself,
        )

    def scale(self, plan: Any, slot: Slot) -> None:
        self._workspace.scale(plan, slot.address + 24)
