"""Activations on GPUs. See `fastguard.kernels.activations` for the operations.

`activation_into` leaves its figures in memory on the device and never synchronises: a monitor lets them gather there
and copies them once. `activation` does the same and fetches the figures.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...errors import UnsupportedTensorError
from ...records.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS
from ..backend import Limits, Row
from ..tensors import float64_bytes, plain
from .launch import CHUNK_BYTES, Launcher, Workspace, activation_launcher, activation_tile, fold_launcher
from .tables import accepts, is_dense

_NUM_PARTIALS = 10  # of a program, for the row; see lang/activations.py
_ROW = len(ACTIVATION_COLUMNS)
_CHANNEL = len(CHANNEL_COLUMNS)
_WIDEST = 4096  # columns; a few channels are repeated to fill whole blocks, up to this width
_FEWEST_ROWS = 32  # that they must leave
lock = threading.Lock()


class Division(NamedTuple):
    """How a tensor is shared out among the programs of a launch."""

    launcher: Launcher
    sizes: tuple[int, int, int, int]  # elements, width of the matrix, rows and columns of a block
    num_programs: int  # that write partial results
    spread: int  # with the next two the shape of the channels' entries
    channels: int
    repeat: int


def layout_of(shape: Sequence[int], strides: Sequence[int], dim: int) -> tuple[int, int, int]:
    """A dense tensor that is not empty as the kernels see it: [outer, channels, inner], in the order of memory."""
    if not shape:
        return 1, 1, 1
    outer, inner, passed = 1, 1, shape[dim] == 1  # a single channel: all of the tensor is within it
    for _, axis in sorted(((stride, i) for i, stride in enumerate(strides) if shape[i] != 1), reverse=True):
        if axis == dim:
            passed = True
        elif passed:
            inner *= shape[axis]
        else:
            outer *= shape[axis]
    return outer, shape[dim], inner


@functools.lru_cache(maxsize=1024)
def divide(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, dim: int | None, device: torch.device
) -> Division:
    """The division of a dense tensor that is not empty, with the channels of a dimension or without.

    Adjacent channels, and those in runs shorter than 128 bytes, are columns of a matrix, which is made several
    groups of channels wide where that fills its blocks. Longer runs are its rows.
    """
    numel, size = math.prod(shape), dtype.itemsize
    outer, channels, inner = (1, 1, numel) if dim is None else layout_of(shape, strides, dim)
    chunk, run_bytes = CHUNK_BYTES // size, inner * size
    if channels > 1 and run_bytes < 128:
        columns, group = 512 // size, channels * inner
        filled = math.lcm(group, columns)
        width = filled if filled <= min(_WIDEST, numel // _FEWEST_ROWS) else group
        rows, down, across = chunk // columns, -(-numel // (width * (chunk // columns))), -(-width // columns)
        launcher = activation_launcher(dtype, columns, True, True, device)
        sizes = (numel, width, rows, columns)
        return Division(launcher, sizes, down * across, down * (width // group), channels, inner)
    side_by_side = 1 if dim is None or run_bytes >= 2048 else 4 if run_bytes >= 512 else 16
    launcher = activation_launcher(dtype, activation_tile(dtype) // side_by_side, False, dim is not None, device)
    across = -(-inner // chunk)
    rows = max(1, chunk // inner // side_by_side) * side_by_side if across == 1 else 1
    programs = -(-outer * channels // rows) * across
    return Division(launcher, (numel, inner, rows, chunk), programs, outer, 0 if dim is None else channels, across)


@functools.lru_cache(maxsize=64)
def _limit_bits(low: float, high: float, near_zero: float, is_double: bool) -> tuple[int, ...]:
    """The bits of the limits as the kernel takes them: rounded to float32 such that no float32 compares differently."""
    limits = torch.tensor([low, high, near_zero], dtype=torch.float64, device="cpu")
    if not is_double:
        narrow = limits.float()
        beyond = torch.tensor([math.inf, -math.inf, math.inf], device="cpu")
        is_short = torch.stack([narrow[0] < limits[0], narrow[1] > limits[1], narrow[2] < limits[2]])
        limits = torch.where(is_short, torch.nextafter(narrow, beyond), narrow).double()
    return tuple(limits.view(torch.int64).tolist())


class ActivationWorkspace(Workspace):
    """What the launches for activations on one device need. As a `Workspace`, not for two threads at once."""

    def measure_activation(
        self, x: torch.Tensor, dim: int | None, limits: Limits, row: torch.Tensor, table: torch.Tensor | None = None
    ) -> None:
        """As `Backend.activation_into`; `row` and `table`, which may be flat, are contiguous.

        Cost: two reads of every element, the second one from a cache; two launches; no sync. Memory is allocated for a
        larger tensor than before, and for a copy of a tensor whose elements do not fill a stretch of memory.
        """
        if x.device != self.device:
            raise UnsupportedTensorError(0, f"must be on {self.device}, got {x.device}")
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
            made = divide(x.shape, x.stride(), x.dtype, dim, self.device)
            num_words = _NUM_PARTIALS * made.num_programs
            partials = self._room(num_words + 2 * made.spread * made.channels * made.repeat)
            entries, bits = partials + 8 * num_words, _limit_bits(*limits, x.dtype is torch.float64)
            made.launcher(made.num_programs, x.data_ptr(), *made.sizes, partials, made.num_programs, entries, *bits)
            columns = 1 if made.channels == 1 else 4 if 1 < made.channels <= 8 else 32
            to = (entries, made.spread, made.channels, made.repeat, 0 if table is None else table.data_ptr())
            fold = fold_launcher(columns, self.device)
            fold(1 + -(-made.channels // columns), partials, made.num_programs, x.numel(), row.data_ptr(), *to)


@functools.cache
def workspace_of(device: torch.device) -> ActivationWorkspace:
    """The workspace that all calls on a device share; hold `lock` around its use."""
    return ActivationWorkspace(device)


def activation_into(
    x: torch.Tensor, dim: int | None, limits: Limits, row: torch.Tensor, table: torch.Tensor | None
) -> None:
    """As `ActivationWorkspace.measure_activation`."""
    if not accepts(x.device):
        raise UnsupportedTensorError(0, f'must be on a GPU for backend "triton", got {x.device}')
    with lock:
        workspace_of(x.device).measure_activation(x, dim, limits, row, table)


def activation(x: torch.Tensor, dim: int | None, limits: Limits) -> tuple[Row, bytes | None]:
    """Cost: two reads of every element; two launches and a copy of 80 bytes, and 32 a channel, to the host: one sync. A
    tensor whose elements do not fill a stretch of memory is copied first. Channels are fastest where they are
    adjacent (`dim` -1, channels_last) or in runs of at least 128 bytes (`dim` 1 of [N, C, H, W])."""
    x = plain(x, 0)
    num_channels = 0 if dim is None else x.shape[dim] if x.dim() else 1
    figures = torch.empty(_ROW + _CHANNEL * num_channels, dtype=torch.float64, device=x.device)
    activation_into(x, dim, limits, figures[:_ROW], figures[_ROW:])
    host = figures.cpu()
    return tuple(host[:_ROW].tolist()), None if dim is None else float64_bytes(host[_ROW:])
