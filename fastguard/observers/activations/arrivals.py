"""Pending figures of sampled steps, the records made of those that arrived, and the last records of each layer."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import NamedTuple

from ...records.samples import ActivationStats, ModuleActivity
from .readers import Event
from .sightings import Sighting, activities, origin_of
from .units import UnitRuns

NUM_ORIGINS = 32
LOOK_BACK = 10
DEAD, SATURATED = 0.5, 0.1
_NUM_UNCLAIMED = 64  # sampled steps with records that were not taken


class Origin(NamedTuple):
    """Where NaN or Inf appeared, and at which step."""

    step: int
    activity: ModuleActivity


class Arrivals:
    """Makes records of sampled steps, in the order of the steps, when their figures have arrived.

    Keeps the statistics of the last `window_size` records of each layer.

    Attributes:
        root: name of the whole model.
        latest: records of the newest step.
        origins: where NaN or Inf appeared, oldest first.
        seconds: host time spent here since it was last set to zero.
    """

    def __init__(self, window_size: int, runs: UnitRuns) -> None:
        self.root = ""
        self.latest: tuple[ModuleActivity, ...] = ()
        self.origins: deque[Origin] = deque(maxlen=NUM_ORIGINS)
        self.seconds = 0.0
        self._window_size = window_size
        self._layers: dict[str, deque[tuple[ActivationStats, float]]] = {}  # with the dead share
        self._runs = runs
        self._once_bad: set[str] = set()
        self._pending: deque[tuple[int, list[Sighting], list[Event]]] = deque()
        self._unclaimed: dict[int, tuple[ModuleActivity, ...]] = {}

    def expect(self, step: int, sightings: list[Sighting], events: list[Event]) -> None:
        """Waits for the figures of `step`, which have arrived when `events` have fired."""
        self._pending.append((step, sightings, events))

    @property
    def are_pending(self) -> bool:
        """Whether figures have not arrived yet."""
        return bool(self._pending)

    def collect(self, *, wait: bool = False) -> None:
        """Makes records of the figures that have arrived, or, with `wait`, of all."""
        while self._pending:
            step, sightings, events = self._pending[0]
            if not all(event.query() for event in events):
                if not wait:
                    return
                for event in events:
                    event.synchronize()
            started = time.perf_counter()
            self._pending.popleft()
            self._add(step, activities(sightings, self._runs, self.root, self._once_bad))
            self.seconds += time.perf_counter() - started

    def _add(self, step: int, records: tuple[ModuleActivity, ...]) -> None:
        self.latest = records
        for record in records:
            knows_units = record.num_units or record.is_choice  # a masked weight is not dead
            self.add(record.name, record.stats, record.dead_unit_ratio if knows_units else record.stats.zero_ratio)
        origin = origin_of(records)
        if origin is not None:
            self.origins.append(Origin(step, origin))
        self._unclaimed[step] = records
        if len(self._unclaimed) > _NUM_UNCLAIMED:
            del self._unclaimed[next(iter(self._unclaimed))]

    def add(self, layer: str, stats: ActivationStats, dead: float) -> None:
        """Adds statistics to those of a layer, with the share that is dead."""
        self._layers.setdefault(layer, deque(maxlen=self._window_size)).append((stats, dead))

    def claim(self, step: int) -> tuple[ModuleActivity, ...]:
        """The records of one step, once; empty if there are none."""
        return self._unclaimed.pop(step, ())

    def claim_all(self) -> list[tuple[int, tuple[ModuleActivity, ...]]]:
        """All records that were not claimed, oldest first."""
        found = list(self._unclaimed.items())
        self._unclaimed.clear()
        return found

    def layers(self) -> dict[str, list[ActivationStats]]:
        """The statistics of each layer, oldest first."""
        return {layer: [stats for stats, _ in kept] for layer, kept in self._layers.items()}

    def diagnose(self) -> dict[str, str]:
        """Problems by layer, without healthy layers."""
        issues = {}
        for layer, kept in self._layers.items():
            recent = list(kept)[-LOOK_BACK:]
            found = []
            if statistics.fmean(dead for _, dead in recent) > DEAD:
                found.append("Dead")
            if statistics.fmean(stats.saturation_ratio for stats, _ in recent) > SATURATED:
                found.append("Saturated")
            if found:
                issues[layer] = ", ".join(found)
        return issues
