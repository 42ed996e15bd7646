"""Activations on the CPU: adapter over `fastguard._C`, the C++ kernels. See `activations` for the operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import UnsupportedTensorError
from . import cpu
from .tensors import plain

if cpu.unavailable() is None:
    from .. import _C


def _prepared(x: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> Any:
    values = plain(x, 0)
    if values.device.type != "cpu":
        raise UnsupportedTensorError(0, f'must be on the CPU for backend "cpu", got {values.device}')
    found = call(values)
    if found is None:
        raise UnsupportedTensorError(0, f"must be real and strided, got {values.dtype}")
    return found


def activation_row(x: torch.Tensor, low: float, high: float, near_zero: float) -> tuple[float, ...]:
    """One row of ACTIVATION_COLUMNS.

    Cost: one read of every element, with `torch.get_num_threads()` threads; about a microsecond a call. The GIL is
    released unless there is next to nothing to do.
    """
    threads = torch.get_num_threads()
    row = _C.activation_stats(x, low, high, near_zero, threads)
    return row or _prepared(x, lambda values: _C.activation_stats(values, low, high, near_zero, threads))


def channel_table(
    x: torch.Tensor, dim: int, low: float, high: float, near_zero: float
) -> tuple[tuple[float, ...], bytes]:
    """The row, and CHANNEL_COLUMNS of each index of dimension `dim` as float64 [C, 4] in bytes.

    Cost: as `activation_row`, 32 bytes a channel in the result, and at most 320 a channel on the way.
    """
    threads = torch.get_num_threads()
    found = _C.channel_stats(x, dim, low, high, near_zero, threads)
    if found is None and (x.layout is not torch.strided or x.is_nested):
        raise UnsupportedTensorError(0, "must be dense to have channels. Call to_dense first")
    return found or _prepared(x, lambda values: _C.channel_stats(values, dim, low, high, near_zero, threads))


def magnitude_counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Counts over all elements of all tensors: zeros, NaNs, Infs, then floor(log2 |x|) from -1074 to 1023.

    Cost: one read, twice where there are zeros, subnormals or non-finite elements, from cache; 17 KB a thread.
    """
    return _C.magnitude_counts(tensors, torch.get_num_threads())
