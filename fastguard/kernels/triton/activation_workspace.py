"""The launches for activations on one device: figures go to memory there, and nothing synchronises."""

from __future__ import annotations

import math

import torch

from ...errors import UnsupportedTensorError
from ...records.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS
from .activation_layout import divide, threshold_bits
from .launch import fold_launcher
from .locate import is_dense
from .workspace import Workspace

_NUM_PARTIALS = 10  # of a program, for the row; see lang/activations.py


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
            return _fill_empty(row, table)
        with self._side.entered():
            self._follow_stream()
            self._launch(x if is_dense(x) else x.contiguous(), dim, (low, high, near_zero), row, table)

    def _launch(
        self,
        x: torch.Tensor,
        dim: int | None,
        limits: tuple[float, float, float],
        row: torch.Tensor,
        table: torch.Tensor | None,
    ) -> None:
        made = divide(x, dim, self.device)
        num_words = _NUM_PARTIALS * made.num_programs
        partials = self._room(num_words + 2 * made.spread * made.channels * made.repeat)
        entries = partials + 8 * num_words
        made.launcher(
            made.num_programs,
            x.data_ptr(),
            *made.sizes,
            partials,
            made.num_programs,
            entries,
            *threshold_bits(*limits, x.dtype),
        )
        fold = fold_launcher(made.channels, self.device)
        fold(
            1 + -(-made.channels // fold.constants["COLS"]),
            partials,
            made.num_programs,
            x.numel(),
            row.data_ptr(),
            entries,
            made.spread,
            made.channels,
            made.repeat,
            0 if table is None else table.data_ptr(),
        )

    def _require(self, name: str, out: torch.Tensor | None, numel: int) -> None:
        if out is None:
            raise ValueError(f"`{name}` must be a tensor when channels are asked for, got None")
        if out.dtype != torch.float64 or out.numel() != numel or out.device != self.device or not out.is_contiguous():
            raise ValueError(
                f"`{name}` must be float64, contiguous, of {numel} elements on {self.device}, got {out.dtype} of shape "
                f"{tuple(out.shape)} and strides {out.stride()} on {out.device}"
            )


def _fill_empty(row: torch.Tensor, table: torch.Tensor | None) -> None:
    row.zero_()
    row.view(-1)[3].fill_(math.inf)
    row.view(-1)[4].fill_(-math.inf)
    if table is not None:
        table.zero_()
