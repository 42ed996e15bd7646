"""From the lines of a log back to the steps of a run, whatever stands in them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from .._text import NAME_WIDTH, prose, shown
from ..stats import ClippedGroup, StepStats, TensorStats, values
from ..stats.batches import BatchSample
from ..stats.columns import COLUMNS, TensorRow, completed
from ..stats.log import KEYS, NUMBER_KEYS, LogReader
from ..stats.samples import ActivationStats, ModuleActivity, WeightStats
from ..stats.values import MisfitError
from .batches import GradientCosine
from .entries import Entries, Entry
from .model import ModelNotes

MAX_UNKNOWN = 256
_NUMBERS = ("grad/max", "grad/min", "grad/mean", "grad/std")
_COUNTS = ("grad/num_zeros", "grad/num_elements")
_USUAL = 2**63  # what is not below it is looked at more closely


def _names_of(*kinds: Any) -> frozenset[str]:
    return frozenset(field.name for kind in kinds for field in dataclasses.fields(kind) if field.compare)


_FIELDS = {ModuleActivity: _names_of(ModuleActivity, ActivationStats), WeightStats: _names_of(WeightStats)}
_BATCH_FIELDS = _names_of(BatchSample)
_FACTS = _names_of(ModelNotes)

_Kind = tuple[str, ...]
Unknown = dict[str, None]  # keys that this version does not know, in the order in which they were met


def fill(history: Any, log: Iterable[Mapping[str, Any]], path: str | os.PathLike[str] = "the log") -> list[str]:
    """Gives `history`, a `TrainingHistory`, the steps of `log` and what is noted there of the model.

    A line of nothing but unknown keys is left out, as is each unknown key: a newer version wrote it.

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
    usual: set[_Kind] = set()
    newest: Mapping[str, Any] | None = None
    nothing: dict[str, Any] = {}
    noted: Mapping[str, Any] = nothing
    number, root, lacks_norms = 0, "record", True
    lines = iter(log) if not isinstance(log, LogReader) else iter(())
    blocks = log.blocks() if isinstance(log, LogReader) else iter(lambda: list(itertools.islice(lines, 256)), [])
    try:
        for block in blocks:
            model = getattr(log, "model", nothing)
            if model is not noted:
                noted, root = model, "model"
                history.model = _notes_of(noted, unknown)
            root = "record"
            number = log.line - len(block) if isinstance(log, LogReader) else number
            for kinds, part in _alike(block, usual):
                entries = _usual_steps(part, kinds) if kinds and len(part) > 1 else None
                if entries is not None:
                    number += len(part)
                    lacks_norms = False
                    newest = part[-1]
                    history.defer_entries(entries)
                    continue
                for line in part:
                    number += 1
                    step = _step_of(line, unknown)
                    lacks_norms = lacks_norms and line.get("grad/norm") is None and "tensors" not in line
                    if type(step) is Entry:
                        newest = line
                        if line.get("grad/cosine") is not None:
                            history.grad_cosines.append(GradientCosine(step.step, _cosine(line)))
                        history.defer_entry(step)
                    elif step is not None:
                        newest = None
                        history.defer(step)
                    elif line.keys() & KEYS - {"time"}:
                        root = "path"
                        raise MisfitError("must be a log of steps, got a record without `step`")
        model = getattr(log, "model", nothing)
        if model is not noted:
            root = "model"
            history.model = _notes_of(model, unknown)
        root = "record"
        if newest is not None:  # the newest record of a history is a whole one
            history.last = record_of(newest, unknown)
    except MisfitError as error:
        place = f"line {number}" if isinstance(log, LogReader) else f"record {number}"
        raise ValueError(prose(f"{error.under(root=root)} - at {shown(path)}, {place}")) from None
    history.settle()
    history.lacks_norms = lacks_norms and history.num_steps > 0
    return list(unknown)


def _note(unknown: Unknown, keys: Collection[str], where: str = "") -> None:
    for key in sorted(keys):
        if len(unknown) < MAX_UNKNOWN:
            unknown[shown(f"{where}{key}", NAME_WIDTH)] = None


def _alike(
    block: Sequence[Mapping[str, Any]], usual: set[_Kind]
) -> Iterator[tuple[set[_Kind], Sequence[Mapping[str, Any]]]]:
    """`block` in pieces, each with the kinds in it: neighbours with the keys that nearly all lines of a `JsonlSink`
    have, and others, whose kinds are none.

    Args:
        block: records.
        usual: takes the keys of such lines, in order: a kind.
    """
    kinds = set(map(tuple, block))
    if not kinds <= usual and len(usual) < MAX_UNKNOWN:
        usual.update(kind for kind in kinds if _NEEDED <= set(kind) <= _USUAL_KEYS)
    if kinds <= usual:
        yield kinds, block
        return
    for is_usual, piece in itertools.groupby(block, lambda line: tuple(line) in usual):
        lines = list(piece)
        yield set(map(tuple, lines)) if is_usual else set(), lines


_NEEDED_NUMBERS = ("grad/norm", "clip/coef", *_NUMBERS)
_NEEDED_COUNTS = ("step", *_COUNTS, "grad/num_nans", "grad/num_infs")
_OPTIONAL = ("loss", "lr", "loss_scale")
_NEEDED = {"skipped", *_NEEDED_NUMBERS, *_NEEDED_COUNTS}
_USUAL_KEYS = NUMBER_KEYS - {"val_loss", "grad/cosine"}


@functools.cache
def _getter(optional: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    return operator.itemgetter("skipped", *_NEEDED_COUNTS, *_NEEDED_NUMBERS, *optional)


def _usual_steps(lines: Sequence[Mapping[str, Any]], kinds: Iterable[_Kind]) -> Entries | None:
    """What `_step_of` gives, for lines as a `JsonlSink` writes nearly all; None if one of them is any other.

    Cost: 1 us a line.
    """
    have = [[key for key in _OPTIONAL if key in kind] for kind in kinds]
    if any(one != have[0] for one in have):
        return None
    skipped, *columns = zip(*map(_getter(tuple(have[0])), lines))
    counts, numbers = columns[: len(_NEEDED_COUNTS)], columns[len(_NEEDED_COUNTS) :]
    if any({*map(type, column)} != {float} for column in numbers) or {*map(type, skipped)} != {bool}:
        return None
    *counts, nans, infs = counts
    if any({*map(type, column)} != {int} or min(column) < 0 or max(column) >= _USUAL for column in counts):
        return None
    if any(nans) or any(infs):
        return None
    norms, clip_coefs = numbers[:2]
    known = dict(zip(have[0], numbers[len(_NEEDED_NUMBERS) :]))
    entries = Entries(counts[0], norms, clip_coefs, skipped, *map(known.get, _OPTIONAL))
    is_sound = entries.are_usual or (all(map(math.isfinite, norms)) and min(norms) >= 0.0)
    return entries if is_sound else None


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
        grad_cosine=_cosine(line),
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


def _cosine(line: Mapping[str, Any]) -> Any:
    return _number(line, "grad/cosine")


def _groups(line: Mapping[str, Any]) -> tuple[ClippedGroup, ...]:
    def read(plain: Any) -> list[float]:
        if len(values.row(plain)) != 3:
            raise MisfitError(f"must be norm, clipped norm and trigger, got {len(plain)} values")
        return [float(number) for number in values.each(values.spread, plain)]

    plain = _get(line, "clip/groups", values.mapping) or {}
    try:
        return tuple(ClippedGroup(name, *values.at(name, read, numbers)) for name, numbers in plain.items())
    except MisfitError as error:
        raise error.under("clip/groups") from None


def _batches(line: Mapping[str, Any], unknown: Unknown) -> tuple[BatchSample, ...]:
    def read(plain: Any) -> BatchSample:
        _note(unknown, values.mapping(plain).keys() - _BATCH_FIELDS, "batches/")
        return BatchSample.from_dict(plain)

    return tuple(_get(line, "batches", lambda plain: values.each(read, plain), ()))


def _notes_of(notes: Mapping[str, Any], unknown: Unknown) -> ModelNotes:
    _note(unknown, notes.keys() - _FACTS, "model/")
    return ModelNotes.of(notes)
