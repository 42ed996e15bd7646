"""Activations on GPUs. See `fastguard.kernels.activations` for the operations.

`activation_row_into` and `channel_table_into` leave their figures in memory on the device and never synchronise: a
monitor lets them gather there and copies them once. The operations of a backend do the same and fetch the figures.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch

from ...errors import UnsupportedTensorError
from ...stats.magnitudes import LOWEST_EXPONENT, NUM_COUNTS
from ...stats.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS
from ..tensors import float64_bytes, plain
from .activation_workspace import ActivationWorkspace
from .locate import accepts, device_for

_ROW = len(ACTIVATION_COLUMNS)
_CHANNEL = len(CHANNEL_COLUMNS)
_lock = threading.Lock()


@functools.cache
def _workspace(device: torch.device) -> ActivationWorkspace:
    return ActivationWorkspace(device)


def _served(x: torch.Tensor) -> torch.Tensor:
    """`x` as memory of a dtype that the kernels read, on a device that they can run on."""
    values = plain(x, 0)
    if not accepts(values.device):
        raise UnsupportedTensorError(0, f'must be on a GPU for backend "triton", got {values.device}')
    return values


def activation_row_into(x: torch.Tensor, low: float, high: float, near_zero: float, row: torch.Tensor) -> None:
    """The row of `x` into `row`, float64 [10] on the same device, on the current stream. Does not synchronise.

    Arguments, errors and cost: `ActivationWorkspace.measure_activation`.
    """
    values = _served(x)
    with _lock:
        _workspace(values.device).measure_activation(values, None, low, high, near_zero, row)


def channel_table_into(
    x: torch.Tensor, dim: int, low: float, high: float, near_zero: float, row: torch.Tensor, table: torch.Tensor
) -> None:
    """The same, and the table of the channels of `dim` into `table`, float64 [channels, 4] on the same device."""
    values = _served(x)
    with _lock:
        _workspace(values.device).measure_activation(values, dim, low, high, near_zero, row, table)


def activation_row(x: torch.Tensor, low: float, high: float, near_zero: float) -> tuple[float, ...]:
    """One row of ACTIVATION_COLUMNS. Synchronises once, at the end.

    Cost: one read of every element; two launches and a copy of 80 bytes to the host.
    """
    row = torch.empty(_ROW, dtype=torch.float64, device=x.device)
    activation_row_into(x, low, high, near_zero, row)
    return tuple(row.tolist())


def channel_table(
    x: torch.Tensor, dim: int, low: float, high: float, near_zero: float
) -> tuple[tuple[float, ...], bytes]:
    """The row, and CHANNEL_COLUMNS of each index of dimension `dim` as float64 [C, 4] in bytes. Synchronises once.

    Cost: one read of every element; two launches and a copy of 80 bytes, and 32 a channel, to the host. A tensor whose
    elements do not fill a stretch of memory is copied first. Quickest where the channels lie side by side (`dim` -1,
    channels_last) or in runs of at least 128 bytes (`dim` 1 of [N, C, H, W]).
    """
    num_channels = x.shape[dim] if x.dim() else 1
    figures = torch.empty(_ROW + _CHANNEL * num_channels, dtype=torch.float64, device=x.device)
    channel_table_into(x, dim, low, high, near_zero, figures[:_ROW], figures[_ROW:])
    host = figures.cpu()
    return tuple(host[:_ROW].tolist()), float64_bytes(host[_ROW:])


def magnitude_counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Counts over all elements of all tensors: zeros, NaNs, Infs, then floor(log2 |x|) from -1074 to 1023.

    Cost: one read of every element, at several times the cost of a plain read; two launches a dtype; one sync a dtype.
    """
    counts = [0] * NUM_COUNTS
    if not tensors:
        return counts
    with _lock:
        found = _workspace(device_for(tensors)).count_magnitudes(tensors)
    for dtype, bins in found:
        exponents = 2098 if dtype == torch.float64 else 277
        first = 3 + (0 if dtype == torch.float64 else -149 - LOWEST_EXPONENT)
        *by_exponent, zeros, infs, nans = bins[: exponents + 3].tolist()
        for i, count in enumerate([zeros, nans, infs]):
            counts[i] += count
        for i, count in enumerate(by_exponent, first):
            counts[i] += count
    return counts
