"""Readers of activations, readings that are on their way, the records made of them, and the last ones of each layer."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ..._device import Device
from ...kernels import run_activation
from ...kernels.registry import choose
from ...kernels.tensors import float64_bytes, plain
from ...records.samples import (
    ACTIVATION_COLUMNS,
    CHANNEL_COLUMNS,
    ActivationRow,
    ActivationStats,
    ModuleActivity,
    merge_activation_rows,
)
from .selection import Judgement

_NUM_UNCLAIMED = 64  # sampled steps with records that were not taken
_WINDOW = 10  # sampled steps; a unit is dead if it was so in all of them
_UNIT_SHARE = 0.99  # of a unit's elements must be near zero for it to be dead
_NUM_NAMED = 32  # indices that a record names


class Reading(NamedTuple):
    """The result of one pass over a tensor: a row, and a table of CHANNEL_COLUMNS (float64 bytes)."""

    row: ActivationRow
    units: bytes | None


Measurement: TypeAlias = Callable[[], Reading]  # call it only once its delivery has arrived


class ImmediateReader:
    """Reads with the kernels of the tensor's device, and has the figures at once. On a GPU this would synchronise."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def measure(self, x: torch.Tensor, judgement: Judgement, dim: int | None) -> Measurement:
        """Reads `x` once; with `dim` also for each index in it."""
        row, units = run_activation(x.detach(), judgement[1:4], dim, self._backend)
        found = Reading(ActivationRow(*row), units)
        return lambda: found

    def deliver(self) -> Any:
        """Sends the readings to the host. Returns the event of their arrival; None if they are there."""
        return None


class DeferredReader:
    """Reads into small tensors on the device, and never waits: a delivery copies all to pinned memory at once."""

    def __init__(self, device: torch.device, backend: str, make_event: Callable[[], Any] | None = None) -> None:
        self._device, self._backend, self._side = device, backend, Device(device)
        self._make_event = make_event or self._side.event
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
        chosen.activation_into(x, dim, judgement[1:4], row, units)
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
        with self._side.entered():
            if parts:
                arrived.append(self._side.pinned(sum(map(len, parts)), self._dtype))
                arrived[0].copy_(torch.cat(parts), non_blocking=True)
            event = self._make_event()
            if event is not None:
                event.record()
        return event


def reader_for(device: torch.device, backend: str) -> ImmediateReader | DeferredReader:
    return ImmediateReader(backend) if device.type == "cpu" else DeferredReader(device, backend)


class Sighting(NamedTuple):
    """The reading of one tensor."""

    key: str  # name of its record
    judgement: Judgement
    measured: Measurement  # the figures, now or later
    # whether each is the first one, and its reading; None if it was overwritten. None if they do not matter
    inputs: Sequence[tuple[bool, Measurement | None]] | None = None
    is_quiet: bool = False  # it makes no record while it is finite


class Arrivals:
    """Makes records of sampled steps, in the order of the steps, when their figures have arrived."""

    def __init__(self, window_size: int) -> None:
        self.root = ""  # name of the whole model
        self.latest: tuple[ModuleActivity, ...] = ()  # records of the newest step
        # steps whose figures have not arrived, with their readings, and the events that fire when they have
        self.pending: deque[tuple[int, list[Sighting], list[Any]]] = deque()
        self.seconds = 0.0  # host time spent here since it was last set to zero
        self._window_size = window_size
        # for each unit of a module (int32 [C, 2]) the batches in a row in which it was dead, or saturated; and of how
        # many batches
        self._runs: dict[str, tuple[torch.Tensor | None, int]] = {}
        # statistics of each layer, oldest first, each with the share that is dead
        self.layers: dict[str, deque[tuple[ActivationStats, float]]] = {}
        # steps with records that were not taken, oldest first
        self.unclaimed: deque[tuple[int, tuple[ModuleActivity, ...]]] = deque(maxlen=_NUM_UNCLAIMED)
        self._once_bad: set[str] = set()

    def collect(self, *, wait: bool = False) -> Arrivals:
        """Makes records of the figures that have arrived, or, with `wait`, of all. Returns itself."""
        while self.pending:
            step, sightings, events = self.pending[0]
            if not all(event.query() for event in events):
                if not wait:
                    break
                for event in events:
                    event.synchronize()
            started = time.perf_counter()
            self.pending.popleft()
            self.latest = self._records(sightings)
            for record in self.latest:
                dead = record.dead_unit_ratio if record.num_units else record.stats.zero_ratio
                self.add(record.name, record.stats, dead)
            self.unclaimed.append((step, self.latest))
            self.seconds += time.perf_counter() - started
        return self

    def _records(self, sightings: Iterable[Sighting]) -> tuple[ModuleActivity, ...]:
        """One for each key, in the order of first readings. A quiet one makes records once it was not finite."""
        groups: dict[str, list[Sighting]] = {}
        for sighting in sightings:
            groups.setdefault(sighting.key, []).append(sighting)
        # The first bad batch says where it came from.
        bad = {key: next((s for s in group if not s.measured().row.is_finite), None) for key, group in groups.items()}
        finite = _inputs_finite({key: sighting for key, sighting in bad.items() if sighting is not None}, self.root)
        self._once_bad.update(finite)
        return tuple(
            self._record(group, order, finite.get(key))
            for order, (key, group) in enumerate(groups.items())
            if key in self._once_bad or not group[0].is_quiet
        )

    def _record(self, group: list[Sighting], order: int, inputs_finite: bool | None) -> ModuleActivity:
        key, judgement = group[0].key, group[0].judgement
        rows = [sighting.measured().row for sighting in group]
        if not (math.isfinite(judgement.low) or math.isfinite(judgement.high)):
            rows = [row._replace(num_saturated=row.num_infs) for row in rows]
        units = [bytearray(sighting.measured().units or b"") for sighting in group]
        of_units: dict[str, Any] = {}
        if units[0] and len(set(map(len, units))) == 1:  # the same units in every reading
            tables = [torch.frombuffer(one, dtype=torch.float64) for one in units]
            table = sum(tables[1:], start=tables[0]).view(-1, len(CHANNEL_COLUMNS))
            elements = sum(row.numel for row in rows) // table.shape[0]
            if elements:  # adds a sampled step in which each unit was dead or not, and saturated or not
                are_bad = table[:, :2] >= elements * _UNIT_SHARE
                runs, num = self._runs.get(key, (None, 0))
                if runs is None or runs.shape != are_bad.shape:  # other units than before
                    runs, num = torch.zeros(are_bad.shape, dtype=torch.int32, device="cpu"), 0
                runs, num = self._runs[key] = (runs + 1) * are_bad, min(num + 1, _WINDOW)
                flags = runs >= num
                num_dead, num_saturated = flags.sum(0).tolist()
                of_units = {"num_dead_units": num_dead, "num_saturated_units": num_saturated, "num_batches": num}
                dead = tuple(flags[:, 0].nonzero()[:_NUM_NAMED, 0].tolist()) if num_dead else ()
                of_units |= {"num_units": len(flags), "dead_units": dead}
        return ModuleActivity(
            name=key,
            family=judgement.family,
            stats=ActivationStats.from_row(rows[0] if len(rows) == 1 else merge_activation_rows(rows)),
            order=order,
            inputs_finite=inputs_finite,
            **of_units,
        )

    def add(self, layer: str, stats: ActivationStats, dead: float) -> None:
        """Adds statistics to those of a layer, with the share that is dead."""
        self.layers.setdefault(layer, deque(maxlen=self._window_size)).append((stats, dead))


def _inputs_finite(bad: dict[str, Sighting], root: str) -> dict[str, bool | None]:
    """Whether the inputs of each were finite; None if not known, or if NaN or Inf may be from one of its children.

    Also None for one with Inf alone, which may be masked scores, where others have NaN. `root` is the whole model.
    """
    known: dict[str, bool | None] = {}
    for key, sighting in bad.items():
        rows = [(is_first, reading and reading().row) for is_first, reading in sighting.inputs or ()]
        # Inf counts in the first one only: others may be masks
        is_bad = any(row and (row.num_nans or (is_first and row.num_infs)) for is_first, row in rows)
        is_known = sighting.inputs is not None and all(row is not None for _, row in rows)
        known[key] = False if is_bad else True if is_known else None
    suspects = [key for key, finite in known.items() if finite is not False]
    for key in [key for key, finite in known.items() if finite]:
        if any(key == root or part.startswith((f"{key}.", f"{key}[")) for part in suspects if part != key):
            known[key] = None
    nans = [key for key, finite in known.items() if finite and bad[key].measured().row.num_nans]
    return {key: None if finite and nans and key not in nans else finite for key, finite in known.items()}
