"""Figures of sampled steps on their way, what was made of those that arrived, and the last records of each layer."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any, NamedTuple

from ... import kernels
from ...records.samples import ActivationStats, ModuleActivity
from .readers import Delivery
from .sightings import Sighting, activities, origin_of
from .units import UnitRuns

NUM_ORIGINS = 32
LOOK_BACK = 10
DEAD, SATURATED = 0.5, 0.1
_NUM_UNCLAIMED = 64  # sampled steps whose records nobody has taken


class Origin(NamedTuple):
    """Where NaN or Inf came up, and at which step."""

    step: int
    activity: ModuleActivity


class _Pending(NamedTuple):
    """A sampled step whose figures are on their way."""

    step: int
    sightings: list[Sighting]
    deliveries: list[Delivery]

    def ready(self) -> bool:
        return all(delivery.ready() for delivery in self.deliveries)

    def wait(self) -> None:
        for delivery in self.deliveries:
            delivery.wait()


class Journal:
    """Keeps the statistics of the last `window_size` records of each layer."""

    def __init__(self, window_size: int, backend: str) -> None:
        self._window_size = window_size
        self._backend = backend
        self._layers: dict[str, deque[tuple[ActivationStats, float]]] = {}  # with the dead share

    def record(self, layer: str, activations: Any) -> ActivationStats:
        """Measures `activations` and adds the result."""
        stats = kernels.activation_stats(activations, backend=self._backend)
        self.add(layer, stats)
        return stats

    def add(self, layer: str, stats: ActivationStats, activity: ModuleActivity | None = None) -> None:
        """Adds a result. What is dead are units, if `activity` knows them, else elements that are zero."""
        dead = stats.zero_ratio
        if activity is not None and (activity.num_units or activity.is_choice):  # a masked weight is not dead
            dead = activity.dead_unit_ratio
        kept = self._layers.get(layer)
        if kept is None:
            kept = self._layers[layer] = deque(maxlen=self._window_size)
        kept.append((stats, dead))

    def layers(self) -> dict[str, list[ActivationStats]]:
        """The records of each layer, oldest first."""
        return {layer: [stats for stats, _ in kept] for layer, kept in self._layers.items()}

    def diagnose(self) -> dict[str, str]:
        """What is wrong, by layer; layers with nothing wrong are left out."""
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


class Arrivals:
    """Makes records of sampled steps, in the order of the steps, when their figures have arrived.

    Attributes:
        root: name of the model as a whole.
        latest: the newest step's records.
        origins: where NaN or Inf came up, oldest first.
        seconds: host time spent here since it was last set to zero.
    """

    def __init__(self, journal: Journal, runs: UnitRuns) -> None:
        self.root = ""
        self.latest: tuple[ModuleActivity, ...] = ()
        self.origins: deque[Origin] = deque(maxlen=NUM_ORIGINS)
        self.seconds = 0.0
        self._journal = journal
        self._runs = runs
        self._once_bad: set[str] = set()
        self._pending: deque[_Pending] = deque()
        self._unclaimed: dict[int, tuple[ModuleActivity, ...]] = {}

    def expect(self, step: int, sightings: list[Sighting], deliveries: list[Delivery]) -> None:
        """What was sampled at `step` is on its way."""
        self._pending.append(_Pending(step, sightings, deliveries))

    def collect(self, *, wait: bool = False) -> None:
        """Makes records of what has arrived, or, with `wait`, of everything."""
        while self._pending:
            if not self._pending[0].ready():
                if not wait:
                    return
                self._pending[0].wait()
            started = time.perf_counter()
            arrived = self._pending.popleft()
            self._add(arrived.step, activities(arrived.sightings, self._runs, self.root, self._once_bad))
            self.seconds += time.perf_counter() - started

    def claim(self, step: int) -> tuple[ModuleActivity, ...]:
        """The records of one step, once; empty if there are none."""
        return self._unclaimed.pop(step, ()) if self._unclaimed else ()

    def claim_all(self) -> list[tuple[int, tuple[ModuleActivity, ...]]]:
        """All that nobody has claimed, oldest first."""
        if not self._unclaimed:
            return []
        found = list(self._unclaimed.items())
        self._unclaimed.clear()
        return found

    def _add(self, step: int, records: tuple[ModuleActivity, ...]) -> None:
        self.latest = records
        for record in records:
            self._journal.add(record.name, record.stats, record)
        origin = origin_of(records)
        if origin is not None:
            self.origins.append(Origin(step, origin))
        self._unclaimed[step] = records
        if len(self._unclaimed) > _NUM_UNCLAIMED:
            del self._unclaimed[next(iter(self._unclaimed))]
