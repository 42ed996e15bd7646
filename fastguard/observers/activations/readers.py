"""Readers of activations: immediate on the CPU; on other devices into buffers that arrive later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ...kernels.activations import run_activation
from ...kernels.registry import choose_or_fall_back
from ...kernels.tensors import float64_bytes, plain
from ...records.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS
from .families import Judgement

_ROWS = 256  # of a device buffer, to begin with
_UNITS = 1 << 14
_WIDTH = len(CHANNEL_COLUMNS)


class Reading(NamedTuple):
    """The result of one pass over a tensor: a row of ACTIVATION_COLUMNS, a table of CHANNEL_COLUMNS (float64 bytes)."""

    row: tuple[float, ...]
    units: bytes | None


Measurement: TypeAlias = Callable[[], Reading]  # call it only once its delivery has arrived


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self) -> None:
        """Marks this place in the stream's work."""

    def query(self) -> bool:
        """Whether the work up to there is done."""

    def synchronize(self) -> None:
        """Blocks until it is."""


class ImmediateReader:
    """Reads with the kernels of the tensor's device, and has the figures at once. On a GPU this would synchronise."""

    immediate = True

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def measure(self, x: torch.Tensor, judgement: Judgement, dim: int | None) -> Measurement:
        """Reads `x` once; with `dim` also for each index in it."""
        limits = judgement.low, judgement.high, judgement.near_zero
        found = Reading(*run_activation(x.detach(), limits, dim, self._backend))
        return lambda: found

    def deliver(self) -> Event | None:
        """Sends the readings to the host. Returns the event of their arrival; None if they are there."""
        return None


class _Buffers:
    """Rows and unit tables on a device, and their copies on the host."""

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
        """Queues the copies on the current stream; waits for them only with `wait`."""
        self.host_rows[: self.num_rows].copy_(self.rows[: self.num_rows], non_blocking=not wait)
        self.host_units[: self.num_units].copy_(self.units[: self.num_units], non_blocking=not wait)


class DeferredReader:
    """Reads into buffers on the device and never waits. Figures are copied to pinned memory, and are there when the
    event after the copies has fired.

    Each delivery keeps its buffers until its readings are dropped; then they return to the caching allocators.

    Args:
        make_event: default that of the device; without events, deliveries wait.
    """

    immediate = False

    def __init__(self, device: torch.device, backend: str, make_event: Callable[[], Event] | None = None) -> None:
        self._device = device
        self._backend = backend
        self._module = None if device.type == "cpu" else getattr(torch, device.type, None)
        self._make_event = make_event or getattr(self._module, "Event", None)
        self._num_rows, self._num_units = _ROWS, _UNITS
        self._buffers: list[_Buffers] = []  # the last has room

    def measure(self, x: torch.Tensor, judgement: Judgement, dim: int | None) -> Measurement:
        """As `ImmediateReader.measure`."""
        x = plain(x.detach(), 0)
        channels = 0 if dim is None else x.shape[dim]
        buffers = self._room_for(channels)
        row, units = buffers.num_rows, slice(buffers.num_units, buffers.num_units + channels)
        limits = judgement.low, judgement.high, judgement.near_zero
        chosen = choose_or_fall_back(x.device, self._backend, "activation_into")
        chosen.activation_into(x, dim, limits, buffers.rows[row], buffers.units[units])
        buffers.num_rows += 1
        buffers.num_units += channels

        def reading() -> Reading:
            table = float64_bytes(buffers.host_units[units]) if channels else None
            return Reading(tuple(buffers.host_rows[row].tolist()), table)

        return reading

    def _room_for(self, channels: int) -> _Buffers:
        if self._buffers and self._buffers[-1].has_room(channels):
            return self._buffers[-1]
        if self._buffers:  # larger from now on, so that one will do
            self._num_rows, self._num_units = 2 * self._num_rows, 2 * self._num_units
        self._buffers.append(_Buffers(self._device, self._num_rows, max(self._num_units, channels)))
        return self._buffers[-1]

    def deliver(self) -> Event | None:
        """As `ImmediateReader.deliver`."""
        waits = self._make_event is None
        with contextlib.nullcontext() if self._module is None else self._module.device(self._device):
            for buffers in self._buffers:
                buffers.send(wait=waits)
            self._buffers = []
            if self._make_event is None:
                return None
            event = self._make_event()
            event.record()
        return event


def reader_for(device: torch.device, backend: str) -> ImmediateReader | DeferredReader:
    """The reader for tensors on `device`."""
    return ImmediateReader(backend) if device.type == "cpu" else DeferredReader(device, backend)
