"""How one tensor of activations is shared out among the programs of a launch."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .launch import CHUNK_BYTES, Launcher, columns_launcher, segments_launcher

_LEAST_CHUNK_BYTES = CHUNK_BYTES // 8
_PROGRAMS = 1024  # that there should be at least, before chunks get larger
_LEAST_RUN_BYTES = 128  # of a channel, to be read as one piece
_WIDEST = 4096  # columns, of which a few channels are made to fill whole blocks
_FEWEST_ROWS = 32  # that they must leave


class ChannelLayout(NamedTuple):
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
        spread, channels, repeat: how the entries of channels lie; no channels, no entries.
    """

    launcher: Launcher
    sizes: tuple[int, ...]
    num_programs: int
    spread: int
    channels: int
    repeat: int


def chunk_of(numel: int, itemsize: int) -> int:
    """Elements that a program reads: fewer of a small tensor, so that there are programs enough. A power of two."""
    wanted = 1 << max(0, numel * itemsize // _PROGRAMS - 1).bit_length()
    return min(max(wanted, _LEAST_CHUNK_BYTES), CHUNK_BYTES) // itemsize


def layout_of(shape: Sequence[int], strides: Sequence[int], dim: int) -> ChannelLayout:
    """Of a dense tensor that is not empty: what lies around the indices of dimension `dim`."""
    if not shape:
        return ChannelLayout(1, 1, 1)
    outer, inner, passed = 1, 1, shape[dim] == 1  # a single channel: all of the tensor is within it
    for _, axis in sorted(((stride, i) for i, stride in enumerate(strides) if shape[i] != 1), reverse=True):
        if axis == dim:
            passed = True
        elif passed:
            inner *= shape[axis]
        else:
            outer *= shape[axis]
    return ChannelLayout(outer, shape[dim], inner)


def width_of(numel: int, elements: int, columns: int, itemsize: int) -> int:
    """Columns for a matrix of `numel` whose rows hold whole groups of `elements`: rows begin at multiples of 16 bytes,
    and whole blocks of `columns` are filled unless that takes too many groups or leaves too few rows."""
    aligned = math.lcm(elements, 16 // itemsize)
    filled = math.lcm(elements, columns)
    return filled if filled <= min(_WIDEST, numel // _FEWEST_ROWS) else aligned


def divide(x: torch.Tensor, dim: int | None, device: torch.device) -> Division:
    """The division of a dense tensor that is not empty, with the channels of a dimension or without.

    It depends on sizes, strides, dtype and alignment, on nothing else; the last ones are remembered.
    """
    return _divide(x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0, dim, device)


@functools.lru_cache(maxsize=1024)
def _divide(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    aligned: bool,
    dim: int | None,
    device: torch.device,
) -> Division:
    layout = ChannelLayout(1, 1, math.prod(shape)) if dim is None else layout_of(shape, strides, dim)
    if dim is not None and layout.channels > 1 and layout.inner * dtype.itemsize < _LEAST_RUN_BYTES:
        return _divide_columns(layout, dtype, aligned, device)
    return _divide_segments(layout, dtype, aligned, dim is not None, device)


def _divide_columns(layout: ChannelLayout, dtype: torch.dtype, aligned: bool, device: torch.device) -> Division:
    launcher = columns_launcher(dtype, aligned, device)
    columns = launcher.constants["COLS"]
    numel, group = math.prod(layout), layout.channels * layout.inner
    width = width_of(numel, group, columns, dtype.itemsize)
    rows = chunk_of(numel, dtype.itemsize) // columns
    down = -(-numel // (width * rows))
    sizes = (numel, width, rows)
    across = -(-width // columns)
    return Division(launcher, sizes, down * across, down * (width // group), layout.channels, layout.inner)


def _divide_segments(
    layout: ChannelLayout, dtype: torch.dtype, aligned: bool, table: bool, device: torch.device
) -> Division:
    outer, channels, inner = layout
    run_bytes = inner * dtype.itemsize
    side_by_side = 1 if not table or run_bytes >= 2048 else 4 if run_bytes >= 512 else 16
    aligned = aligned and (not table or run_bytes % 16 == 0)
    launcher = segments_launcher(dtype, side_by_side, aligned, table, device)
    chunk = chunk_of(math.prod(layout), dtype.itemsize)
    parts = -(-inner // chunk)
    each = max(1, chunk // inner // side_by_side) * side_by_side if parts == 1 else 1
    num_segments = outer * channels
    programs = -(-num_segments // each) * parts
    return Division(launcher, (num_segments, inner, each, chunk), programs, outer, channels if table else 0, parts)


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
