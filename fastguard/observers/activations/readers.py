"""Who reads the tensors: at once on the CPU; elsewhere into buffers on the device, which arrive later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ...kernels.activations import run_activation, run_activation_into
from ...kernels.tensors import float64_bytes, plain
from ...records.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS
from .families import Judgement

_ROWS = 256  # of a device buffer, to begin with
_UNITS = 1 << 14
_WIDTH = len(CHANNEL_COLUMNS)


class Reading(NamedTuple):
    """What one pass over a tensor found: a row of ACTIVATION_COLUMNS, a table of CHANNEL_COLUMNS (float64 bytes)."""

    row: tuple[float, ...]
    units: bytes | None


class Measurement(Protocol):
    """A reading, now or later."""

    def reading(self) -> Reading:
        """The reading. Call it only once the reader's delivery is ready."""


class Delivery(Protocol):
    """What an reader has measured since the last delivery, on its way."""

    def ready(self) -> bool:
        """Whether all of it is on the host; does not block."""

    def wait(self) -> None:
        """Blocks until it is."""


class Reader(Protocol):
    """Reads tensors of one device."""

    immediate: bool

    def measure(self, x: torch.Tensor, judgement: Judgement, dim: int | None) -> Measurement:
        """Reads `x` once; with a `dim` also by its indices."""

    def deliver(self) -> Delivery:
        """Sends off what was measured."""


class _Now(NamedTuple):
    found: Reading

    def reading(self) -> Reading:
        return self.found


class _Here:
    """A delivery that has arrived."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return


class ImmediateReader:
    """Reads with the kernels of the tensor's device and has the figures at once. On a GPU this would synchronise."""

    immediate = True

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def measure(self, x: torch.Tensor, judgement: Judgement, dim: int | None) -> Measurement:
        x = x.detach()
        return _Now(Reading(*run_activation(x, judgement.low, judgement.high, judgement.near_zero, dim, self._backend)))

    def deliver(self) -> Delivery:
        return _Here()


class _Buffers:
    """Rows and unit tables on a device, and where they go on the host."""

    def __init__(self, device: torch.device, num_rows: int, num_units: int) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self.rows = torch.empty(num_rows, len(ACTIVATION_COLUMNS), dtype=dtype, device=device)
        self.units = torch.empty(num_units, _WIDTH, dtype=dtype, device=device)
        pinned = device.type in ("cuda", "xpu")
        self.host_rows = torch.empty(self.rows.shape, dtype=dtype, device="cpu", pin_memory=pinned)
        self.host_units = torch.empty(self.units.shape, dtype=dtype, device="cpu", pin_memory=pinned)
        self.num_rows = self.num_units = 0

    def has_room(self, channels: int) -> bool:
        return self.num_rows < len(self.rows) and self.num_units + channels <= len(self.units)

    def send(self, *, wait: bool) -> None:
        """Starts the copies, after what the current stream does; waits for them only if asked to."""
        for host, here, count in (
            (self.host_rows, self.rows, self.num_rows),
            (self.host_units, self.units, self.num_units),
        ):
            if count:
                host[:count].copy_(here[:count], non_blocking=not wait)


class _Late(NamedTuple):
    buffers: _Buffers
    row: int
    first_unit: int
    channels: int

    def reading(self) -> Reading:
        units = None
        if self.channels:
            table = self.buffers.host_units[self.first_unit : self.first_unit + self.channels]
            units = float64_bytes(table)
        return Reading(tuple(self.buffers.host_rows[self.row].tolist()), units)


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self) -> None:
        """Marks this place in the stream's work."""

    def query(self) -> bool:
        """Whether the work up to there is done."""

    def synchronize(self) -> None:
        """Blocks until it is."""


class _OnItsWay(NamedTuple):
    event: Event

    def ready(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class DeferredReader:
    """Reads on the device, into buffers there, and never waits: figures are copied to pinned memory and picked up when
    an event that follows the copies has fired.

    Each delivery keeps its buffers until its readings are dropped; the caching allocators then have them again.

    Args:
        make_event: default the device's own; where it has none, deliveries are waited for.
    """

    immediate = False

    def __init__(self, device: torch.device, backend: str, make_event: Callable[[], Event] | None = None) -> None:
        self._device = device
        self._backend = backend
        self._module = None if device.type == "cpu" else getattr(torch, device.type, None)
        self._make_event = make_event or getattr(self._module, "Event", None)
        self._num_rows, self._num_units = _ROWS, _UNITS
        self._full: list[_Buffers] = []
        self._open: _Buffers | None = None

    def measure(self, x: torch.Tensor, judgement: Judgement, dim: int | None) -> Measurement:
        x = plain(x.detach(), 0)
        channels = 0 if dim is None else x.shape[dim]
        buffers = self._room_for(channels)
        late = _Late(buffers, buffers.num_rows, buffers.num_units, channels)
        row, table = buffers.rows[late.row], buffers.units[late.first_unit : late.first_unit + channels]
        limits = judgement.low, judgement.high, judgement.near_zero
        run_activation_into(x, *limits, dim, self._backend, row, table)
        buffers.num_rows += 1
        buffers.num_units += channels
        return late

    def _room_for(self, channels: int) -> _Buffers:
        if self._open is not None and self._open.has_room(channels):
            return self._open
        if self._open is not None:  # larger from now on, so that one will do
            self._full.append(self._open)
            self._num_rows, self._num_units = 2 * self._num_rows, 2 * self._num_units
        self._open = _Buffers(self._device, self._num_rows, max(self._num_units, channels))
        return self._open

    def deliver(self) -> Delivery:
        waits = self._make_event is None
        with contextlib.nullcontext() if self._module is None else self._module.device(self._device):
            for buffers in [*self._full, *([self._open] if self._open is not None else [])]:
                buffers.send(wait=waits)
            self._full, self._open = [], None
            if self._make_event is None:
                return _Here()
            event = self._make_event()
            event.record()
        return _OnItsWay(event)


def reader_for(device: torch.device, backend: str) -> Reader:
    """The reader for tensors on `device`: immediate where nothing has to be waited for."""
    return ImmediateReader(backend) if device.type == "cpu" else DeferredReader(device, backend)
