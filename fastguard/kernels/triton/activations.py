"""Activations on GPUs. See `fastguard.kernels.activations` for the operations.

`activation_into` leaves its figures in memory on the device and never synchronises: a monitor lets them gather there
and copies them once. `activation` does the same and fetches the figures.
"""

from __future__ import annotations

import functools
import threading

import torch

from ...errors import UnsupportedTensorError
from ...records.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS
from ..backend import Limits, Row
from ..tensors import float64_bytes, plain
from .activation_workspace import ActivationWorkspace
from .locate import accepts

_ROW = len(ACTIVATION_COLUMNS)
_CHANNEL = len(CHANNEL_COLUMNS)
_lock = threading.Lock()


@functools.cache
def _workspace(device: torch.device) -> ActivationWorkspace:
    return ActivationWorkspace(device)


def activation_into(
    x: torch.Tensor, dim: int | None, limits: Limits, row: torch.Tensor, table: torch.Tensor | None
) -> None:
    """Writes the figures of `activation` to `row` and `table`, float64 on the same device, without a sync.

    Arguments, errors and cost: `ActivationWorkspace.measure_activation`.
    """
    values = plain(x, 0)
    if not accepts(values.device):
        raise UnsupportedTensorError(0, f'must be on a GPU for backend "triton", got {values.device}')
    with _lock:
        _workspace(values.device).measure_activation(values, dim, *limits, row, table)


def activation(x: torch.Tensor, dim: int | None, limits: Limits) -> tuple[Row, bytes | None]:
    """One row of ACTIVATION_COLUMNS and, with a `dim`, CHANNEL_COLUMNS of each of its indices. Synchronises once.

    Cost: one read of every element; two launches and a copy of 80 bytes, and 32 a channel, to the host. A tensor whose
    elements do not fill a stretch of memory is copied first. Channels are quickest where they lie side by side (`dim`
    -1, channels_last) or in runs of at least 128 bytes (`dim` 1 of [N, C, H, W]).
    """
    num_channels = 0 if dim is None else x.shape[dim] if x.dim() else 1
    figures = torch.empty(_ROW + _CHANNEL * num_channels, dtype=torch.float64, device=x.device)
    activation_into(x, dim, limits, figures[:_ROW], figures[_ROW:])
    host = figures.cpu()
    return tuple(host[:_ROW].tolist()), None if dim is None else float64_bytes(host[_ROW:])
