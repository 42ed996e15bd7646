"""Streams, events and pinned memory of a device, and how something travels from it to the host without a wait."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


class Device:
    """A GPU, through torch.cuda (ROCm too), torch.xpu or torch.mps; or the CPU, which has nothing of all this.

    What is asked at every step is an attribute, so that it costs a call and no more.

    Attributes:
        device: with its index.
        num_processors: multiprocessors, for the size of a grid that loops.
        entered: () -> a context in which this is the current device.
        stream_id: () -> a number for the current stream; quicker than the stream itself.
        is_capturing: () -> whether the current stream records a graph instead of running. Cost: 0.3 us.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: ModuleType | None = None if device.type == "cpu" else getattr(torch, device.type)
        if hasattr(self._module, "current_device") and device.index is None:
            device = torch.device(device.type, self._module.current_device())
        self.device = device
        self.num_processors = 1
        ask = getattr(self._module, "get_device_properties", None)
        if ask is not None:
            properties = ask(device)
            units = ("multi_processor_count", "gpu_subslice_count")
            self.num_processors = next((getattr(properties, unit) for unit in units if hasattr(properties, unit)), 64)
        count = getattr(self._module, "device_count", None) if hasattr(self._module, "current_device") else None
        is_only_one = count is None or count() == 1
        self.entered: Callable[[], Any] = contextlib.nullcontext if is_only_one else self._entered
        raw_stream = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
        self.stream_id: Callable[[], int] = self._stream_id
        if self._module is None:
            self.stream_id = int  # 0
        elif raw_stream is not None:
            self.stream_id = functools.partial(raw_stream, device.index)
        self._current: tuple[int, Any] = (0, None)
        self.is_capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", bool)  # False

    def _entered(self) -> contextlib.AbstractContextManager[Any]:
        if self._module is None or self._module.current_device() == self.device.index:
            return contextlib.nullcontext()
        return self._module.device(self.device)

    def _stream_id(self) -> int:
        return hash(self._ask_for_stream())

    def _ask_for_stream(self) -> Any:
        ask = getattr(self._module, "current_stream", None)
        return None if ask is None else ask(self.device)

    def stream(self) -> Any:
        """The current stream, or None. Cost: 0.3 us where it is the one that was current last."""
        stream_id, stream = self._current
        if stream is None or stream_id != self.stream_id():
            stream = self._ask_for_stream()
            self._current = self.stream_id(), stream
        return stream

    def event(self) -> Any:
        """A new event, or None."""
        return None if self._module is None else self._module.Event()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which work is queued on `stream`, or where it would be anyway if that is None."""
        return contextlib.nullcontext() if stream is None or self._module is None else self._module.stream(stream)

    def side_stream(self) -> Any:
        """A stream of one's own; None where there is one only, as on the CPU and on Apple's GPUs."""
        make = getattr(self._module, "Stream", None)
        return None if make is None else make(self.device)

    def pinned(self, num_words: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Host memory that copies from and to the device can use while the host goes on."""
        has_streams = hasattr(self._module, "Stream")
        return torch.empty(num_words, dtype=dtype, device="cpu", pin_memory=has_streams)


class Parcel:
    """Memory on a device, its copy on the host, and the events that tell when the one may be read and the other."""

    def __init__(self, source: torch.Tensor, copy: torch.Tensor, ready: Any, arrived: Any) -> None:
        self.source = source
        self.copy = copy
        self.ready = ready
        self.arrived = arrived
        self.stream: Any = None  # which fills the memory


class Courier:
    """Copies on a stream of its own, which waits on the device for what fills the memory.

    Pinned memory and events are made once a parcel. On the CPU, where tests run this, a copy has arrived when it is
    sent.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = Device(device)
        self._stream = self._side.side_stream()
        self.has_streams = self._stream is not None
        self.current_stream = self._side.stream

    def parcel(self, source: torch.Tensor) -> Parcel:
        """What `source`, 1-dim, travels in."""
        copy = self._side.pinned(source.numel(), source.dtype)
        return Parcel(source, copy, self._side.event(), self._side.event())

    def send(self, parcel: Parcel) -> None:
        """Queues the copy of what `parcel.stream` will have written. Cost: a copy, two events; no sync."""
        if self._stream is None:
            parcel.copy.copy_(parcel.source, non_blocking=True)
            if parcel.arrived is not None:
                parcel.arrived.record()
            return
        with self._side.entered():
            parcel.ready.record(parcel.stream)
            self._stream.wait_event(parcel.ready)
            with self._side.on(self._stream):
                parcel.copy.copy_(parcel.source, non_blocking=True)
                parcel.arrived.record()

    def has_arrived(self, parcel: Parcel) -> bool:
        """Whether the host may read the copy."""
        return parcel.arrived is None or parcel.arrived.query()

    def wait(self, parcel: Parcel) -> None:
        """Waits until the host may read the copy."""
        if parcel.arrived is not None:
            parcel.arrived.synchronize()


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` records a graph instead of running. Cost: 0.3 us."""
    module = None if device.type == "cpu" else getattr(torch, device.type)
    return bool(getattr(module, "is_current_stream_capturing", bool)())
