"""Activations on GPUs: where a tensor's channels lie, how it is shared out among programs, and the two launches.

`activation_row_into` and `channel_table_into` leave their figures in memory on the device and never synchronise: a
monitor lets them gather there and copies them once. The operations of a backend do the same and fetch the figures.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from typing import NamedTuple

import torch

from ..prepare import plain
from .launch import CHUNK_BYTES, Launcher, columns_launcher, fold_launcher, segments_launcher
from .locate import is_dense
from .workspace import Workspace

NUM_PARTIALS = 10
_LEAST_CHUNK_BYTES = CHUNK_BYTES // 8
_PROGRAMS = 1024  # that there should be at least, before chunks get larger
_LEAST_RUN_BYTES = 128  # of a channel, to be read as one piece
_WIDEST = 4096  # columns, of which a few channels are made to fill whole blocks
_lock = threading.Lock()


class Layout(NamedTuple):
    """A tensor as the kernels see it: [outer, channels, inner], in the order of memory."""

    outer: int
    channels: int
    inner: int


class Division(NamedTuple):
    """How a tensor is shared out among the programs of a launch.

    Attributes:
        launcher: of the kernel.
        sizes: its arguments between the address and the partial results.
        num_programs: how many write partial results.
        spread, repeat: entries of a channel lie as [spread, channels, repeat]; no entries without channels.
    """

    launcher: Launcher
    sizes: tuple[int, ...]
    num_programs: int
    spread: int
    repeat: int


def chunk_of(numel: int, itemsize: int) -> int:
    """Elements that a program reads: fewer of a small tensor, so that there are programs enough. A power of two."""
    wanted = 1 << max(0, numel * itemsize // _PROGRAMS - 1).bit_length()
    return min(max(wanted, _LEAST_CHUNK_BYTES), CHUNK_BYTES) // itemsize


def layout_of(x: torch.Tensor, dim: int) -> Layout:
    """Of a dense tensor that is not empty: what lies around the indices of dimension `dim`."""
    if x.dim() == 0:
        return Layout(1, 1, 1)
    outer, inner, passed = 1, 1, x.shape[dim] == 1  # a single channel: all of the tensor is within it
    for stride, axis in sorted(((s, i) for i, s in enumerate(x.stride()) if x.shape[i] != 1), reverse=True):
        if axis == dim:
            passed = True
        elif passed:
            inner *= x.shape[axis]
        else:
            outer *= x.shape[axis]
    return Layout(outer, x.shape[dim], inner)


def width_of(elements: int, columns: int, itemsize: int) -> int:
    """Columns for a matrix whose rows hold whole groups of `elements`: rows begin at multiples of 16 bytes, and whole
    blocks of `columns` are filled unless that takes too many groups."""
    aligned = math.lcm(elements, 16 // itemsize)
    filled = math.lcm(elements, columns)
    return filled if filled <= _WIDEST else aligned


def divide(x: torch.Tensor, layout: Layout | None, device: torch.device) -> Division:
    """The division of a dense tensor that is not empty; it depends on sizes, dtype and alignment, on nothing else."""
    numel, itemsize = x.numel(), x.itemsize
    outer, channels, inner = (1, 1, numel) if layout is None else layout
    chunk = chunk_of(numel, itemsize)
    aligned = x.data_ptr() % 16 == 0
    if layout is not None and channels > 1 and inner * itemsize < _LEAST_RUN_BYTES:
        launcher = columns_launcher(x.dtype, aligned, device)
        columns = launcher.constants["COLS"]
        width = width_of(channels * inner, columns, itemsize)
        rows = chunk // columns
        down = -(-numel // (width * rows))
        sizes = (numel, width, rows)
        return Division(launcher, sizes, down * -(-width // columns), down * (width // (channels * inner)), inner)
    segments = outer * channels
    run_bytes = inner * itemsize
    side_by_side = 1 if layout is None or run_bytes >= 2048 else 4 if run_bytes >= 512 else 16
    aligned = aligned and (layout is None or run_bytes % 16 == 0)
    launcher = segments_launcher(x.dtype, side_by_side, aligned, layout is not None, device)
    parts = -(-inner // chunk)
    each = max(1, chunk // inner // side_by_side) * side_by_side if parts == 1 else 1
    sizes = (segments, inner, each, chunk)
    return Division(launcher, sizes, -(-segments // each) * parts, outer, parts)


@functools.lru_cache(maxsize=256)
def threshold_bits(low: float, high: float, near_zero: float, dtype: torch.dtype) -> tuple[int, int, int]:
    """Float64 bits of thresholds, rounded for float32 comparisons in the direction that changes none of them."""
    if dtype != torch.float64:
        low, high, near_zero = _round_up(low), -_round_up(-high), _round_up(near_zero)
    return _bits(low), _bits(high), _bits(near_zero)


def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _round_up(value: float) -> float:
    """The smallest float32 that is not below `value`."""
    nearest = ctypes.c_float(value).value
    if nearest >= value:
        return nearest
    pattern = struct.unpack("<i", struct.pack("<f", nearest))[0]
    return struct.unpack("<f", struct.pack("<i", 1 if nearest == 0.0 else pattern + (1 if nearest > 0.0 else -1)))[0]


class ActivationWorkspace(Workspace):
    """What the launches for activations on one device need. Not for two threads at once."""

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
            x: real, strided, on this device.
            dim: of the channels, counted from the front; None for the row only.
            low, high, near_zero: as `fastguard.kernels.activations.thresholds` gives them.
            row: float64 [10], contiguous, on this device; ACTIVATION_COLUMNS.
            table: float64 [channels, 4], contiguous, on this device; CHANNEL_COLUMNS.

        Cost: one read of every element; two launches; no sync. Memory is allocated for larger tensors than before, and
        for a copy of a tensor with gaps.
        """
        if x.numel() == 0:
            return _fill_empty(row, table)
        with self._side.entered():
            self._follow_stream()
            if not is_dense(x):
                x = x.contiguous()
            layout = None if dim is None else layout_of(x, dim)
            made = divide(x, layout, self.device)
            channels = 0 if layout is None else layout.channels
            num_entries = made.spread * channels * made.repeat
            partials = self._room(NUM_PARTIALS * made.num_programs + 2 * num_entries)
            entries = partials + 8 * NUM_PARTIALS * made.num_programs
            limits = threshold_bits(low, high, near_zero, x.dtype)
            made.launcher(
                made.num_programs, x.data_ptr(), *made.sizes, partials, made.num_programs, entries, *limits
            )
            fold = fold_launcher(channels, self.device)
            out_table = 0 if table is None else table.data_ptr()
            fold(
                1 + -(-channels // fold.constants["COLS"]),
                partials,
                made.num_programs,
                x.numel(),
                row.data_ptr(),
                entries,
                made.spread,
                channels,
                made.repeat,
                out_table,
            )


def _fill_empty(row: torch.Tensor, table: torch.Tensor | None) -> None:
    row.zero_()
    row[3].fill_(math.inf)
    row[4].fill_(-math.inf)
    if table is not None:
        table.zero_()


@functools.cache
def _workspace(device: torch.device) -> ActivationWorkspace:
    return ActivationWorkspace(device)


def activation_row_into(x: torch.Tensor, low: float, high: float, near_zero: float, row: torch.Tensor) -> None:
    """The row of `x` into `row`; see `ActivationWorkspace.measure_activation`. Does not synchronise."""
    with _lock:
        _workspace(x.device).measure_activation(plain(x, 0), None, low, high, near_zero, row)


def channel_table_into(
    x: torch.Tensor, dim: int, low: float, high: float, near_zero: float, row: torch.Tensor, table: torch.Tensor
) -> None:
    """The row of `x` and the table of the channels of `dim` into `row` and `table`; as above."""
    with _lock:
        _workspace(x.device).measure_activation(plain(x, 0), dim, low, high, near_zero, row, table)


def activation_row(x: torch.Tensor, low: float, high: float, near_zero: float) -> tuple[float, ...]:
    """One row of ACTIVATION_COLUMNS. Synchronises once, at the end.

    Cost: one read of every element; two launches and a copy of 80 bytes to the host.
    """
    row = torch.empty(10, dtype=torch.float64, device=x.device)
    activation_row_into(x, low, high, near_zero, row)
    return tuple(row.tolist())


def channel_table(
    x: torch.Tensor, dim: int, low: float, high: float, near_zero: float
) -> tuple[tuple[float, ...], bytes]:
    """The row, and CHANNEL_COLUMNS of each index of dimension `dim` as float64 [C, 4] in bytes. Synchronises once.

    Cost: one read of every element; two launches and a copy of 80 bytes and 32 a channel to the host.
    """
    channels = x.shape[dim] if x.dim() else 1
    figures = torch.empty(10 + 4 * channels, dtype=torch.float64, device=x.device)
    channel_table_into(x, dim, low, high, near_zero, figures[:10], figures[10:])
    host = figures.cpu()
    return tuple(host[:10].tolist()), ctypes.string_at(host.data_ptr() + 80, 32 * channels)
