"""Brings slots from a device to the host, without keeping either waiting."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch

from ..kernels.slot import Slot


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream records a graph instead of running. Cost: 0.3 us."""
    if device.type == "cpu":
        return False
    asks = getattr(getattr(torch, device.type), "is_current_stream_capturing", None)
    return asks is not None and asks()


class Parcel:
    """A slot on the device, its copy on the host, and the events that tell when the one may be read and the other."""

    def __init__(self, slot: Slot, copy: torch.Tensor, ready: Any, arrived: Any) -> None:
        self.slot = slot
        self.copy = copy
        self.ready = ready
        self.arrived = arrived


class Courier:
    """Copies on a stream of its own, which waits on the device for what fills the slots.

    Pinned memory and events are made once a slot. On the CPU, where tests run this, a copy has arrived when it is sent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: ModuleType | None = None if device.type == "cpu" else getattr(torch, device.type)
        make_stream = getattr(self._module, "Stream", None)  # Apple's GPUs have one stream only
        self._stream = None if make_stream is None else make_stream(device)

    def parcel(self, slot: Slot) -> Parcel:
        """What `slot` travels in."""
        pinned = self._stream is not None
        copy = torch.empty(slot.words.shape, dtype=slot.words.dtype, pin_memory=pinned)
        return Parcel(slot, copy, self._event(), self._event())

    def send(self, parcel: Parcel) -> None:
        """Queues the copy of what the current stream will have written. Cost: a copy, two events; no sync."""
        with self._entered():
            if self._stream is not None and self._module is not None:
                parcel.ready.record(self._module.current_stream(self._device))
                self._stream.wait_event(parcel.ready)
            with self._on_the_stream():
                parcel.copy.copy_(parcel.slot.words, non_blocking=True)
                if parcel.arrived is not None:
                    parcel.arrived.record()

    def has_arrived(self, parcel: Parcel) -> bool:
        """Whether the host may read the copy."""
        return parcel.arrived is None or parcel.arrived.query()

    def wait(self, parcel: Parcel) -> None:
        """Waits until the host may read the copy."""
        if parcel.arrived is not None:
            parcel.arrived.synchronize()

    def _event(self) -> Any:
        return None if self._module is None else self._module.Event()

    def _entered(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None or self._module is None or self._module.current_device() == self._device.index:
            return contextlib.nullcontext()
        return self._module.device(self._device)

    def _on_the_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None or self._module is None:
            return contextlib.nullcontext()
        return self._module.stream(self._stream)
