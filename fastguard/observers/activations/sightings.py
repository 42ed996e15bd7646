"""Makes one record for each module from the readings of a step, and a table of the records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..._text import NAME_WIDTH, in_columns, shown
from ...kernels.tensors import float64_bytes
from ...records.samples import ACTIVATION_COLUMNS, ActivationStats, ModuleActivity, merge_activation_rows
from .families import Judgement
from .readers import Measurement
from .units import UnitBatch, UnitRuns, UnitVerdict

_HEAD = ("module", "family", "mean", "std", "|max|", "zero", "saturated", "dead units", "")
_NO_UNITS = UnitVerdict(0, 0, 0, (), (), 1)
_SATURATED, _NANS, _INFS = map(ACTIVATION_COLUMNS.index, ("num_saturated", "num_nans", "num_infs"))


@dataclass(frozen=True, slots=True)
class Sighting:
    """The reading of one tensor.

    Attributes:
        key: name of its record.
        measured: the figures, now or later.
        slice_size: elements in a slice that sums to one (softmax); else 1.
        inputs: readings of the inputs, each with whether it is the first one; a reading is None if the input was
            overwritten. None if the inputs are unknown or do not matter.
        may_be_masked: the output holds no other bad value than -Inf, as masked scores do.
        is_quiet: it makes no record while it is finite.
        entropy, largest: readings of further figures, as `Extract` has them.
    """

    key: str
    judgement: Judgement
    measured: Measurement
    slice_size: int = 1
    inputs: tuple[tuple[Measurement | None, bool], ...] | None = None
    may_be_masked: bool = False
    is_quiet: bool = False
    entropy: Measurement | None = None
    largest: Measurement | None = None


@dataclass(slots=True)
class _Gathered:
    """All readings under one key."""

    judgement: Judgement
    order: int
    is_quiet: bool
    rows: list[tuple[float, ...]] = field(default_factory=list)
    tables: list[bytes] = field(default_factory=list)
    entropies: list[tuple[float, ...]] = field(default_factory=list)
    largest: list[tuple[float, ...]] = field(default_factory=list)
    inputs_finite: bool | None = None
    is_bad: bool = False
    may_be_masked: bool = False

    def add(self, sighting: Sighting) -> None:
        row, units = sighting.measured()
        if not self.is_bad and not is_finite(row):  # its first bad batch says where it came from
            self.is_bad = True
            self.inputs_finite = _inputs_finite(sighting)
            self.may_be_masked = sighting.may_be_masked
        self.rows.append(_judged(row, sighting))
        if units:
            self.tables.append(units)
        for measured, rows in ((sighting.entropy, self.entropies), (sighting.largest, self.largest)):
            if measured is not None:
                rows.append(measured().row)

    def batch(self, key: str) -> UnitBatch | None:
        """Its units, if they are judged and the same in every reading."""
        if not self.tables or len(set(map(len, self.tables))) > 1 or len(self.tables) != len(self.rows):
            return None
        table = self.tables[0]
        if len(self.tables) > 1:
            parts = torch.frombuffer(bytearray().join(self.tables), dtype=torch.float64)
            table = float64_bytes(parts.view(len(self.tables), -1).sum(0))
        num_units = len(table) // 32
        elements = int(sum(row[0] for row in self.rows)) // num_units if num_units else 0
        return UnitBatch(key, table, elements, self.judgement.unit_share)


def is_finite(row: Sequence[float]) -> bool:
    """Whether no element was NaN or Inf: a row of ACTIVATION_COLUMNS."""
    return not row[_NANS] and not row[_INFS]


def _inputs_finite(sighting: Sighting) -> bool | None:
    """Whether the inputs were finite; None if not known. Inf counts in the first one only: others may be masks."""
    known = True if sighting.inputs is not None else None
    for reading, is_first in sighting.inputs or ():
        row = None if reading is None else reading().row
        if row is None:
            known = None
        elif row[_NANS] or (is_first and row[_INFS]):
            return False
    return known


def _judged(row: tuple[float, ...], sighting: Sighting) -> tuple[float, ...]:
    """`row` with the number of saturated elements by its judgement."""
    judgement, saturated = sighting.judgement, row[_SATURATED]
    if judgement.row_dim is not None:
        # One element above the threshold makes all of its slice either almost 1 or almost 0.
        saturated = min(row[0], (saturated - row[_INFS]) * sighting.slice_size + row[_INFS])
    elif math.isinf(judgement.low) and math.isinf(judgement.high):
        saturated = row[_INFS]  # the reading may have been taken for a module with a range
    return (*row[:_SATURATED], saturated, *row[_SATURATED + 1 :])


def activities(
    sightings: Iterable[Sighting], runs: UnitRuns, root: str, once_bad: set[str]
) -> tuple[ModuleActivity, ...]:
    """One record for each key, in the order of their first readings; readings of several passes are merged.

    A module is not an origin if NaN or Inf appeared in one of its children. `root` names the whole model. `once_bad`
    gets the keys that are not finite; they make a record from then on even if quiet, to show that they have recovered.
    """
    gathered: dict[str, _Gathered] = {}
    for sighting in sightings:
        entry = gathered.get(sighting.key)
        if entry is None:
            entry = gathered[sighting.key] = _Gathered(sighting.judgement, len(gathered), sighting.is_quiet)
        entry.add(sighting)
    once_bad.update(key for key, entry in gathered.items() if entry.is_bad)
    gathered = {key: entry for key, entry in gathered.items() if key in once_bad or not entry.is_quiet}
    batches = {key: batch for key, entry in gathered.items() if (batch := entry.batch(key)) is not None}
    verdicts = runs.add(list(batches.values()))
    _settle_origins({key: entry for key, entry in gathered.items() if entry.is_bad}, root)
    return tuple(
        _activity(key, entry, verdicts.get(key, _NO_UNITS), batches.get(key)) for key, entry in gathered.items()
    )


def _settle_origins(bad: dict[str, _Gathered], root: str) -> None:
    """Keeps as origins modules without an origin inside; those with only -Inf if there are no others."""
    suspects: list[str] = []
    origins = []
    for key, entry in bad.items():
        is_suspect = entry.inputs_finite is not False
        if entry.inputs_finite is True:
            if any(key == root or (part.startswith(key) and part[len(key)] in ".[") for part in suspects):
                entry.inputs_finite = None
            else:
                origins.append(entry)
        if is_suspect:
            suspects.append(key)
    if not all(entry.may_be_masked for entry in origins):
        for entry in origins:
            if entry.may_be_masked:
                entry.inputs_finite = None


def _activity(key: str, entry: _Gathered, units: UnitVerdict, batch: UnitBatch | None) -> ModuleActivity:
    row = entry.rows[0] if len(entry.rows) == 1 else merge_activation_rows(entry.rows)
    load = batch.load() if batch is not None and batch.elements and entry.judgement.family == "router" else None
    return ModuleActivity(
        name=key,
        family=entry.judgement.family,
        stats=ActivationStats.from_row(row),
        order=entry.order,
        inputs_finite=entry.inputs_finite,
        num_units=units.num_units,
        num_dead_units=units.num_dead,
        num_saturated_units=units.num_saturated,
        dead_units=units.dead,
        saturated_units=units.saturated,
        num_batches=units.num_batches,
        entropy=_known(ActivationStats.from_row(merge_activation_rows(entry.entropies)).mean),
        max_logit=_known(ActivationStats.from_row(merge_activation_rows(entry.largest)).max_val),
        load=load,
    )


def _known(figure: float) -> float | None:
    return None if math.isnan(figure) else figure


def origin_of(records: Iterable[ModuleActivity]) -> ModuleActivity | None:
    """Where NaN or Inf appeared: the first module with finite inputs and an output that is not.

    If no module is known to have had finite inputs, the first whose output is not finite; None if all are finite.
    """
    bad = sorted((record for record in records if not record.stats.is_finite), key=lambda record: record.order)
    return next((record for record in bad if record.is_origin), bad[0] if bad else None)


def draw(records: Sequence[ModuleActivity]) -> str:
    """One line for each record, in the order of execution."""
    rows = [_HEAD, *(_row(record) for record in sorted(records, key=lambda record: record.order))]
    return "\n".join(in_columns(rows, left=(0, 1, len(_HEAD) - 1)))


def _row(record: ModuleActivity) -> tuple[str, ...]:
    stats = record.stats
    units = f"{record.num_dead_units} of {record.num_units}" if record.num_units else ""
    return (
        shown(record.name, NAME_WIDTH),
        record.family,
        f"{stats.mean:.3g}",
        f"{stats.std:.3g}",
        f"{stats.abs_max:.3g}",
        f"{stats.zero_ratio:.1%}",
        f"{stats.saturation_ratio:.1%}",
        units,
        _remark(record),
    )


def _choices(record: ModuleActivity) -> Iterator[str]:
    if record.entropy is not None:
        yield f"entropy {record.entropy:.0%} of the largest"
    if record.max_logit is not None:
        yield f"logits up to {record.max_logit:.3g}"
    if record.load:
        yield f"{max(record.load):.0%} of the tokens to expert {record.load.index(max(record.load))}"


def _remark(record: ModuleActivity) -> str:
    stats = record.stats
    if stats.is_finite:
        return ", ".join(_choices(record))
    counts = [f"{count} {name}" for count, name in ((stats.num_nans, "NaN"), (stats.num_infs, "Inf")) if count]
    return ", ".join(counts) + (" came up here" if record.is_origin else "")
