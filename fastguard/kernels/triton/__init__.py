"""Triton kernels for GPUs: two launches for all statistics and the decision, a third that scales only when it must. As
a backend they give tables to the host, which synchronises; a guard works with `Workspace` and slots and never does.
Nothing here imports Triton before it is used."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _env
from ..._device import is_capturing
from ...errors import UnsupportedTensorError
from ...records.columns import COLUMNS, INDEX, TABLE
from ...records.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS
from ..reference import Limits, ReferenceBackend
from ..slots import StepOptions, make_slots
from ..tensors import float64_bytes
from .launch import Workspace, lock, workspace_of
from .tables import Plan, accepts, device_for

__all__ = ["Plan", "TritonBackend", "Workspace", "unavailable"]

_log = logging.getLogger("fastguard")

_OLDEST = (7, 0)  # compute capability that Triton compiles for
# Of a trial on a device.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOLERANCE = 1e-6  # of sums, the contract's
_LIMITS = (-0.99, 0.75, 1e-3)
# A row; channels side by side, in long runs and in short ones.
_CASES: tuple[tuple[tuple[int, ...], int | None], ...] = (((9001,), None), ((70, 140), 1), ((2, 3, 45, 40), 1))
_ACTIVATION_TOLERANCE = 1e-5  # of the mean in standard deviations, of the variance and of sums of magnitudes
_verdicts: dict[tuple[Callable[[torch.device], str | None], torch.device], str | None] = {}


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
        """What went wrong in a trial of `operation` on `device`; None if nothing did. There are two trials a device and
        process: one of statistics and scaling, and one of all that reads activations. An untested compiler, driver or
        device can give wrong results without an error. "auto" therefore takes these kernels on a device only after a
        trial there; `backend="triton"` runs without one. Cost: once, the kernels' compilation and a few syncs. None
        while a CUDA graph is captured: nothing may sync."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        is_of_gradients = operation in ("tensor_stats", "scale_")
        for attempt in (_try_statistics,) if is_of_gradients else (_try_statistics, _try_activations):
            if (attempt, device) not in _verdicts:
                _log.info("compiling GPU kernels on %s: a few seconds the first time, then from Triton's cache", device)
                try:
                    _verdicts[attempt, device] = attempt(device)
                except Exception as error:  # whatever a compiler, a driver or a launch may raise: it is passed on
                    problem = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                    if isinstance(error, torch.OutOfMemoryError):  # the device was full; the kernels may be right
                        return f"a trial on {device} {problem}"
                    _verdicts[attempt, device] = problem
            if _verdicts[attempt, device] is not None:
                return f"a trial on {device} {_verdicts[attempt, device]}"
        return None

    def tensor_stats(self, tensors: Sequence[torch.Tensor], unscale: float = 1.0) -> tuple[bytearray, None]:
        """Cost: one read of every element; one launch a dtype and one more; a copy of a row a tensor to the host, which
        is the one sync."""
        with lock:
            workspace = workspace_of(device_for(tensors))
            plan = workspace.plan(tensors)
            slot = make_slots(workspace.device, len(tensors))[0]
            workspace.measure(plan, slot, unscale=unscale)
            return bytearray(float64_bytes(slot.rows.cpu())), None

    def scale_(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        """Cost: one read and one write of each; no sync."""
        with lock:
            workspace = workspace_of(device_for(tensors))
            if is_capturing(workspace.device):
                raise RuntimeError("`scale_` cannot be captured in a CUDA graph. Call it after the replay")
            plan = workspace.plan(tensors, writable=True)
            slot = make_slots(workspace.device, 0)[0]
            slot.factor.fill_(factor)
            workspace.scale(plan, slot)

    def activation_into(
        self, x: torch.Tensor, dim: int | None, limits: Limits, row: torch.Tensor, table: torch.Tensor | None
    ) -> None:
        if not accepts(x.device):
            raise UnsupportedTensorError(0, f'must be on a GPU for backend "triton", got {x.device}')
        if x.numel() == 0:
            super().activation_into(x, dim, limits, row, table)
            return
        with lock:
            workspace_of(x.device).measure_activation(x, dim, limits, row, table)


def _try_statistics(device: torch.device) -> str | None:
    # Whole chunks, tails, an address that no wide load can take, and every kind of value; made without chance.
    shapes = [(dtype, *shape) for dtype in _DTYPES for shape in ((70_001, 0), (1_000, 3), (5, 0))]
    tensors = [_sample(num_elements + offset, dtype, device)[offset:] for dtype, num_elements, offset in shapes]
    tensors[0][1234], tensors[0][69_999], tensors[4][17] = math.nan, math.inf, -math.inf
    workspace = Workspace(device)
    slot = make_slots(workspace.device, len(tensors))[0]
    found_inf = torch.zeros((), dtype=torch.float32, device=device)
    plan = workspace.plan(tensors, writable=True)
    workspace.measure(plan, slot, StepOptions(max_norm=1.0, found_inf=found_inf))
    expected, _ = ReferenceBackend().tensor_stats(tensors)
    wrong = _difference(float64_bytes(slot.rows.cpu()), expected, COLUMNS, " of tensor {}", _tolerance)
    if wrong is not None:
        return f"gave wrong statistics: {wrong}"
    if not slot.skip_flag:
        return "did not see NaN and Inf"
    finite = [torch.nan_to_num(t, 1.0, 2.0, 3.0) for t in tensors]
    plan = workspace.plan(finite, writable=True)
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in finite))
    scaled = [(t.float() * (1.0 / (norm + 1e-6))).to(t.dtype) for t in finite]
    workspace.measure(plan, slot, StepOptions(max_norm=1.0))
    workspace.scale(plan, slot)
    for got, wanted in zip(finite, scaled, strict=True):
        if not torch.allclose(got.double(), wanted.double(), rtol=2.0**-7, atol=0.0):
            return f"scaled {got.dtype} wrongly"
    return None


def _sample(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x = (torch.sin(torch.arange(count, dtype=torch.float32, device=device) * 0.37) + 0.125).to(dtype)
    x[:: max(1, count // 7)] = 0.0
    return x


def _difference(
    got: Any, expected: Any, columns: Sequence[str], where: str, tolerance: Callable[[str, Sequence[float]], float]
) -> str | None:
    """The first of some float64 in rows of `columns` that is not as `expected`, within the tolerance of its column."""
    rights = memoryview(expected).cast("B").cast("d").tolist()
    for place, (a, b) in enumerate(zip(memoryview(got).cast("B").cast("d").tolist(), rights, strict=True)):
        row, at = divmod(place, len(columns))
        if not abs(a - b) <= tolerance(columns[at], rights[place - at :]):
            return f"{columns[at]}{where.format(row)} is {a!r} where torch says {b!r}"
    return None


def _tolerance(name: str, row: Sequence[float]) -> float:
    """In a sum of x^p measured by at least the sum of |x|^p, were all magnitudes equal."""
    column = TABLE[INDEX[name]]
    if column.is_exact:
        return 0.0
    numel, sum_sq, largest = row[INDEX["numel"]], row[INDEX["sum_sq"]], row[INDEX["abs_max"]]
    return _TOLERANCE * (math.sqrt(numel * sum_sq) if column.power == 1 else sum_sq * largest ** (column.power - 2))


def _try_activations(device: torch.device) -> str | None:
    for dtype in _DTYPES:
        for shape, dim in _CASES:
            x = _sample(math.prod(shape), dtype, device)
            for values in ((), (math.nan, math.inf, -math.inf)):
                for i, value in enumerate(values):
                    x[1000 + 1500 * i] = value
                wrong = _activation_difference(x.view(shape), dim)
                if wrong is not None:
                    return f"gave wrong figures for {dtype} of shape {shape}: {wrong}"
    return None


def _activation_difference(x: torch.Tensor, dim: int | None) -> str | None:
    row, table = TritonBackend().activation(x, dim, _LIMITS)
    true_row, true_table = ReferenceBackend().activation(x, dim, _LIMITS)
    numel, _, m2 = true_row[:3]

    def tolerance(column: str, found: Sequence[float]) -> float:
        sizes = {"mean": math.sqrt(m2 / numel), "m2": m2, "sum_abs": found[3]}
        return _ACTIVATION_TOLERANCE * sizes.get(column, 0.0)

    wrong = _difference(table or b"", true_table or b"", CHANNEL_COLUMNS, " of channel {}", tolerance)
    return wrong or _difference(array("d", row), array("d", true_row), ACTIVATION_COLUMNS, "", tolerance)
