"""The devices under one guard, and steps on their way from them to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._device import Courier
from ..clip import Limits
from ..errors import UnsupportedTensorError
from ..kernels import renumbering
from ..kernels.slots import Slot, make_slots
from ..records.columns import ROW_BYTES
from .engines import Engine, NoEngineError

NUM_PENDING = 16
WHEN_BEHIND = ("wait", "drop")


class DeviceContext:
    """One device: what measures there, and what carries a slot to the host.

    Attributes:
        index: of the device's slot in a pending step.
    """

    def __init__(self, index: int, engine: Engine, courier: Courier) -> None:
        self.index = index
        self.engine = engine
        self.courier = courier

    def bring(self, value: Any, word: torch.Tensor) -> torch.Tensor | None:
        """`value` as a float32 on this device: itself, or a copy in `word`. Does not synchronise."""
        if value is None:
            return None
        if not isinstance(value, torch.Tensor) or (value.is_cpu and not word.is_cpu):
            return word.fill_(float(value))
        if value.dtype is torch.float32 and value.device == word.device:
            return value
        return word.copy_(value.detach().reshape(()), non_blocking=True)


class DevicePlan(NamedTuple):
    """An engine's plan for the gradients on one device; `places` are their indices among all gradients."""

    context: DeviceContext
    plan: Any
    places: Sequence[int]


class Devices:
    """The devices that gradients have been on so far. The device of the first gradient makes the decisions.

    Attributes:
        key: of the gradients that were planned last.
    """

    def __init__(
        self,
        engine_for: Callable[[torch.device], type[Engine] | None],
        courier_for: Callable[[torch.device], Courier],
        device_of: Callable[[torch.Tensor], torch.device] | None,
    ) -> None:
        self._engine_for, self._courier_for = engine_for, courier_for
        self._device_of = device_of or (lambda tensor: tensor.device)
        self._contexts: dict[torch.device, DeviceContext] = {}
        self._num_rows = 0
        self._num_with_slots = 0
        self._totals: torch.Tensor | None = None
        self._split: list[tuple[DeviceContext, Sequence[int]]] = []
        self.key: Any = None

    def __iter__(self) -> Iterator[DeviceContext]:
        return iter(self._contexts.values())

    @property
    def remembers_plans(self) -> bool:
        """Whether the engines return the same plan for the same tensors."""
        return all(context.engine.remembers_plans for context in self)

    def plan(
        self, gradients: Sequence[torch.Tensor], key: Any, groups: Sequence[Sequence[torch.Tensor]]
    ) -> list[DevicePlan]:
        """Plans for the gradients on each device; the device that decides is first.

        Args:
            key: the same as last time if the gradients belong to the same parameters.
            groups: the parameters. The first one's device decides if there is no gradient.

        Raises:
            NoEngineError: a gradient is on a device without an engine.

        Cost: that of the engine's plan; 0.1 us a tensor when the key is new.
        """
        if key == self.key and self._split:
            try:
                return _plan_split(self._split, gradients)
            except UnsupportedTensorError:  # a gradient has moved, or is refused again below
                pass
        self._split = self._split_up(gradients, next((p for params in groups for p in params), None))
        self.key = key
        return _plan_split(self._split, gradients)

    def plan_writable(self, gradients: Sequence[torch.Tensor]) -> list[DevicePlan]:
        """Plans to scale `gradients`, some of those planned before."""
        split = [(context, ()) for context in self] if len(self._contexts) == 1 else self._split_up(gradients)
        return _plan_split(split, gradients, writable=True)

    def need_slots(self, num_rows: int) -> bool:
        """Whether slots have to be made, for more tensors or another device."""
        grows = num_rows > self._num_rows
        self._num_rows = max(num_rows, self._num_rows)
        return grows or len(self._contexts) != self._num_with_slots

    def make_slots(self) -> tuple[list[list[Slot]], list[Courier]]:
        """`NUM_PENDING` slots on each device, and the couriers for them."""
        self._num_with_slots = len(self._contexts)
        self._totals = None
        slots = [make_slots(c.engine.device, self._num_rows, NUM_PENDING, c.engine.dtype) for c in self]
        return slots, [context.courier for context in self]

    def gather(self, totals: Sequence[torch.Tensor], home: DeviceContext) -> torch.Tensor:
        """One number of each device, on one of them. Does not synchronise."""
        if self._totals is None or self._totals.numel() != len(totals) or self._totals.device != home.engine.device:
            self._totals = torch.zeros(len(totals), dtype=home.engine.dtype, device=home.engine.device)
        for i, total in enumerate(totals):
            self._totals[i].copy_(total, non_blocking=True)
        return self._totals

    def _split_up(
        self, gradients: Sequence[torch.Tensor], parameter: torch.Tensor | None = None
    ) -> list[tuple[DeviceContext, Sequence[int]]]:
        places: dict[torch.device, list[int]] = {}
        for i, gradient in enumerate(gradients):
            places.setdefault(self._device_of(gradient), []).append(i)
        if not places and parameter is not None:
            places[self._device_of(parameter)] = []
        return [(self._context(device), found) for device, found in places.items()]

    def _context(self, device: torch.device) -> DeviceContext:
        if device not in self._contexts:
            engine = self._engine_for(device)
            if engine is None:
                raise NoEngineError(f"no engine for {device}")
            self._contexts[device] = DeviceContext(len(self._contexts), engine(device), self._courier_for(device))
        return self._contexts[device]


def _plan_split(
    split: Sequence[tuple[DeviceContext, Sequence[int]]], gradients: Sequence[torch.Tensor], writable: bool = False
) -> list[DevicePlan]:
    if len(split) == 1:
        context, places = split[0]
        return [DevicePlan(context, context.engine.plan(gradients, writable=writable), places)]
    plans = []
    for context, places in split:
        with renumbering(places):  # so that an error has the index among all gradients
            some = context.engine.plan([gradients[i] for i in places], writable=writable)
        plans.append(DevicePlan(context, some, places))
    return plans


def merge_rows(tables: Sequence[bytearray], orders: Sequence[Sequence[int]]) -> bytearray:
    """Rows of several devices in the order of all gradients."""
    table = bytearray(ROW_BYTES * sum(map(len, orders)))
    for rows, places in zip(tables, orders):
        for i, place in enumerate(places):
            table[place * ROW_BYTES : (place + 1) * ROW_BYTES] = rows[i * ROW_BYTES : (i + 1) * ROW_BYTES]
    return table


class PendingStep:
    """One slot on each device, and what the host knows about the step in them.

    Attributes:
        slots, parcels: one for each device; a parcel carries the slot to the host.
        slot: the one with the decision.
        first: whether this is the first evaluation of the step.
        is_over: neither another evaluation nor a loss comes to this step.
        names, positions: of all parameters; which of them had a gradient, None for all.
        places: of each device's rows in the table.
        is_scaled: whether the gradients carried a loss scale; `from_scaler`: whether a scaler is at work.
        clip_coef: the coefficient, if the host decided on it.
        limits: of the clip policy, if it has any; `trigger`: that of all gradients, for the record.
        known: loss, validation loss and learning rate that the host knows; `noted`: names of those in the slot.
        keep: what must live until the device is done.
    """

    def __init__(self, slots: Sequence[Slot], couriers: Sequence[Courier], generation: int) -> None:
        self.slots = slots
        self.couriers = couriers
        self.parcels = [courier.parcel(slot.words) for courier, slot in zip(couriers, slots)]
        self.generation = generation
        self.start(0, first=True, from_scaler=False, is_scaled=False)

    def start(self, step: int, *, first: bool, from_scaler: bool, is_scaled: bool) -> None:
        """Forgets the step before."""
        self.step, self.first, self.from_scaler, self.is_scaled = step, first, from_scaler, is_scaled
        self.slot = self.slots[0]
        self.is_over = False
        self.names: tuple[str, ...] = ()
        self.positions: list[int] | None = None
        self.places: list[Sequence[int]] = [()] * len(self.slots)
        self.clip_coef: float | None = None
        self.limits: Limits | None = None
        self.trigger: float | None = None
        self.known: dict[str, float | None] = {}
        self.noted: set[str] = set()
        self.overhead_s = 0.0
        self.keep: tuple[Any, ...] = ()
        for courier, parcel in zip(self.couriers, self.parcels):
            if courier.has_streams:
                parcel.stream = courier.current_stream()

    def note(self, name: str, value: Any) -> None:
        """Adds a number. Copies a tensor on a device there, without a sync."""
        if isinstance(value, torch.Tensor) and (self.slot.words.is_cpu or not value.is_cpu):
            with torch.no_grad():
                self.slot.notes[name].copy_(value.detach().reshape(()), non_blocking=True)
            self.noted.add(name)
        else:
            self.known[name] = None if value is None else float(value)
            self.noted.discard(name)

    def submit(self) -> None:
        """Enqueues the copies to the host."""
        for courier, parcel in zip(self.couriers, self.parcels):
            courier.send(parcel)

    @property
    def is_complete(self) -> bool:
        """Whether all copies are on the host."""
        for courier, parcel in zip(self.couriers, self.parcels):  # noqa: SIM110 - a generator is two frames more
            if not courier.has_arrived(parcel):
                return False
        return True

    def wait(self) -> None:
        """Waits for the copies."""
        for courier, parcel in zip(self.couriers, self.parcels):
            courier.wait(parcel)


class PendingSteps:
    """Hands out pending steps, submits them when their step is over, and completes them in order.

    Attributes:
        current: the step just taken, which may still be added to; None once it is complete.
        num_dropped: records that were given up.
    """

    def __init__(self, complete: Callable[[PendingStep], None], when_behind: str) -> None:
        self._complete = complete
        self._drops = when_behind == "drop"
        self._free: list[PendingStep] = []
        self._submitted: deque[PendingStep] = deque()
        self._generation = 0
        self.current: PendingStep | None = None
        self.num_dropped = 0

    def rebuild(self, slots: Sequence[Sequence[Slot]], couriers: Sequence[Courier]) -> None:
        """Goes on with other slots, a list for each device. Submitted steps still complete; none may be current."""
        self._generation += 1
        self._free = [PendingStep(one_each, couriers, self._generation) for one_each in zip(*slots)]

    @property
    def is_idle(self) -> bool:
        """Whether every step is complete."""
        return self.current is None and not self._submitted

    def begin_step(self, is_over: bool) -> bool:
        """Submits the current step as another evaluation begins, and completes those that have arrived.

        Args:
            is_over: the evaluation belongs to another step.

        Returns:
            whether every step is complete.
        """
        pending, self.current = self.current, None
        if pending is not None:
            pending.is_over = is_over
            if self._drops and not self._free:
                self._poll()
            if self._drops and not self._free and pending.generation == self._generation:
                self.num_dropped += 1
                self._free.append(pending)
            else:
                pending.submit()
                self._submitted.append(pending)
        self._poll()
        return not self._submitted

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
            pending.submit()
            self._submitted.append(pending)
        while self._submitted:
            self._wait_for_oldest()

    def _poll(self) -> None:
        while self._submitted and self._submitted[0].is_complete:
            self._pop()

    def _wait_for_oldest(self) -> None:
        self._submitted[0].wait()
        self._pop()

    def _pop(self) -> None:
        pending = self._submitted.popleft()
        self._complete(pending)
        if pending.generation == self._generation:
            self._free.append(pending)
