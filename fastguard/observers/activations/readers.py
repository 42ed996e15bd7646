"""Readers of activations: immediate on the CPU; on other devices into buffers that arrive later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from ...kernels.activations import run_activation
from ...kernels.registry import choose_or_fall_back
from ...kernels.tensors import float64_bytes, plain
from ...records.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS, ActivationRow
from .families import Judgement

_ROWS, _UNITS = 256, 1 << 14  # of a device buffer, to begin with


class Reading(NamedTuple):
    """The result of one pass over a tensor: a row, and a table of CHANNEL_COLUMNS (float64 bytes)."""

    row: ActivationRow
    units: bytes | None


Measurement: TypeAlias = Callable[[], Reading]  # call it only once its delivery has arrived


class ImmediateReader:
    """Reads with the kernels of the tensor's device, and has the figures at once. On a GPU this would synchronise."""

    immediate = True

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def measure(self, x: torch.Tensor, judgement: Judgement, dim: int | None) -> Measurement:
        """Reads `x` once; with `dim` also for each index in it."""
        row, units = run_activation(
            x.detach(), (judgement.low, judgement.high, judgement.near_zero), dim, self._backend
        )
        found = Reading(ActivationRow(*row), units)
        return lambda: found

    def deliver(self) -> Any:
        """Sends the readings to the host. Returns the event of their arrival; None if they are there."""
        return None


class _Buffers:
    """Rows and unit tables on a device, and their copies on the host."""

    def __init__(self, device: torch.device, num_rows: int, num_units: int) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self.rows = torch.empty(num_rows, len(ACTIVATION_COLUMNS), dtype=dtype, device=device)
        self.units = torch.empty(num_units, len(CHANNEL_COLUMNS), dtype=dtype, device=device)
        pinned = device.type in ("cuda", "xpu")
        self.host_rows = torch.empty(self.rows.shape, dtype=dtype, device="cpu", pin_memory=pinned)
        self.host_units = torch.empty(self.units.shape, dtype=dtype, device="cpu", pin_memory=pinned)
        self.num_rows = self.num_units = 0

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

    def __init__(self, device: torch.device, backend: str, make_event: Callable[[], Any] | None = None) -> None:
        self._device, self._backend = device, backend
        self._module = None if device.type == "cpu" else getattr(torch, device.type, None)
        self._make_event = make_event or getattr(self._module, "Event", None)
        self._size = 1  # of the buffers, doubled for each that was full, so that one will do
        self._buffers: list[_Buffers] = []  # the last has room

    def measure(self, x: torch.Tensor, judgement: Judgement, dim: int | None) -> Measurement:
        """As `ImmediateReader.measure`."""
        x = plain(x.detach(), 0)
        channels = 0 if dim is None else x.shape[dim]
        buffers = self._room_for(channels)
        row, units = buffers.num_rows, slice(buffers.num_units, buffers.num_units + channels)
        chosen = choose_or_fall_back(x.device, self._backend, "activation_into")
        chosen.activation_into(x, dim, judgement.limits, buffers.rows[row], buffers.units[units])
        buffers.num_rows += 1
        buffers.num_units += channels

        def reading() -> Reading:
            table = float64_bytes(buffers.host_units[units]) if channels else None
            return Reading(ActivationRow(*buffers.host_rows[row].tolist()), table)

        return reading

    def _room_for(self, channels: int) -> _Buffers:
        last = self._buffers[-1] if self._buffers else None
        if last is not None and last.num_rows < len(last.rows) and last.num_units + channels <= len(last.units):
            return last
        self._size *= 1 if last is None else 2
        self._buffers.append(_Buffers(self._device, self._size * _ROWS, max(self._size * _UNITS, channels)))
        return self._buffers[-1]

    def deliver(self) -> Any:
        """As `ImmediateReader.deliver`."""
        with contextlib.nullcontext() if self._module is None else self._module.device(self._device):
            for buffers in self._buffers:
                buffers.send(wait=self._make_event is None)
            self._buffers = []
            if self._make_event is None:
                return None
            event = self._make_event()
            event.record()
        return event


def reader_for(device: torch.device, backend: str) -> ImmediateReader | DeferredReader:
    """The reader for tensors on `device`."""
    return ImmediateReader(backend) if device.type == "cpu" else DeferredReader(device, backend)
