"""Where tensors are, and the tables that the kernels read, kept on the device from step to step. What depends on sizes
and dtypes (how the rows are cut into chunks) is one table, what depends on addresses is another: gradients that come
back at other addresses cost an upload of 8 bytes a tensor, and gradients that come back where they were cost
nothing."""

from __future__ import annotations

import ctypes
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _env
from ..._device import Device
from ...errors import UnsupportedTensorError
from ..cpu import extension
from ..tensors import DTYPES, OVERLAP, lacks_memory, may_overlap, plain

CHUNK = 32768  # elements a program of the statistics; the finest part of a sum that another tensor cannot change
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_Copies = list[tuple[torch.Tensor, torch.Tensor]]  # where to, and the copy


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
