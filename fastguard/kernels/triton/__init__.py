"""Triton kernels for GPUs: two launches for all statistics and the decision, a third that scales only when it must.

As a backend they give tables to the host, which synchronises; a guard works with `Workspace` and slots and never
does. Nothing here imports Triton before it is used.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch

from ... import _env
from ..._device import is_capturing
from ..reference import ReferenceBackend
from ..slots import make_slots
from ..tensors import float64_bytes
from . import launch, trial
from .launch import Workspace, lock, workspace_of
from .tables import Plan, accepts, device_for

__all__ = ["Plan", "TritonBackend", "Workspace", "unavailable"]

_OLDEST = (7, 0)  # compute capability that Triton compiles for


@functools.cache
def unavailable() -> str | None:
    """Why this backend cannot run here; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with torch for CUDA and ROCm, or with `pip install fastguard[gpu]`"
    if _env.triton_interpreter():
        return None
    if torch.cuda.is_available():
        if torch.version.hip is None and torch.cuda.get_device_capability() < _OLDEST:
            return f"{torch.cuda.get_device_name()} is too old for Triton, which needs compute capability 7.0"
        return None
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return None
    return "no GPU that torch can use; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly, for tests"


class TritonBackend(ReferenceBackend):
    """The Triton kernels, for GPUs; interpreted, for tensors on the CPU."""

    name = "triton"

    def unavailable(self) -> str | None:
        return unavailable()

    def detail(self) -> str:
        import triton

        if _env.triton_interpreter():
            return f"Triton {triton.__version__}, interpreted on the CPU (TRITON_INTERPRET=1)"
        module = torch.cuda if torch.cuda.is_available() else torch.xpu
        return f"Triton {triton.__version__}, {module.get_device_name()}"

    def accepts(self, device: torch.device) -> bool:
        return accepts(device)

    def problem_on(self, device: torch.device, operation: str) -> str | None:
        return trial.problem_on(device, operation)

    def tensor_stats(self, tensors: Sequence[torch.Tensor], unscale: float = 1.0) -> tuple[bytearray, None]:
        """Cost: one read of every element; one launch a dtype and one more; a copy of a row a tensor to the host, which
        is the one sync."""
        if not tensors:
            return bytearray(), None
        with lock:
            workspace = workspace_of(device_for(tensors))
            plan = workspace.plan(tensors)
            slot = make_slots(workspace.device, len(tensors))[0]
            workspace.measure(plan, slot, unscale=unscale)
            return bytearray(float64_bytes(slot.rows.cpu())), None

    def scale_(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        """Cost: one read and one write of each; no sync."""
        if not tensors:
            return
        with lock:
            workspace = workspace_of(device_for(tensors))
            if is_capturing(workspace.device):
                raise RuntimeError("`scale_` cannot be captured in a CUDA graph. Call it after the replay")
            plan = workspace.plan(tensors, writable=True)
            held = torch.full((), factor, dtype=torch.float64, device=workspace.device)
            workspace.scale_by(plan, held.data_ptr())

    activation_into = staticmethod(launch.activation_into)
