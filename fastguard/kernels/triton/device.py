"""What the launchers need of a device: streams, events, pinned memory. The interpreter's device, the CPU, has none."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ... import _env


def accepts(device: torch.device) -> bool:
    """Whether the kernels, compiled or interpreted, read tensors on `device`."""
    return device.type == "cpu" if _env.triton_interpreter() else device.type in ("cuda", "xpu")


def device_for(tensors: Sequence[Any]) -> torch.device:
    """The device of the first of `tensors`, or, if the kernels are not for that, one on which others are refused."""
    device = tensors[0].device if isinstance(tensors[0], torch.Tensor) else torch.device("cpu")
    return device if accepts(device) else torch.device("cpu" if _env.triton_interpreter() else "cuda")


class Device:
    """A GPU, through torch.cuda (ROCm too) or torch.xpu; or, where Triton interprets, the CPU.

    Attributes:
        device: with its index.
        num_processors: multiprocessors, for the size of a grid that loops.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: ModuleType | None = None if device.type == "cpu" else getattr(torch, device.type)
        if self._module is not None and device.index is None:
            device = torch.device(device.type, self._module.current_device())
        self.device = device
        self._raw_stream = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
        self.num_processors = 1
        if self._module is not None:
            properties = self._module.get_device_properties(device)
            units = ("multi_processor_count", "gpu_subslice_count")
            self.num_processors = next((getattr(properties, unit) for unit in units if hasattr(properties, unit)), 64)

    def stream_id(self) -> int:
        """A number for the current stream; quicker than the stream itself."""
        if self._module is None:
            return 0
        if self._raw_stream is not None:
            return self._raw_stream(self.device.index)
        return hash(self._module.current_stream(self.device))

    def stream(self) -> Any:
        """The current stream, or None."""
        return None if self._module is None else self._module.current_stream(self.device)

    def event(self) -> Any:
        """A new event, or None."""
        return None if self._module is None else self._module.Event()

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of running."""
        asks = getattr(self._module, "is_current_stream_capturing", None)
        return asks is not None and asks()

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which this is the current device."""
        if self._module is None or self._module.current_device() == self.device.index:
            return contextlib.nullcontext()
        return self._module.device(self.device)

    def pinned(self, num_words: int) -> torch.Tensor:
        """Host memory, int64, that a copy to the device can read while the host goes on."""
        return torch.empty(num_words, dtype=torch.int64, pin_memory=self._module is not None)
