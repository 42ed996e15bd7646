"""Readers of activations: immediate on the CPU; on other devices into buffers that arrive later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from ...kernels import run_activation
from ...kernels.registry import choose
from ...kernels.tensors import float64_bytes, plain
from ...records.samples import ACTIVATION_COLUMNS, CHANNEL_COLUMNS, ActivationRow
from .families import Judgement


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


class DeferredReader:
    """Reads into small tensors on the device, and never waits: a delivery copies all to pinned memory at once."""

    immediate = False

    def __init__(self, device: torch.device, backend: str, make_event: Callable[[], Any] | None = None) -> None:
        self._device, self._backend = device, backend
        self._module = None if device.type == "cpu" else getattr(torch, device.type, None)
        self._make_event = make_event or getattr(self._module, "Event", None)
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self._parts: list[torch.Tensor] = []
        self._num = 0  # of their elements
        self._arrived: list[torch.Tensor] = []  # gets what the next delivery copies

    def measure(self, x: torch.Tensor, judgement: Judgement, dim: int | None) -> Measurement:
        x = plain(x.detach(), 0)
        num_units = 0 if dim is None else x.shape[dim]
        row = torch.empty(len(ACTIVATION_COLUMNS), dtype=self._dtype, device=self._device)
        units = torch.empty(num_units, len(CHANNEL_COLUMNS), dtype=self._dtype, device=self._device)
        chosen = choose(x.device, self._backend, "activation_into")
        chosen.activation_into(x, dim, judgement.limits, row, units)
        start, middle, arrived = self._num, self._num + row.numel(), self._arrived
        self._num = end = middle + units.numel()
        self._parts += row, units.view(-1)

        def reading() -> Reading:
            (found,) = arrived
            table = float64_bytes(found[middle:end]) if num_units else None
            return Reading(ActivationRow(*found[start:middle].tolist()), table)

        return reading

    def deliver(self) -> Any:
        parts, arrived = self._parts, self._arrived
        self._parts, self._num, self._arrived = [], 0, []
        with contextlib.nullcontext() if self._module is None else self._module.device(self._device):
            if parts:
                pinned = self._device.type in ("cuda", "xpu")
                arrived.append(torch.empty(sum(map(len, parts)), dtype=self._dtype, device="cpu", pin_memory=pinned))
                arrived[0].copy_(torch.cat(parts), non_blocking=self._make_event is not None)
            if self._make_event is None:
                return None
            event = self._make_event()
            event.record()
        return event


def reader_for(device: torch.device, backend: str) -> ImmediateReader | DeferredReader:
    return ImmediateReader(backend) if device.type == "cpu" else DeferredReader(device, backend)
