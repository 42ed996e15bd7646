"""Where tensors are, and the kernels that read them: compiled once a device, launched with as little Python as can be.
The tables that the kernels read stay on the device from step to step. What depends on sizes and dtypes (how the rows
are cut into chunks) is one table, what depends on addresses another: gradients that come back at other addresses cost
an upload of 8 bytes a tensor, and gradients that come back where they were cost nothing.

`kernel[grid](...)` binds and inspects every argument at every call, and then calls the compiled kernel. Here all
arguments are integers and need no inspection, so the compiled kernel is called directly."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ... import _env
from ..._device import Device
from ...errors import UnsupportedTensorError
from ...records import COLUMNS
from ..cpu import extension
from ..reference import Limits
from ..slots import DEFAULT_OPTIONS, Slot, StepOptions
from ..tensors import DTYPES, OVERLAP, lacks_memory, may_overlap, plain

_log = logging.getLogger("fastguard")

CHUNK = 32768  # elements a program of the statistics; the finest part of a sum that another tensor cannot change
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_Copies = list[tuple[torch.Tensor, torch.Tensor]]  # where to, and the copy

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


class Layout:
    """How a list of sizes is cut into chunks; see lang/stats.py for the tables. Rows of one dtype have chunks that
    follow each other, so that one launch serves them. No chunk holds elements of two rows, so a row comes out the same
    whatever else is in the list."""

    def __init__(self, sizes: bytes, upload: Callable[[bytes], torch.Tensor]) -> None:
        packed = torch.zeros(0, dtype=torch.int64, device="cpu")
        if sizes:
            packed = torch.frombuffer(bytearray(sizes), dtype=torch.int64)
        numels, codes = packed >> 2, packed & 3
        counts = (numels + (CHUNK - 1)) // CHUNK
        order = torch.argsort(codes, stable=True)
        ends = counts[order].cumsum(0)
        begins = torch.empty_like(counts)
        begins[order] = ends - counts[order]
        rows = order.repeat_interleave(counts[order])
        within = torch.arange(len(rows), device="cpu") - begins[rows]
        self.num_rows, self.num_chunks = len(packed), len(rows)
        groups, first = [], 0
        for code, dtype in enumerate(DTYPES):
            count = int(counts[codes == code].sum())
            if count:
                groups.append((dtype, first, first + count))
            first += count
        self.groups = tuple(groups)  # dtype, first chunk, end
        words = torch.cat([rows | within << 32, begins | counts << 32, numels])
        data = ctypes.string_at(words.data_ptr(), 8 * len(words)) if len(words) else b""
        self.table = upload(data)
        self.chunks = self.table.data_ptr()
        self.row_chunks = self.chunks + 8 * self.num_chunks
        self.numels = self.row_chunks + 8 * self.num_rows


class Plan:
    """Tables for one list of tensors: what `Workspace.measure` and `Workspace.scale` work from."""

    def __init__(
        self, layout: Layout, table: torch.Tensor, keep: Sequence[torch.Tensor] = (), write_back: _Copies | None = None
    ) -> None:
        self.layout, self.table, self._keep = layout, table, keep
        self.addresses = table.data_ptr()
        # Plain: every tensor is read where it is; the same plan then serves for scaling.
        self.is_plain, self.write_back = write_back is None, write_back or []
        self.needs_copies: bool | None = None  # whether a fused optimizer needs copies of the gradients


class Tables:
    """The plans of the last lists of tensors, and their layouts. Cost of a hit: nothing is uploaded or allocated. Of a
    miss: one upload of 8 bytes a tensor; where the sizes are new, one more of 16 bytes a tensor and 8 a chunk."""

    def __init__(self, device: Device, size: int = 16) -> None:
        self._device = device
        self._size = size
        self._pieces: list[tuple[torch.Tensor, Any]] = []
        self._plans: OrderedDict[tuple[bytes, bytes], Plan] = OrderedDict()
        self._layouts: OrderedDict[bytes, Layout] = OrderedDict()
        self._last: tuple[bytes, bytes] | None = None
        self._last_plan: Plan | None = None
        self.num_misses = 0

    def find(self, addresses: bytes, sizes: bytes) -> Plan:
        """The plan for tensors at `addresses` (int64) of `sizes` (int64: real elements << 2 | number of the dtype)."""
        key = (addresses, sizes)
        if key == self._last and self._last_plan is not None:
            return self._last_plan  # comparing the bytes is quicker than hashing them
        plan = self._plans.get(key)
        if plan is None:
            self.num_misses += 1
            layout = self._layouts.get(sizes)
            if layout is None:
                layout = self._layouts[sizes] = Layout(sizes, self.upload)
            self._layouts.move_to_end(sizes)
            plan = self._plans[key] = Plan(layout, self.upload(addresses))
            for cache in (self._plans, self._layouts):
                while len(cache) > self._size:
                    cache.popitem(last=False)
        self._plans.move_to_end(key)
        self._last, self._last_plan = key, plan
        return plan

    def upload(self, data: bytes) -> torch.Tensor:
        """A new int64 tensor on the device with `data`, a multiple of 8 bytes. Does not wait for anything: a piece of
        pinned memory is written again only once its copy has been done."""
        num_words = len(data) // 8
        out = torch.empty(num_words, dtype=torch.int64, device=self._device.device)
        for i, (memory, event) in enumerate(self._pieces):
            if memory.numel() >= num_words and (event is None or event.query()):
                del self._pieces[i]
                break
        else:  # room for a few more tensors next time; a page is the least that gets pinned anyway
            memory, event = self._device.pinned(max(512, num_words + num_words // 4)), self._device.event()
        ctypes.memmove(memory.data_ptr(), data, len(data))
        out.copy_(memory[:num_words], non_blocking=True)
        if event is not None:
            event.record()
        self._pieces.append((memory, event))
        return out

    def live(self) -> list[torch.Tensor]:
        plans = list(self._plans.values())
        owners: list[Any] = [*plans, *(plan.layout for plan in plans), *self._layouts.values()]
        return [owner.table for owner in owners]


def accepts(device: torch.device) -> bool:
    """Whether the kernels, compiled or interpreted, read tensors on `device`."""
    return device.type == "cpu" if _env.triton_interpreter() else device.type in ("cuda", "xpu")


def device_for(tensors: Sequence[Any]) -> torch.device:
    """The device of the first of `tensors`, or, if the kernels are not for that, one on which others are refused."""
    device = tensors[0].device if isinstance(tensors[0], torch.Tensor) else torch.device("cpu")
    return device if accepts(device) else torch.device("cpu" if _env.triton_interpreter() else "cuda")


def locate(
    tensors: Sequence[torch.Tensor], device: torch.device, *, writable: bool = False
) -> tuple[bytes, bytes, list[torch.Tensor], _Copies | None]:
    """Addresses and sizes of `tensors`, which must be on `device`: the keys for `Tables.find`. Also the tensors made to
    serve, which must live until the launches are under way, and the copies to be written back; None for these if all
    tensors are plain. A tensor whose elements do not fill a stretch of memory is copied, and one that is not plain
    memory (sparse, float8, lazily conjugated, …) is prepared. Raises UnsupportedTensorError for a tensor that cannot be
    read, is on another device, or cannot be written to. Cost: about 50 ns a tensor through the exchange API, 3 us
    without; a copy of each tensor that is not dense."""
    if extension is not None:  # else Python calls do the same, far more slowly
        # The device of the first speaks for all: this returns None if they are on several.
        found = extension.locate_tensors(tensors)
        if found is not None and (not tensors or tensors[0].device == device):
            return *found, [], None
    words = struct.Struct(f"={len(tensors)}q")
    addresses, sizes = [], []
    keep: list[torch.Tensor] = []
    write_back: _Copies = []
    for i, tensor in enumerate(tensors):
        if not (_is_plain(tensor, device) and not lacks_memory(tensor) and is_dense(tensor)):
            tensor = _prepared(tensor, i, device, writable, write_back)
            keep.append(tensor)
        addresses.append(tensor.data_ptr())
        sizes.append(tensor.numel() << 2 | _CODES[tensor.dtype])
    return words.pack(*addresses), words.pack(*sizes), keep, write_back if keep else None


def _is_plain(tensor: Any, device: torch.device) -> bool:
    """Whether the kernels can read `tensor` as it is, if it is dense."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    is_lazy = tensor.is_neg() or tensor._is_zerotensor() or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.device == device and tensor.dtype in _CODES and not is_lazy


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill the memory from the first one on, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _prepared(tensor: object, index: int, device: torch.device, writable: bool, write_back: _Copies) -> torch.Tensor:
    values = plain(tensor, index, writable=writable)
    if values.device != device:
        raise UnsupportedTensorError(index, f'must be on {device} for backend "triton", got {values.device}')
    if values.is_complex():
        values = torch.view_as_real(values)
    if writable and may_overlap(values):
        raise UnsupportedTensorError(index, OVERLAP)
    if is_dense(values):
        return values
    copy = values.contiguous()
    if writable:
        write_back.append((values, copy))
    return copy


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
