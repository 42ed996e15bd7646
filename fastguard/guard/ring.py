"""Records on their way: a fixed number of slots, from the step that fills one to the host that reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.slot import Slot
from .courier import Courier, Parcel

NUM_SLOTS = 16
WHEN_BEHIND = ("wait", "drop")


class Entry:
    """One slot on each device, and what the host knows of the step that fills them.

    Attributes:
        parcels: one a device; the first is where the decision is.
        step, first, from_scaler: number of the step; whether this is its first evaluation; whether a scaler is at work.
        is_over: nothing more comes to this step: neither another evaluation nor a loss.
        names, positions: of all parameters; which of them had a gradient, None for all.
        places: of each device's rows in the table.
        scaled: whether the gradients carried a loss scale.
        clip_coef: where the host decided on it.
        known: loss, validation loss, learning rate, where the host knows them; `noted` has the names of those that the
            device knows.
        overhead_s: seconds spent by the host.
        keep: what must live until the device is done.
    """

    def __init__(self, parcels: Sequence[Parcel], generation: int) -> None:
        self.parcels = parcels
        self.generation = generation
        self.slot: Slot = parcels[0].slot
        self.start(0, True)

    def start(self, step: int, first: bool) -> None:
        """Forgets the step that the slots were used for last."""
        self.step, self.first, self.from_scaler, self.is_over = step, first, False, False
        self.names: tuple[str, ...] = ()
        self.positions: list[int] | None = None
        self.places: list[Sequence[int]] = []
        self.scaled = False
        self.clip_coef: float | None = None
        self.known: dict[str, float | None] = {}
        self.noted: set[str] = set()
        self.overhead_s = 0.0
        self.keep: tuple[Any, ...] = ()

    def note(self, name: str, value: Any) -> None:
        """Adds a number; a tensor on a device is copied there, without waiting for it."""
        self.noted.discard(name)
        if not isinstance(value, torch.Tensor) or (value.is_cpu and not self.slot.words.is_cpu):
            self.known[name] = None if value is None else float(value)
        else:
            with torch.no_grad():
                self.slot.notes[name].copy_(value.detach().reshape(()), non_blocking=True)
            self.noted.add(name)


class Ring:
    """Hands out entries, sends them off when their step is over, and delivers them in order.

    Attributes:
        num_slots: how many there are.
        current: the entry of the step just taken, which may still be added to; None if it was delivered.
        num_dropped: records that were given up.
    """

    def __init__(self, deliver: Callable[[Entry], None], when_behind: str, num_slots: int = NUM_SLOTS) -> None:
        self._deliver = deliver
        self._drops = when_behind == "drop"
        self.num_slots = num_slots
        self._couriers: Sequence[Courier] = ()
        self._free: list[Entry] = []
        self._sent: deque[tuple[Entry, Sequence[Courier]]] = deque()
        self._generation = 0
        self.current: Entry | None = None
        self.num_dropped = 0

    def rebuild(self, slots: Sequence[Sequence[Slot]], couriers: Sequence[Courier]) -> None:
        """Goes on with other slots, one list a device. What is on its way still arrives; nothing may be current."""
        self._generation += 1
        self._couriers = couriers
        self._free = [
            Entry([c.parcel(slot) for c, slot in zip(couriers, one_each)], self._generation) for one_each in zip(*slots)
        ]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return self.current is None and not self._sent

    def settle(self, is_over: bool) -> None:
        """Another evaluation begins: the current entry is complete, and is sent; what has arrived is delivered.

        Args:
            is_over: it is of another step.
        """
        entry, self.current = self.current, None
        if entry is not None:
            entry.is_over = is_over
            if self._drops and not self._free:
                self._poll()
            if self._drops and not self._free and entry.generation == self._generation:
                self.num_dropped += 1
                self._free.append(entry)
            else:
                self._send(entry)
        self._poll()

    def take(self) -> Entry:
        """An entry to fill. Waits for the oldest if all are on their way."""
        while not self._free:
            self._wait_for_oldest()
        return self._free.pop()

    def give_back(self, entry: Entry) -> None:
        """An entry that was taken, and not filled."""
        self._free.append(entry)

    def catch_up(self) -> None:
        """Delivers everything, the current entry too. Waits."""
        entry, self.current = self.current, None
        if entry is not None:
            self._send(entry)
        while self._sent:
            self._wait_for_oldest()

    def _send(self, entry: Entry) -> None:
        for courier, parcel in zip(self._couriers, entry.parcels):
            courier.send(parcel)
        self._sent.append((entry, self._couriers))

    def _poll(self) -> None:
        while self._sent:
            entry, couriers = self._sent[0]
            if not all(c.has_arrived(p) for c, p in zip(couriers, entry.parcels)):
                return
            self._pop()

    def _wait_for_oldest(self) -> None:
        entry, couriers = self._sent[0]
        for courier, parcel in zip(couriers, entry.parcels):
            courier.wait(parcel)
        self._pop()

    def _pop(self) -> None:
        entry, _ = self._sent.popleft()
        self._deliver(entry)
        if entry.generation == self._generation:
            self._free.append(entry)
