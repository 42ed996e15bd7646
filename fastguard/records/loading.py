"""From the lines of a log back to the steps of a run, whatever stands in them."""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

from .._text import NAME_WIDTH, prose, shown
from . import values
from .batches import BatchSample, GradientCosine
from .codec import Spread, kind_of, kinds_of
from .columns import COLUMNS, TensorRow, completed
from .entries import Entry
from .log import KEYS, NUMBER_KEYS, LogReader
from .model import FACTS, ModelNotes
from .samples import ActivationStats, ModuleActivity, WeightStats
from .table import ClippedGroup, StepStats, TensorStats
from .values import MisfitError

MAX_UNKNOWN = 256
_NUMBERS = ("grad/max", "grad/min", "grad/mean", "grad/std")
_COUNTS = ("grad/num_zeros", "grad/num_elements")
_TOGETHER = 256  # steps that a history takes at once
_USUAL = 2**63  # what is not below it is looked at more closely


_FIELDS = {
    ModuleActivity: kinds_of(ModuleActivity).keys() | kinds_of(ActivationStats).keys(),
    WeightStats: kinds_of(WeightStats).keys(),
}
_read_group = kind_of(tuple[Spread, Spread, Spread]).read

Unknown = dict[str, None]  # keys that this version does not know, in the order in which they were met


def fill(history: Any, log: Iterable[Mapping[str, Any]], path: str | os.PathLike[str] = "the log") -> list[str]:
    """Gives `history`, a `TrainingHistory`, the steps of `log` and what is noted there of the model.

    A line of nothing but unknown keys is left out, as is each unknown key: a newer version wrote it. Of several runs
    in a file the last is taken, with a warning.

    Args:
        log: a `LogReader`, a `JsonlLog`, or any records with the keys of a log.
        path: what errors call it.

    Returns:
        The unknown keys, shown; the first 256 of them.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no such log; says in which line, and what is wrong there.

    Cost: 3 us a line on top of reading it, 1 us more for each tensor in a table, 10 us for a sampled module or weight.
    """
    unknown: Unknown = {}
    newest: Mapping[str, Any] | None = None
    noted: Mapping[str, Any] = {}
    reader = log if isinstance(log, LogReader) else None
    number, root, lacks_norms, num_runs = 0, "record", True, 1
    entries: list[Entry] = []  # steps that are still to be taken, at once
    try:
        for line in itertools.chain(log, [None]):  # notes may come after the last record
            number += 1
            if reader is not None and reader.num_runs > num_runs:
                num_runs, newest, entries, lacks_norms = reader.num_runs, None, [], True
                history.become(history._another())
            model = getattr(log, "model", noted)
            if model is not noted:
                noted, root = model, "model"
                history.extend(entries)
                entries = []
                history.model = _notes_of(noted, unknown)
            root = "record"
            if line is None:
                break
            step = _step_of(line, unknown)
            lacks_norms = lacks_norms and line.get("grad/norm") is None and "tensors" not in line
            if type(step) is Entry:
                newest = line
                cosine = _number(line, "grad/cosine")
                if cosine is not None:
                    history.grad_cosines.append(GradientCosine(step.step, cosine))
                entries.append(step)
            elif step is not None:
                newest = None
                history.extend(entries)
                entries = []
                history.add(step)
            elif line.keys() & KEYS - {"time"}:
                root = "path"
                raise MisfitError("must be a log of steps, got a record without `step`")
            if len(entries) == _TOGETHER:
                history.extend(entries)
                entries = []
        history.extend(entries)
        if newest is not None:  # the newest record of a history is a whole one
            history.last = record_of(newest, unknown)
    except MisfitError as error:
        history.extend(entries)
        place = f"record {number}" if reader is None else f"line {reader.line}"
        raise ValueError(prose(f"{error.under(root=root)} - at {shown(path)}, {place}")) from None
    history.lacks_norms = lacks_norms and history.num_steps > 0
    if reader is not None:
        reader._warn_of_runs()
    return list(unknown)


def _note(unknown: Unknown, keys: Collection[str], where: str = "") -> None:
    for key in sorted(keys):
        if len(unknown) < MAX_UNKNOWN:
            unknown[shown(f"{where}{key}", NAME_WIDTH)] = None


def _step_of(line: Mapping[str, Any], unknown: Unknown) -> Entry | StepStats | None:
    """An `Entry` of a step that is nothing but finite numbers, as nearly all are; None of what is no step."""
    if line.keys() <= NUMBER_KEYS:
        if "step" in line and not line.get("grad/num_nans") and not line.get("grad/num_infs"):
            norm = _norm(line)
            if math.isfinite(norm):
                return _entry_of(line, norm)
    elif not line.keys() <= KEYS:
        _note(unknown, line.keys() - KEYS)
    return record_of(line, unknown) if "step" in line else None


def _entry_of(line: Mapping[str, Any], norm: float) -> Entry:
    """The step of a line of numbers; those that an `Entry` has no room for are looked at all the same."""
    for key in _NUMBERS:
        if type(line.get(key, 0.0)) is not float:
            _get(line, key, values.number)
    for key in _COUNTS:
        count = line.get(key, 0)
        if type(count) is not int or not 0 <= count < _USUAL:
            _get(line, key, values.count)
    step, coefficient, skipped = line["step"], line.get("clip/coef", 1.0), line.get("skipped", False)
    if type(step) is not int or not 0 <= step < _USUAL:
        step = values.at("step", values.count, step)
    if type(coefficient) is not float:
        coefficient = float(_get(line, "clip/coef", values.number, 1.0))
    if type(skipped) is not bool:
        skipped = _get(line, "skipped", values.truth, False)
    loss, lr = _number(line, "loss"), _number(line, "lr")
    return Entry(
        step, norm, coefficient, skipped, loss, _number(line, "val_loss"), lr, _number(line, "loss_scale"), None
    )


def record_of(line: Mapping[str, Any], unknown: Unknown | None = None) -> StepStats:
    """The step that a line of a log tells of.

    Without a table of tensors the record has the figures of all gradients together, and no rows; the tensors with NaN
    or Inf are then known by name only.

    Args:
        line: a record.
        unknown: takes the keys inside it that this version does not know.

    Raises:
        MisfitError: a value is not what the log has under its key.
    """
    unknown = {} if unknown is None else unknown
    return StepStats(
        step=values.entry(line, "step", values.count),
        tensors=_tensors(line, unknown),
        clip_coef=_get(line, "clip/coef", values.number, 1.0),
        skipped=_get(line, "skipped", values.truth, False),
        loss=_number(line, "loss"),
        val_loss=_number(line, "val_loss"),
        lr=_number(line, "lr"),
        loss_scale=_number(line, "loss_scale"),
        activations=_samples(ModuleActivity, line, "activations", unknown),
        weights=_samples(WeightStats, line, "weights", unknown),
        batches=_batches(line, unknown),
        grad_cosine=_number(line, "grad/cosine"),
        trigger=_number(line, "clip/trigger"),
        over=tuple(_get(line, "clip/over", lambda given: values.each(values.text, given), ())),
        groups=_groups(line),
        noise_scale=_number(line, "grad/noise_scale"),
    )


def _get(line: Mapping[str, Any], key: str, read: Callable[[Any], Any], default: Any = None) -> Any:
    value = line.get(key)
    return default if value is None else values.at(key, read, value)


def _number(line: Mapping[str, Any], key: str) -> float | None:
    value = line.get(key)
    return value if value is None or type(value) is float else float(values.at(key, values.number, value))


def _norm(line: Mapping[str, Any]) -> float:
    norm = _number(line, "grad/norm")
    if norm is None:
        return 0.0
    if norm < 0.0:
        raise MisfitError(f"must be a number >= 0, got {norm}", ("grad/norm",))
    return norm


def _tensors(line: Mapping[str, Any], unknown: Unknown) -> TensorStats:
    table: Mapping[str, Any] | None = _get(line, "tensors", values.mapping)
    if table is not None:
        return TensorStats(_pack(table, unknown), tuple(table))
    norm = _norm(line)
    nans, infs = _get(line, "grad/num_nans", values.count, 0), _get(line, "grad/num_infs", values.count, 0)
    if math.isnan(norm) and not nans:  # a log by hand may say no more than this
        nans = 1
    if math.isinf(norm) and not infs:
        infs = 1
    numel = _get(line, "grad/num_elements", values.count, 0)
    mean, std = _get(line, "grad/mean", values.number, 0.0), _get(line, "grad/std", values.number, 0.0)
    count = float(numel - nans - infs)
    sum_sq = norm * norm if math.isfinite(norm) else max(count, 0.0) * (mean * mean + std * std)
    total = TensorRow(
        numel=numel,
        sum_sq=sum_sq,
        sum=mean * count,
        abs_max=_get(line, "grad/max", values.number, 0.0),
        abs_min_nonzero=_get(line, "grad/min", values.number, 0.0),
        num_zeros=_get(line, "grad/num_zeros", values.count, 0),
        num_nans=nans,
        num_infs=infs,
        sum_sq_dev=max(count, 0.0) * std * std,
        finite_norm=norm if math.isfinite(norm) else math.sqrt(sum_sq),
    )
    names = _get(line, "nonfinite", lambda given: values.each(values.text, given), [])
    bad = list(reversed(names))  # the log has them in backward order
    row = TensorRow(num_nans=int(nans > 0), num_infs=int(nans == 0))
    return TensorStats(array("d", chain.from_iterable([row] * len(bad))).tobytes(), bad, total)


def _pack(table: Mapping[str, Any], unknown: Unknown) -> bytes:
    """The rows of a table as a `TensorStats` holds them. Cost: 0.5 us a row; 10 us if one holds a NaN or an Inf."""
    rows = table.values()
    if all(type(row) is list and len(row) == len(COLUMNS) for row in rows):
        try:
            data = array("d", chain.from_iterable(rows))
        except (TypeError, OverflowError):  # "Infinity", digits without end, or what is no number: told below
            pass
        else:
            if all(_is_usual(name, data[i :: len(COLUMNS)]) for i, name in enumerate(COLUMNS)):
                return data.tobytes()
    try:
        each = [values.at(name, lambda row: _row(row, unknown), row) for name, row in table.items()]
    except MisfitError as error:
        raise error.under("tensors") from None
    return array("d", chain.from_iterable(each)).tobytes()


def _is_usual(column: str, numbers: array[float]) -> bool:
    """Whether all are finite, and none is negative where none may be."""
    return math.isfinite(sum(numbers)) and (column == "sum" or not numbers or min(numbers) >= 0.0)


def _row(plain: Any, unknown: Unknown) -> list[float]:
    """A row of a table; columns that are younger than the log are `completed`, those younger than this are left out."""
    if len(values.row(plain)) > len(COLUMNS):
        _note(unknown, [f"columns from the {len(COLUMNS) + 1}th on"], "tensors/")
    given = [float(values.number(value)) for value in plain[: len(COLUMNS)]]
    row = list(completed(given))
    for name, value in zip(COLUMNS, row):
        if name.startswith("num") and not 0.0 <= value < math.inf:
            raise MisfitError(f"must have a count for {name}, got {value}")
        if not name.startswith("num") and name != "sum" and not value >= 0.0:
            raise MisfitError(f"must have a number >= 0 for {name}, got {value}")
    return row


def _samples(kind: Any, line: Mapping[str, Any], key: str, unknown: Unknown) -> tuple[Any, ...]:
    found = []
    for name, plain in (_get(line, key, values.mapping) or {}).items():
        try:
            _note(unknown, values.mapping(plain).keys() - _FIELDS[kind], f"{key}/")
            found.append(kind.from_dict({**plain, "name": name}))
        except MisfitError as error:
            raise error.under(key, name) from None
    return tuple(found)


def _groups(line: Mapping[str, Any]) -> tuple[ClippedGroup, ...]:
    groups = _get(line, "clip/groups", partial(values.by_name, _read_group), {})
    return tuple(ClippedGroup(name, *numbers) for name, numbers in groups.items())


def _batches(line: Mapping[str, Any], unknown: Unknown) -> tuple[BatchSample, ...]:
    def read(plain: Any) -> BatchSample:
        _note(unknown, values.mapping(plain).keys() - kinds_of(BatchSample).keys(), "batches/")
        return BatchSample.from_dict(plain)

    return tuple(_get(line, "batches", lambda plain: values.each(read, plain), ()))


def _notes_of(notes: Mapping[str, Any], unknown: Unknown) -> ModelNotes:
    _note(unknown, notes.keys() - FACTS.keys(), "model/")
    return ModelNotes.of(notes)
