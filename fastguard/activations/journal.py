"""The last records of each layer, and what they say: the part of the monitor that needs no model."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from .. import kernels
from ..stats.samples import ActivationStats, ModuleActivity

LOOK_BACK = 10
DEAD, SATURATED = 0.5, 0.1


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
        dead = activity.dead_unit_ratio if activity is not None and activity.num_units else stats.zero_ratio
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
