"""Activations on GPUs. See `fastguard.kernels.activations` for the operations.

`activation_into` leaves its figures in memory on the device and never synchronises: a monitor lets them gather there
and copies them once. `activation` does the same and fetches the figures.
"""

from __future__ import annotations

import functools
import math
import threading

import torch

from ...errors import UnsupportedTensorError
from ...records.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS
from ..backend import Limits, Row
from ..tensors import float64_bytes, plain
from .activation_layout import divide, threshold_bits
from .launch import fold_launcher
from .locate import accepts, is_dense
from .workspace import Workspace

_NUM_PARTIALS = 10  # of a program, for the row; see lang/activations.py
_ROW = len(ACTIVATION_COLUMNS)
_CHANNEL = len(CHANNEL_COLUMNS)
_lock = threading.Lock()


class ActivationWorkspace(Workspace):
    """What the launches for activations on one device need. As a `Workspace`, not for two threads at once."""

    def measure_activation(
        self,
        x: torch.Tensor,
        dim: int | None,
        low: float,
        high: float,
        near_zero: float,
        row: torch.Tensor,
        table: torch.Tensor | None = None,
    ) -> None:
        """The row of `x` into `row` and, with a `dim`, the table of its channels into `table`, on the current stream.

        Args:
            x: float16, bfloat16, float32 or float64, strided, on this device.
            dim: of the channels, counted from the front; None for the row only.
            low, high, near_zero: as `fastguard.kernels.activations.thresholds` gives them.
            row: float64 [10], contiguous, on this device; gets ACTIVATION_COLUMNS.
            table: float64 [channels, 4] or flat, contiguous, on this device; gets CHANNEL_COLUMNS. Needed with a `dim`.

        Raises:
            UnsupportedTensorError: `x` is on another device.
            ValueError: `row` or `table` cannot take the figures.

        Cost: one read of every element; two launches; no sync. Memory is allocated for a larger tensor than before, and
        for a copy of a tensor whose elements do not fill a stretch of memory.
        """
        if x.device != self.device:
            raise UnsupportedTensorError(0, f"must be on {self.device}, got {x.device}")
        self._require("row", row, len(ACTIVATION_COLUMNS))
        if dim is not None:
            num_channels = x.shape[dim] if x.dim() else 1
            self._require("table", table, len(CHANNEL_COLUMNS) * num_channels)
        if x.numel() == 0:
            row.zero_()
            row.view(-1)[3].fill_(math.inf)
            row.view(-1)[4].fill_(-math.inf)
            if table is not None:
                table.zero_()
            return
        with self._side.entered():
            self._follow_stream()
            x = x if is_dense(x) else x.contiguous()
            made = divide(x, dim, self.device)
            num_words = _NUM_PARTIALS * made.num_programs
            partials = self._room(num_words + 2 * made.spread * made.channels * made.repeat)
            entries, bits = partials + 8 * num_words, threshold_bits(low, high, near_zero, x.dtype)
            made.launcher(made.num_programs, x.data_ptr(), *made.sizes, partials, made.num_programs, entries, *bits)
            fold = fold_launcher(made.channels, self.device)
            to = (
                row.data_ptr(),
                entries,
                made.spread,
                made.channels,
                made.repeat,
                0 if table is None else table.data_ptr(),
            )
            fold(1 + -(-made.channels // fold.constants["COLS"]), partials, made.num_programs, x.numel(), *to)

    def _require(self, name: str, out: torch.Tensor | None, numel: int) -> None:
        if out is None:
            raise ValueError(f"`{name}` must be a tensor when channels are asked for, got None")
        if out.dtype != torch.float64 or out.numel() != numel or out.device != self.device or not out.is_contiguous():
            raise ValueError(
                f"`{name}` must be float64, contiguous, of {numel} elements on {self.device}, got {out.dtype} of shape "
                f"{tuple(out.shape)} and strides {out.stride()} on {out.device}"
            )


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
    """Cost: one read of every element; two launches and a copy of 80 bytes, and 32 a channel, to the host: one sync. A
    tensor whose elements do not fill a stretch of memory is copied first. Channels are quickest where they lie side by
    side (`dim` -1, channels_last) or in runs of at least 128 bytes (`dim` 1 of [N, C, H, W])."""
    num_channels = 0 if dim is None else x.shape[dim] if x.dim() else 1
    figures = torch.empty(_ROW + _CHANNEL * num_channels, dtype=torch.float64, device=x.device)
    activation_into(x, dim, limits, figures[:_ROW], figures[_ROW:])
    host = figures.cpu()
    return tuple(host[:_ROW].tolist()), None if dim is None else float64_bytes(host[_ROW:])
