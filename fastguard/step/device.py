"""Steps on their way from the device of the gradients to the host, and the decisions on them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._device import Courier
from ..clip import Limits
from ..kernels.slots import Slot
from .fused import ContiguousGrads

NUM_PENDING = 16


def brought(value: Any, word: torch.Tensor) -> torch.Tensor | None:
    """`value` as a float32 on the device of `word`: itself, or a copy in `word`. Does not synchronise."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or (value.is_cpu and not word.is_cpu):
        return word.fill_(float(value))
    if value.dtype is torch.float32 and value.device == word.device:
        return value
    return word.copy_(value.detach().reshape(()), non_blocking=True)


class PendingStep:
    """A slot on the device, and what the host knows about the step in it."""

    def __init__(self, slot: Slot, courier: Courier) -> None:
        self.slot, self.courier = slot, courier
        self.parcel = courier.parcel(slot.words)  # carries the slot to the host
        self.start(0, from_scaler=False, is_scaled=False)

    def start(self, step: int, *, from_scaler: bool, is_scaled: bool) -> None:
        """Forgets the step before. `is_scaled`: the gradients carry a loss scale; a scaler may have removed it."""
        self.step, self.from_scaler, self.is_scaled = step, from_scaler, is_scaled
        self.is_over = False  # neither another evaluation nor a loss comes to this step
        self.names: tuple[str, ...] = ()  # of all parameters
        self.positions: list[int] | None = None  # which of them had a gradient, None for all
        self.num_rows = 0
        self.limits: Limits | None = None  # of the clip policy, if it has any
        self.trigger: float | None = None  # that of all gradients, for the record
        self.known: dict[str, float | None] = {}  # losses and learning rate, as far as the host has them
        self.noted: set[str] = set()  # names of those in the slot
        self.overhead_s = 0.0
        self.keep: tuple[Any, ...] = ()  # what must live until the device is done
        if self.courier.has_streams:
            self.parcel.stream = self.courier.current_stream()

    def note(self, name: str, value: Any) -> None:
        """Adds a number. Copies a tensor on a device there, without a sync."""
        if isinstance(value, torch.Tensor) and (self.slot.words.is_cpu or not value.is_cpu):
            with torch.no_grad():
                self.slot.notes[name].copy_(value.detach().reshape(()), non_blocking=True)
            self.noted.add(name)
        else:
            self.known[name] = None if value is None else float(value)
            self.noted.discard(name)


class PendingSteps:
    """Hands out pending steps, submits them when their step is over, and completes them in order."""

    def __init__(self, complete: Callable[[PendingStep], None]) -> None:
        self._complete = complete
        self._free: list[PendingStep] = []
        self._submitted: deque[PendingStep] = deque()
        self.current: PendingStep | None = None  # the step just taken, which may still be added to

    def rebuild(self, slots: Sequence[Slot], courier: Courier) -> None:
        """Goes on with other slots once the submitted steps are complete; none may be current. Waits."""
        self.complete_all()
        self._free = [PendingStep(slot, courier) for slot in slots]

    @property
    def is_idle(self) -> bool:
        """Whether every step is complete."""
        return self.current is None and not self._submitted

    def begin_step(self) -> bool:
        """Submits the current step as another begins, and completes those that have arrived; whether all have."""
        pending, self.current = self.current, None
        if pending is not None:
            pending.is_over = True
            self._submit(pending)
        while self._submitted and self._submitted[0].courier.has_arrived(self._submitted[0].parcel):
            self._pop()
        return not self._submitted

    def _submit(self, pending: PendingStep) -> None:
        pending.courier.send(pending.parcel)
        self._submitted.append(pending)

    def take(self) -> PendingStep:
        """A pending step to fill. Waits for the oldest one if all are in use."""
        while not self._free:
            self._wait_for_oldest()
        return self._free.pop()

    def give_back(self, pending: PendingStep) -> None:
        """Returns a pending step that was not filled."""
        self._free.append(pending)

    def complete_all(self) -> None:
        """Completes every step, the current one too. Waits."""
        pending, self.current = self.current, None
        if pending is not None:
            self._submit(pending)
        while self._submitted:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self._submitted[0].courier.wait(self._submitted[0].parcel)
        self._pop()

    def _pop(self) -> None:
        pending = self._submitted.popleft()
        self._complete(pending)
        self._free.append(pending)


@dataclass
class DeviceDecision:
    """A decision on a device, in `slot`. The host has not waited for it."""

    pending: PendingStep
    slot: Slot
    positions: Sequence[int] | None  # as in `clipping.HostDecision`, and `taken`
    plan: Any  # the engine's, of all gradients
    gradients: list[torch.Tensor] | None  # these, unless other optimizers have some of them
    scale: bool  # the gradients carried a loss scale; to compare the scales would take a sync
    may_skip: bool  # the skip flag has to be looked at
    fused: list[bool]  # for each member, whether it takes skip flag and divisor on the device
    contiguous: dict[int, ContiguousGrads]  # copies of gradients for fused optimizers, by the index of their member
    max_norm: float = math.inf  # as in `StepOptions`, and `trigger`
    trigger: float = -1.0
    factors: torch.Tensor | None = None  # one for each gradient on top, on the device
    taken: set[int] = field(default_factory=set)
    _skips: bool | None = None

    def skips(self) -> bool:
        """Whether the step is skipped. Synchronises, once."""
        if self._skips is None:
            self._skips = bool(self.slot.skip_flag)
        return self._skips
