"""The devices of one guard: which gradients are on which, and what measures and carries on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._device import Courier
from ..errors import UnsupportedTensorError
from ..kernels import renumbering
from ..kernels.slots import Slot, make_slots
from ..stats.columns import ROW_BYTES
from .engines import ElsewhereError, Engine


class Lane:
    """One device.

    Attributes:
        index: place among the lanes, and of its slot in an entry.
    """

    def __init__(self, index: int, engine: Engine, courier: Courier) -> None:
        self.index = index
        self.engine = engine
        self.courier = courier

    def bring(self, value: Any, word: torch.Tensor) -> torch.Tensor | None:
        """`value` as a float32 on this device: itself, or what was put into `word`. Does not wait."""
        if value is None:
            return None
        if not isinstance(value, torch.Tensor) or (value.is_cpu and not word.is_cpu):
            return word.fill_(float(value))
        if value.dtype is torch.float32 and value.device == word.device:
            return value
        return word.copy_(value.detach().reshape(()), non_blocking=True)


def _plan_some(lane: Lane, gradients: Sequence[torch.Tensor], places: Sequence[int], writable: bool = False) -> Any:
    with renumbering(places):
        return lane.engine.plan([gradients[i] for i in places], writable=writable)


class Lanes:
    """Made as devices turn up. The first gradient's is where decisions are made.

    Attributes:
        key: of the list of gradients that was planned last.
    """

    def __init__(
        self,
        engine_for: Callable[[torch.device], type[Engine] | None],
        courier_for: Callable[[torch.device], Courier],
        device_of: Callable[[torch.Tensor], torch.device] | None,
    ) -> None:
        self._engine_for, self._courier_for = engine_for, courier_for
        self._device_of = device_of or (lambda tensor: tensor.device)
        self._lanes: dict[torch.device, Lane] = {}
        self._num_rows = 0
        self._num_with_slots = 0
        self._totals: torch.Tensor | None = None
        self._split: list[tuple[Lane, list[int] | range]] = []
        self.key: Any = None

    @property
    def remember_plans(self) -> bool:
        """Whether the engines give the same plan for the same tensors."""
        return all(lane.engine.remembers_plans for lane in self._lanes.values())

    def plan(
        self, gradients: Sequence[torch.Tensor], key: Any, groups: Sequence[Sequence[torch.Tensor]]
    ) -> list[tuple[Lane, Any, Any]]:
        """Lane, plan and places of its gradients, for each device; the one that decides first.

        Args:
            key: the same as last time if the gradients are of the same parameters.
            groups: the parameters, whose device counts where there is no gradient.

        Raises:
            ElsewhereError: a gradient is on a device without an engine.

        Cost: that of the engine's plan; 0.1 us a tensor when the key is new.
        """
        if key == self.key and self._split:
            try:
                return self._planned(gradients)
            except UnsupportedTensorError:  # unless it was moved, it is refused again
                pass
        first = next((p for params in groups for p in params), None)
        self._split, self.key = self._split_up(gradients, first), key
        return self._planned(gradients)

    def plan_writable(self, gradients: Sequence[torch.Tensor]) -> list[tuple[Lane, Any]]:
        """Lane and plan of `gradients`, which are some of those planned before, to be scaled."""
        if len(self._lanes) == 1:
            lane = next(iter(self._lanes.values()))
            return [(lane, lane.engine.plan(gradients, writable=True))]
        split = self._split_up(gradients, None)
        return [(lane, _plan_some(lane, gradients, places, writable=True)) for lane, places in split]

    def need_slots(self, num_rows: int) -> bool:
        """Whether slots have to be made, for so many tensors or for a device that is new."""
        grows = num_rows > self._num_rows
        self._num_rows = max(num_rows, self._num_rows)
        return grows or len(self._lanes) != self._num_with_slots

    def make_slots(self, count: int) -> tuple[list[list[Slot]], list[Courier]]:
        """`count` slots on each device, and the couriers for them."""
        lanes = list(self._lanes.values())
        self._num_with_slots = len(lanes)
        self._totals = None
        slots = [make_slots(lane.engine.device, self._num_rows, count, lane.engine.dtype) for lane in lanes]
        return slots, [lane.courier for lane in lanes]

    def gather(self, totals: Sequence[torch.Tensor], home: Lane) -> torch.Tensor:
        """One number of each device, on one of them. Does not wait."""
        if self._totals is None or self._totals.numel() != len(totals) or self._totals.device != home.engine.device:
            self._totals = torch.zeros(len(totals), dtype=home.engine.dtype, device=home.engine.device)
        for i, total in enumerate(totals):
            self._totals[i].copy_(total, non_blocking=True)
        return self._totals

    @staticmethod
    def in_order(tables: Sequence[bytearray], orders: Sequence[Sequence[int]]) -> bytearray:
        """Rows of several devices, each in the place of its gradient in the whole list."""
        table = bytearray(ROW_BYTES * sum(map(len, orders)))
        for rows, places in zip(tables, orders):
            for i, place in enumerate(places):
                table[place * ROW_BYTES : (place + 1) * ROW_BYTES] = rows[i * ROW_BYTES : (i + 1) * ROW_BYTES]
        return table

    def _planned(self, gradients: Sequence[torch.Tensor]) -> list[tuple[Lane, Any, Any]]:
        if len(self._split) == 1:
            lane, places = self._split[0]
            return [(lane, lane.engine.plan(gradients), places)]
        return [(lane, _plan_some(lane, gradients, places), places) for lane, places in self._split]

    def _split_up(
        self, gradients: Sequence[torch.Tensor], parameter: torch.Tensor | None
    ) -> list[tuple[Lane, list[int] | range]]:
        places: dict[torch.device, list[int]] = {}
        for i, gradient in enumerate(gradients):
            places.setdefault(self._device_of(gradient), []).append(i)
        if not places and parameter is not None:
            places[self._device_of(parameter)] = []
        return [(self._lane(device), found) for device, found in places.items()]

    def _lane(self, device: torch.device) -> Lane:
        lane = self._lanes.get(device)
        if lane is None:
            engine = self._engine_for(device)
            if engine is None:
                raise ElsewhereError(f"no engine for {device}")
            lane = self._lanes[device] = Lane(len(self._lanes), engine(device), self._courier_for(device))
        return lane
