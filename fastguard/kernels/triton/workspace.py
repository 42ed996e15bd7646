"""Statistics, decision and scaling of a list of tensors on one device, without a sync and without an allocation."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch

from ..._device import Device
from ...records import COLUMNS
from ..slots import DEFAULT_OPTIONS, Slot, StepOptions
from .launch import finalise_launcher, scale_launcher, stats_launcher
from .tables import Plan, Tables, locate

_PROGRAMS_PER_PROCESSOR = 8  # of the scaling grid: as many as fit at 64 registers


@functools.lru_cache(maxsize=64)
def bits_of(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


class Workspace:
    """What the launches on one device need: tables, partial results, compiled kernels.

    A step is `plan`, `measure`, and `scale`. All of them queue work on the current stream and return; a step on another
    stream than the last one waits, on the device, for that one. Not for two threads at once, and not in a CUDA graph,
    which would go on reading tables that are gone.

    Attributes:
        device: with its index.
        tables: the cache behind `plan`.
        dtype: of the words of a slot.
        remembers_plans: the plan for the same tensors is the same object.
    """

    dtype = torch.float64
    remembers_plans = True

    def __init__(self, device: torch.device, side: Device | None = None) -> None:
        self._side = Device(device) if side is None else side
        self.device = self._side.device
        self.tables = Tables(self._side)
        self._partials = torch.empty(0, dtype=torch.float64, device=self.device)
        self._stream_id: int | None = None
        self._stream = None

    def plan(self, tensors: Sequence[torch.Tensor], *, writable: bool = False) -> Plan:
        """Tables for `tensors`, which must all be on this device.

        Args:
            tensors: as `fastguard.tensor_stats` takes them. The plan holds addresses, not the tensors: they must live
                until the launches are queued.
            writable: for `scale`; not needed where `plan(tensors).is_plain`.

        Raises:
            UnsupportedTensorError: a tensor that cannot be read, or (`writable`) cannot be written.

        Cost: 50 ns a tensor and no launch if the addresses are those of one of the last steps; else an upload, as
        `Tables` says. A tensor with gaps is copied, and written back by `scale`: one more read and write of it each.
        """
        with self._side.entered():
            self._follow_stream()
            addresses, sizes, keep, write_back = locate(tensors, self.device, writable=writable)
            plan = self.tables.find(addresses, sizes)
        return plan if write_back is None else plan.of_copies(keep, write_back)

    def measure(self, plan: Plan, slot: Slot, options: StepOptions = DEFAULT_OPTIONS, *, unscale: float = 1.0) -> None:
        """Statistics of the tensors of `plan` times the unscaling, and a decision, into `slot`.

        Args:
            slot: with room for the rows of `plan`.
            unscale: what to multiply by, unless `options` have a scale.

        Cost: one read of every element; one launch a dtype and one more; no sync, no allocation but the first time.
        """
        step, scale, found_inf, max_norm, skip_nonfinite, unscales_itself, trigger = options
        layout = plan.layout
        with self._side.entered():
            self._follow_stream()
            partials = self._room(len(COLUMNS) * layout.num_chunks)
            for dtype, first, end in layout.groups:
                stats_launcher(dtype, self.device)(
                    end - first, layout.chunks, plan.addresses, layout.numels, partials, first, layout.num_chunks
                )
            finalise_launcher(self.device)(
                1 + layout.num_rows,
                partials,
                layout.num_chunks,
                layout.row_chunks,
                layout.numels,
                slot.address,
                step,
                0 if scale is None else scale.data_ptr(),
                0 if found_inf is None else found_inf.data_ptr(),
                bits_of(unscale),
                bits_of(max_norm),
                bits_of(trigger),
                skip_nonfinite | unscales_itself << 1,
            )

    def scale(self, plan: Plan, slot: Slot) -> None:
        """`scale_by` the factor in `slot`."""
        self.scale_by(plan, slot.factor_address)

    def scale_by(self, plan: Plan, factor_address: int) -> None:
        """x *= factor for the tensors of `plan`, with one rounding; factor is a float64 at `factor_address`.

        Args:
            plan: `is_plain`, or made with `writable`.

        Cost: one launch a dtype; one read and one write of every element unless the factor is 1, then nothing. No sync.
        """
        layout = plan.layout
        most = _PROGRAMS_PER_PROCESSOR * self._side.num_processors
        with self._side.entered():
            self._follow_stream()
            for dtype, first, end in layout.groups:
                scale_launcher(dtype, self.device)(
                    min(end - first, most), layout.chunks, plan.addresses, layout.numels, factor_address, first, end
                )
            for where, copy in plan.write_back:
                where.copy_(copy)

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
            for tensor in [self._partials, *self.tables.live()]:
                tensor.record_stream(stream)
        self._stream_id, self._stream = stream_id, stream
