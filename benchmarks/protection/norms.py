"""Norms that were recorded in healthy trainings, and trouble planted in them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

PAST = 128  # norms that the usual is taken from


@dataclass(frozen=True)
class Trace:
    """What a healthy training recorded, step by step; steps that were not finite are left out.

    Attributes:
        name: of the training.
        norms: of each gradient, a row a step, before clipping.
        losses: of the same steps.
    """

    name: str
    norms: tuple[tuple[float, ...], ...]
    losses: tuple[float | None, ...]

    def __len__(self) -> int:
        return len(self.norms)

    def total(self, step: int) -> float:
        """Norm of all gradients together."""
        return math.hypot(*self.norms[step])

    def usual(self, step: int) -> float:
        """Median of the `PAST` total norms before `step`."""
        return statistics.median(self.total(i) for i in range(max(0, step - PAST), step))

    def scaled(self, steps: range, factor: float) -> Trace:
        """The same with the gradients of `steps` times `factor`."""
        norms = list(self.norms)
        for step in steps:
            norms[step] = tuple(factor * norm for norm in norms[step])
        return replace(self, norms=tuple(norms))

    def prolonged(self, num_steps: int, rng: random.Random, tail: int = 64) -> Trace:
        """The same with further steps, drawn from the last `tail` of them: a training that goes on at its level."""
        drawn = [rng.randrange(max(0, len(self) - tail), len(self)) for _ in range(num_steps)]
        return replace(
            self,
            norms=self.norms + tuple(self.norms[i] for i in drawn),
            losses=self.losses + tuple(self.losses[i] for i in drawn),
        )


def trace_of(name: str, records: Sequence[Any]) -> Trace:
    """Of the `StepStats` of a run. Tensors without a gradient at all steps, or with another number of rows, are of
    another step's making: such records are left out."""
    width = max((len(record.tensors.names) for record in records), default=0)
    norms, losses = [], []
    for record in records:
        row = tuple(float(norm) for norm in record.tensors.norm)
        if len(row) == width and all(map(math.isfinite, row)) and not record.skipped:
            norms.append(row)
            losses.append(record.loss if record.loss is not None and math.isfinite(record.loss) else None)
    return Trace(name, tuple(norms), tuple(losses))


@dataclass(frozen=True)
class Plant:
    """Trouble in a trace: gradients of `length` steps from `start` on are `factor` times too large.

    Attributes:
        kind: "spike", "burst", "early spike" or "level".
    """

    kind: str
    start: int
    length: int
    factor: float

    @property
    def steps(self) -> range:
        return range(self.start, self.start + self.length)


SPIKES = (3.0, 5.0, 10.0, 20.0)
BURST, BURSTS = 8, (3.0, 10.0, 20.0)
LATE = 100  # from here on the warm-up of every rule is over
EARLY = range(8, 64)
AFTER_LEVEL = 2000


def plants(trace: Trace, rng: random.Random) -> list[Plant]:
    """One spike and one burst of each size, and a spike of each size among the first steps, at places that `rng`
    chooses; none where the trace is too short for it."""
    found = []
    room = range(LATE, len(trace) - BURST)
    if len(room) > 0:
        found += [Plant("spike", rng.choice(room), 1, factor) for factor in SPIKES]
        found += [Plant("burst", rng.choice(room), BURST, factor) for factor in BURSTS]
    if len(trace) > EARLY.stop:
        found += [Plant("early spike", rng.choice(EARLY), 1, factor) for factor in SPIKES]
    return found
