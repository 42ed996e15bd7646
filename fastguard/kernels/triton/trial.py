"""Whether the kernels do on this very device what they are meant to: a short run, held against plain torch.

A compiler, a driver or a device that nobody has tried can be wrong without saying so. "auto" therefore takes these
kernels on a device only after a trial there; asked for by name they run without one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ...stats import COLUMNS
from .. import reference
from ..slots import make_slots, read_slot
from .workspace import Workspace

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EXACT = ("numel", "abs_max", "abs_min_nonzero", "num_zeros", "num_nans", "num_infs")
_TOLERANCE = 1e-6  # of sums, the contract's


def problem_on(device: torch.device) -> str | None:
    """What went wrong in a trial on `device`; None if nothing did. There is one trial a device and process.

    Cost: once, the kernels' compilation (some seconds, kept by Triton on disk), and a few syncs. None while a CUDA
    graph is being captured, when nothing may sync.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return _problem_on(device)


@functools.cache
def _problem_on(device: torch.device) -> str | None:
    try:
        return _try(device)
    except Exception as error:  # whatever a compiler, a driver or a launch may raise: the reason is passed on
        return f"a trial on {device} raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _try(device: torch.device) -> str | None:
    tensors = _samples(device)
    workspace = Workspace(device)
    slot = make_slots(workspace.device, len(tensors))[0]
    found_inf = torch.zeros((), dtype=torch.float32, device=device)
    plan = workspace.plan(tensors, writable=True)
    workspace.measure(plan, slot.address, max_norm=1.0, found_inf_address=found_inf.data_ptr())
    found = read_slot(slot.words.cpu(), len(tensors))
    expected, _ = reference.tensor_stats(tensors)
    wrong = _difference(memoryview(found.rows).cast("d").tolist(), memoryview(expected).cast("d").tolist())
    if wrong is not None:
        return f"a trial on {device} gave wrong statistics: {wrong}"
    if not found.skipped:
        return f"a trial on {device} did not see NaN and Inf"
    finite = [torch.nan_to_num(t, 1.0, 2.0, 3.0) for t in tensors]
    plan = workspace.plan(finite, writable=True)
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in finite))
    scaled = [(t.float() * (1.0 / (norm + 1e-6))).to(t.dtype) for t in finite]
    workspace.measure(plan, slot.address, max_norm=1.0)
    workspace.scale(plan, slot.factor_address)
    for got, wanted in zip(finite, scaled, strict=True):
        if not torch.allclose(got.double(), wanted.double(), rtol=2.0**-7, atol=0.0):
            return f"a trial on {device} scaled {got.dtype} wrongly"
    return None


def _samples(device: torch.device) -> list[torch.Tensor]:
    """Whole chunks, tails, an address that no wide load can take, and every kind of value; made without chance."""
    samples = []
    for dtype in _DTYPES:
        for num_elements, offset in ((70_001, 0), (1_000, 3), (5, 0)):
            x = torch.arange(num_elements + offset, dtype=torch.float32, device=device)
            x = (torch.sin(x * 0.37) + 0.125).to(dtype)
            x[:: max(1, num_elements // 7)] = 0.0
            samples.append(x[offset:])
    samples[0][1234], samples[0][69_999], samples[4][17] = math.nan, math.inf, -math.inf
    return samples


def _difference(got: Sequence[float], expected: Sequence[float]) -> str | None:
    for place, (a, b) in enumerate(zip(got, expected, strict=True)):
        column = COLUMNS[place % len(COLUMNS)]
        tolerance = 0.0 if column in _EXACT else _TOLERANCE * _size(column, expected, place)
        if not abs(a - b) <= tolerance:
            return f"{column} of tensor {place // len(COLUMNS)} is {a!r} where torch says {b!r}"
    return None


def _size(column: str, row_of: Sequence[float], place: int) -> float:
    """What an error in `column` is measured by: a sum's by the root of count times the sum of squares."""
    first = place - place % len(COLUMNS)
    numel, sum_sq = row_of[first], row_of[first + 1]
    return sum_sq if column == "sum_sq" else math.sqrt(numel * sum_sq)
