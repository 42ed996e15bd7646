"""Kernels, compiled once a device and launched with as little Python as can be: steps, and looks at activations.
`kernel[grid](...)` binds and inspects every argument at every call, and then calls the compiled kernel. Here all
arguments are integers and need no inspection, so the compiled kernel is called directly."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._device import Device
from ...records import COLUMNS
from ..reference import Limits
from ..slots import DEFAULT_OPTIONS, Slot, StepOptions
from .tables import CHUNK, Plan, Tables, is_dense, locate

_log = logging.getLogger("fastguard")

THREADS = 128
LANES = 4 * THREADS
FOLD_THREADS = 128
FOLD_BLOCK = 4096
ROW_BLOCK = 256
CHUNK_BYTES = 1 << 15  # of an activation that a program reads; more would leave too few programs to hide its waits
FOLD_TILE = 1024
_PROGRAMS_PER_PROCESSOR = 8  # of the scaling grid: as many as fit at 64 registers
_NUM_PARTIALS = 10  # of a program, for the row; see lang/activations.py
_WIDEST = 4096  # columns; a few channels are repeated to fill whole blocks, up to this width
_FEWEST_ROWS = 32  # that they must leave
lock = threading.Lock()  # held around the use of a workspace that is shared


class Launcher:
    """One kernel with its constants on one device: `launcher(grid, *arguments)`, all integers. The current device must
    be the one it is for. `fp_fusion` lets the compiler turn a product and a sum into one instruction with one rounding.
    It is always passed: Triton's default changes in 3.10. `launch` is what launches: at last the compiled kernel, or
    `ordinary`."""

    def __init__(self, function: Any, constants: Mapping[str, Any], *, num_warps: int, fp_fusion: bool) -> None:
        self.function = function
        self.constants = dict(constants)
        self.options = {"num_warps": num_warps, "enable_fp_fusion": fp_fusion}
        self.launch: Callable[..., Any] = self._first

    def __call__(self, grid: int, *arguments: int) -> None:
        self.launch(grid, *arguments)

    def ordinary(self, grid: int, *arguments: int) -> None:
        self.function[(grid,)](*arguments, **self.constants, **self.options)

    def _first(self, grid: int, *arguments: int) -> None:
        try:
            compiled = self.function.warmup(*arguments, grid=(1,), **self.constants, **self.options)
            run, handle, packed = compiled.run, compiled.function, compiled.packed_metadata
            import triton

            driver = triton.runtime.driver.active
            index, stream = driver.get_current_device(), driver.get_current_stream
            constants = tuple(self.constants.values())

            def direct(grid: int, *arguments: int) -> None:
                run(grid, 1, 1, stream(index), handle, packed, None, None, None, *arguments, *constants)

            direct(grid, *arguments)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # another Triton inside; not a CUDA error
            _log.debug("%s: no direct launch (%s: %s)", self.function, type(error).__name__, error)
            self.ordinary(grid, *arguments)
            self.launch = self.ordinary
        else:
            self.launch = direct


def _launcher(
    kernel: str, constants: dict[str, Any], device: torch.device, *, threads: int = THREADS, fp_fusion: bool = False
) -> Launcher:
    """The launcher of `kernel`, "module.function" in `lang`; Triton is imported here for the first time. Fusion is off
    where products must round as torch's do, and the decision must have the same bits everywhere. It is on where
    products only go into sums: a square and its addition are then one instruction, and round once."""
    module, _, function = kernel.partition(".")
    found = getattr(importlib.import_module(f"{__package__}.lang.{module}"), function)
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    num_warps = max(1, threads // getattr(properties, "warp_size", 32))  # 64 on some AMD GPUs
    return Launcher(found, constants, num_warps=num_warps, fp_fusion=fp_fusion)


def _dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float64: tl.float64, torch.float16: tl.float16}.get(dtype, tl.bfloat16)


@functools.cache
def stats_launcher(dtype: torch.dtype, device: torch.device) -> Launcher:
    constants = {"DTYPE": _dtype(dtype), "CHUNK": CHUNK, "LANES": LANES}
    launcher = _launcher("stats.stats_kernel", constants, device, fp_fusion=True)
    if torch.version.hip is None and device.type != "xpu":
        launcher.options["maxnreg"] = 72 if dtype == torch.float64 else 64  # for 7 or 8 programs, without a spill
    return launcher


@functools.cache
def scale_launcher(dtype: torch.dtype, device: torch.device) -> Launcher:
    return _launcher("stats.scale_kernel", {"DTYPE": _dtype(dtype), "CHUNK": CHUNK, "LANES": LANES}, device)


@functools.cache
def finalise_launcher(device: torch.device) -> Launcher:
    constants = {"CHUNK": CHUNK, "BLOCK": FOLD_BLOCK, "ROW_BLOCK": ROW_BLOCK}
    return _launcher("finalise.finalise_kernel", constants, device, threads=FOLD_THREADS)


def activation_tile(dtype: torch.dtype) -> int:
    """Elements that a program of an activation reads at once: four a thread, two of float64; more would spill."""
    return (2 if dtype == torch.float64 else 4) * THREADS


@functools.cache
def activation_launcher(
    dtype: torch.dtype, columns: int, by_column: bool, table: bool, device: torch.device
) -> Launcher:
    """Reads tiles of `columns`, and as many rows as make a whole tile."""
    constants = {"DTYPE": _dtype(dtype), "ROWS": activation_tile(dtype) // columns, "COLS": columns}
    constants |= {"BY_COLUMN": by_column, "TABLE": table}
    return _launcher("activations.activation_kernel", constants, device, fp_fusion=True)


@functools.cache
def fold_launcher(columns: int, device: torch.device) -> Launcher:
    constants = {"BLOCK": FOLD_TILE, "ROWS": FOLD_TILE // columns, "COLS": columns}
    return _launcher("activations.fold_kernel", constants, device, threads=2 * FOLD_THREADS)


@functools.lru_cache(maxsize=64)
def bits_of(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


class Workspace:
    """What the launches on one device need: tables, partial results, compiled kernels. A step is `plan`, `measure`, and
    `scale`. All of them queue work on the current stream and return; a step on another stream than the last one waits,
    on the device, for that one. Not for two threads at once, and not in a CUDA graph, which would go on reading tables
    that are gone."""

    dtype = torch.float64

    def __init__(self, device: torch.device, side: Device | None = None) -> None:
        self._side = Device(device) if side is None else side
        self.device = self._side.device
        self.tables = Tables(self._side)
        self._partials = torch.empty(0, dtype=torch.float64, device=self.device)
        self._stream_id: int | None = None
        self._stream = None

    def plan(self, tensors: Sequence[torch.Tensor], *, writable: bool = False) -> Plan:
        """Tables for `tensors`, which must be on this device, and live until the launches are queued. For `scale` they
        have to be `writable`, unless the plan `is_plain`. Raises UnsupportedTensorError as `locate` does. Cost: 50 ns a
        tensor and no launch if the addresses are those of one of the last steps; else an upload, as `Tables` says. A
        tensor with gaps is copied, and written back by `scale`: one more read and write of it each."""
        with self._side.entered():
            self._follow_stream()
            addresses, sizes, keep, write_back = locate(tensors, self.device, writable=writable)
            plan = self.tables.find(addresses, sizes)
        return plan if write_back is None else Plan(plan.layout, plan.table, keep, write_back)

    def measure(self, plan: Plan, slot: Slot, options: StepOptions = DEFAULT_OPTIONS, *, unscale: float = 1.0) -> None:
        """Statistics of the tensors of `plan`, times `unscale` or as `options` have it, and a decision, into `slot`.
        Cost: one read of every element; one launch a dtype and one more; no sync, no allocation but the first time."""
        step, scale, found_inf, max_norm, skip_nonfinite, unscales_itself, trigger = options
        layout = plan.layout
        with self._side.entered():
            self._follow_stream()
            partials = self._room(len(COLUMNS) * layout.num_chunks)
            read = (layout.chunks, plan.addresses, layout.numels, partials)
            for dtype, first, end in layout.groups:
                stats_launcher(dtype, self.device)(end - first, *read, first, layout.num_chunks)
            tables = (partials, layout.num_chunks, layout.row_chunks, layout.numels, slot.address, step)
            scale_at = 0 if scale is None else scale.data_ptr()
            found_inf_at = 0 if found_inf is None else found_inf.data_ptr()
            bits = (bits_of(unscale), bits_of(max_norm), bits_of(trigger), skip_nonfinite | unscales_itself << 1)
            finalise_launcher(self.device)(1 + layout.num_rows, *tables, scale_at, found_inf_at, *bits)

    def scale(self, plan: Plan, slot: Slot) -> None:
        """x *= factor for the tensors of `plan`, with one rounding; `slot` has the factor. Cost: one launch a dtype;
        one read and one write of every element unless the factor is 1, then nothing. No sync."""
        layout = plan.layout
        most = _PROGRAMS_PER_PROCESSOR * self._side.num_processors
        with self._side.entered():
            self._follow_stream()
            read = (layout.chunks, plan.addresses, layout.numels, slot.factor_address)
            for dtype, first, end in layout.groups:
                scale_launcher(dtype, self.device)(min(end - first, most), *read, first, end)
            for where, copy in plan.write_back:
                where.copy_(copy)

    def measure_activation(
        self, x: torch.Tensor, dim: int | None, limits: Limits, row: torch.Tensor, table: torch.Tensor | None = None
    ) -> None:
        """As `ReferenceBackend.activation_into` of an `x` that is not empty; `row` and `table` are contiguous. Cost:
        two reads of every element, the second one from a cache; two launches; no sync. Memory is allocated for a larger
        tensor than before, and for a copy of a tensor whose elements do not fill a stretch of memory."""
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

    def _room(self, num_words: int) -> int:
        if self._partials.numel() < num_words:
            self._partials = torch.empty(num_words, dtype=torch.float64, device=self.device)
        return self._partials.data_ptr()

    def _follow_stream(self) -> None:
        """Memory that is used on one stream must not be overwritten or given back by work on another."""
        stream_id = self._side.stream_id()
        if stream_id == self._stream_id:
            return
        stream = self._side.stream()
        if self._stream is not None:
            stream.wait_stream(self._stream)
            for tensor in (self._partials, *self.tables.live()):
                tensor.record_stream(stream)
        self._stream_id, self._stream = stream_id, stream


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
    """The division of a dense tensor that is not empty, with the channels of a dimension or without. Adjacent channels,
    and those in runs shorter than 128 bytes, are columns of a matrix, which is made several groups of channels wide
    where that fills its blocks. Longer runs are its rows."""
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


workspace_of = functools.cache(Workspace)  # by device, shared by all calls: hold `lock` around its use
