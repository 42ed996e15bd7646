"""Steps on their way from devices to the host: a fixed number of slots, from the step that fills one to its arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._device import Courier
from ..kernels.slots import Slot

NUM_IN_FLIGHT = 16
WHEN_BEHIND = ("wait", "drop")


class Flight:
    """One slot on each device, and what the host knows of the step that fills them.

    Attributes:
        slots, parcels: one a device, and what it travels in.
        slot: the one where the decision is.
        step, first, from_scaler: number of the step; whether this is its first evaluation; whether a scaler is at work.
        is_over: nothing more comes to this step: neither another evaluation nor a loss.
        names, positions: of all parameters; which of them had a gradient, None for all.
        places: of each device's rows in the table.
        scaled: whether the gradients carried a loss scale.
        clip_coef: where the host decided on it.
        asked: the limits of the clip policy, if it has any; trigger: that of all gradients, for the record.
        known: loss, validation loss, learning rate, where the host knows them; `noted` has the names of those that the
            device knows.
        overhead_s: seconds spent by the host.
        keep: what must live until the device is done.
    """

    def __init__(self, slots: Sequence[Slot], couriers: Sequence[Courier], generation: int) -> None:
        self.slots = slots
        self.couriers = couriers
        self.parcels = [courier.parcel(slot.words) for courier, slot in zip(couriers, slots)]
        self.generation = generation
        self.slot = slots[0]
        self.start(0, True, False, False)

    def start(self, step: int, first: bool, from_scaler: bool, scaled: bool) -> None:
        """Forgets the step that the slots were used for last."""
        self.step, self.first, self.from_scaler, self.scaled = step, first, from_scaler, scaled
        self.is_over = False
        self.names: tuple[str, ...] = ()
        self.positions: list[int] | None = None
        self.places: list[Sequence[int]] = [()] * len(self.slots)
        self.clip_coef: float | None = None
        self.asked: tuple[Any, ...] | None = None
        self.trigger: float | None = None
        self.known: dict[str, float | None] = {}
        self.noted: set[str] = set()
        self.overhead_s = 0.0
        self.keep: tuple[Any, ...] = ()

    def note(self, name: str, value: Any) -> None:
        """Adds a number; a tensor on a device is copied there, without waiting for it."""
        if type(value) is float:
            self.known[name] = value
            self.noted.discard(name)
        elif not isinstance(value, torch.Tensor) or (value.is_cpu and not self.slot.words.is_cpu):
            self.known[name] = None if value is None else float(value)
            self.noted.discard(name)
        else:
            with torch.no_grad():
                self.slot.notes[name].copy_(value.detach().reshape(()), non_blocking=True)
            self.noted.add(name)

    def send(self) -> None:
        """Queues the copies to the host."""
        for courier, parcel in zip(self.couriers, self.parcels):
            courier.send(parcel)

    def wait(self) -> None:
        """Waits for the copies."""
        for courier, parcel in zip(self.couriers, self.parcels):
            courier.wait(parcel)


class Flights:
    """Hands out flights, sends them off when their step is over, and has them arrive in order.

    Attributes:
        num_slots: how many there are.
        current: the flight of the step just taken, which may still be added to; None if it has arrived.
        num_dropped: records that were given up.
    """

    def __init__(self, arrive: Callable[[Flight], None], when_behind: str, num_slots: int = NUM_IN_FLIGHT) -> None:
        self._arrive = arrive
        self._drops = when_behind == "drop"
        self.num_slots = num_slots
        self._free: list[Flight] = []
        self._sent: deque[Flight] = deque()
        self._generation = 0
        self.current: Flight | None = None
        self.num_dropped = 0

    def rebuild(self, slots: Sequence[Sequence[Slot]], couriers: Sequence[Courier]) -> None:
        """Goes on with other slots, one list a device. What is on its way still arrives; nothing may be current."""
        self._generation += 1
        self._free = [Flight(one_each, couriers, self._generation) for one_each in zip(*slots)]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return self.current is None and not self._sent

    def begin_step(self, is_over: bool) -> None:
        """Another evaluation begins: the current flight is complete, and is sent; what is there arrives.

        Args:
            is_over: it is of another step.
        """
        flight, self.current = self.current, None
        if flight is not None:
            flight.is_over = is_over
            if self._drops and not self._free:
                self._poll()
            if self._drops and not self._free and flight.generation == self._generation:
                self.num_dropped += 1
                self._free.append(flight)
            else:
                flight.send()
                self._sent.append(flight)
        self._poll()

    def take(self) -> Flight:
        """A flight to fill. Waits for the oldest if all are on their way."""
        while not self._free:
            self._wait_for_oldest()
        return self._free.pop()

    def give_back(self, flight: Flight) -> None:
        """A flight that was taken, and not filled."""
        self._free.append(flight)

    def arrive_all(self) -> None:
        """Has everything arrive, the current flight too. Waits."""
        flight, self.current = self.current, None
        if flight is not None:
            flight.send()
            self._sent.append(flight)
        while self._sent:
            self._wait_for_oldest()

    def _poll(self) -> None:
        while self._sent:
            flight = self._sent[0]
            for courier, parcel in zip(flight.couriers, flight.parcels):
                if not courier.has_arrived(parcel):
                    return
            self._pop()

    def _wait_for_oldest(self) -> None:
        self._sent[0].wait()
        self._pop()

    def _pop(self) -> None:
        flight = self._sent.popleft()
        self._arrive(flight)
        if flight.generation == self._generation:
            self._free.append(flight)
