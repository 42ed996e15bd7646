"""From the lines of a log back to the steps of a run, whatever the lines contain."""

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
from .codec import Spread, kind_of, kinds_of
from .columns import COLUMNS, TensorRow, completed
from .events import Entry
from .log import KEYS, NUMBER_KEYS, LogReader
from .model import FACTS, ModelNotes
from .sampled import GradientCosine
from .samples import ActivationStats, BatchSample, ModuleActivity, WeightStats
from .table import ClippedGroup, StepStats, TensorStats
from .values import MisfitError

MAX_UNKNOWN = 256
_TOGETHER = 256  # steps that a history takes at once
_FIELDS = {
    ModuleActivity: kinds_of(ModuleActivity).keys() | kinds_of(ActivationStats).keys(),
    WeightStats: kinds_of(WeightStats).keys(),
}
_read_group = kind_of(tuple[Spread, Spread, Spread]).read

Unknown = dict[str, None]  # keys that this version does not know, in the order of first appearance


def fill(history: Any, log: Iterable[Mapping[str, Any]], path: str | os.PathLike[str] = "the log") -> list[str]:
    """Gives `history`, a `TrainingHistory`, the steps of `log` and its facts about the model.

    Unknown keys, and lines that have no others, are ignored: a newer version wrote them. If the file has several runs,
    the last one is read, with a warning.

    Args:
        log: a `LogReader`, a `JsonlLog`, or any records with the keys of a log.
        path: what errors call it.

    Returns:
        The unknown keys, escaped; at most 256.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a log; names the line and the problem.

    Cost: 3 us a line on top of reading it, 1 us more for each tensor in a table, 10 us for a sampled module or weight.
    """
    unknown: Unknown = {}
    newest: Mapping[str, Any] | None = None
    noted: Mapping[str, Any] = {}
    reader = log if isinstance(log, LogReader) else None
    number, root, lacks_norms, num_runs = 0, "record", True, 1
    entries: list[Entry] = []  # steps that the history has yet to take

    def take() -> None:
        nonlocal entries
        some, entries = entries, []
        history.extend(some)

    try:
        for line in itertools.chain(log, [None]):  # facts may come after the last record
            number += 1
            if reader is not None and reader.num_runs > num_runs:
                num_runs, newest, entries, lacks_norms = reader.num_runs, None, [], True
                history.become(history._another())
            model = getattr(log, "model", noted)
            if model is not noted:
                noted, root = model, "model"
                take()
                _note(unknown, noted.keys() - FACTS.keys(), "model/")
                history.model = ModelNotes.of(noted)
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
                take()
                history.add(step)
            elif line.keys() & KEYS - {"time"}:
                root = "path"
                raise MisfitError("must be a log of steps, got a record without `step`")
            if len(entries) == _TOGETHER:
                take()
        take()
        if newest is not None:  # `last` is a whole record
            history.last = record_of(newest, unknown)
    except MisfitError as error:
        take()
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
    """An `Entry` of a step that is nothing but finite numbers, as most are; None for a line that is not a step."""
    if line.keys() <= NUMBER_KEYS:
        if "step" in line and not line.get("grad/num_nans") and not line.get("grad/num_infs"):
            norm = _norm(line)
            if math.isfinite(norm):
                return _entry_of(line, norm)
    elif not line.keys() <= KEYS:
        _note(unknown, line.keys() - KEYS)
    return record_of(line, unknown) if "step" in line else None


def _entry_of(line: Mapping[str, Any], norm: float) -> Entry:
    for key in ("grad/max", "grad/min", "grad/mean", "grad/std"):  # an `Entry` has no room for them: are they numbers?
        if type(line.get(key, 0.0)) is not float:
            _number(line, key)
    for key in ("grad/num_zeros", "grad/num_elements"):
        _count(line, key)
    coefficient, loss, val_loss = _number(line, "clip/coef", 1.0), _number(line, "loss"), _number(line, "val_loss")
    lr, loss_scale = _number(line, "lr"), _number(line, "loss_scale")
    return Entry(_step(line), norm, coefficient, _is_skipped(line), loss, val_loss, lr, loss_scale, None)


def record_of(line: Mapping[str, Any], unknown: Unknown | None = None) -> StepStats:
    """The step that a line of a log describes.

    Without a table of tensors the record has the statistics of all gradients together, and no rows; tensors with NaN or
    Inf are then known by name only.

    Args:
        line: a record.
        unknown: gets the keys inside the record that this version does not know.

    Raises:
        MisfitError: a value does not fit its key.
    """
    unknown = {} if unknown is None else unknown
    return StepStats(
        step=_step(line),
        tensors=_tensors(line, unknown),
        clip_coef=_number(line, "clip/coef", 1.0),
        skipped=_is_skipped(line),
        loss=_number(line, "loss"),
        val_loss=_number(line, "val_loss"),
        lr=_number(line, "lr"),
        loss_scale=_number(line, "loss_scale"),
        activations=_samples(ModuleActivity, line, "activations", unknown),
        weights=_samples(WeightStats, line, "weights", unknown),
        batches=_batches(line, unknown),
        grad_cosine=_number(line, "grad/cosine"),
        trigger=_number(line, "clip/trigger"),
        over=tuple(_get(line, "clip/over", partial(values.each, values.text), ())),
        groups=_groups(line),
        noise_scale=_number(line, "grad/noise_scale"),
    )


def _get(line: Mapping[str, Any], key: str, read: Callable[[Any], Any], default: Any = None) -> Any:
    value = line.get(key)
    return default if value is None else values.at(key, read, value)


def _number(line: Mapping[str, Any], key: str, default: float | None = None) -> Any:
    value = line.get(key)
    if type(value) is float:
        return value
    return default if value is None else float(values.at(key, values.number, value))


def _count(line: Mapping[str, Any], key: str) -> int:
    value = line.get(key)
    if type(value) is int and 0 <= value < 2**63:
        return value
    return 0 if value is None else int(values.at(key, values.count, value))


def _step(line: Mapping[str, Any]) -> int:
    step = line["step"]
    return step if type(step) is int and 0 <= step < 2**63 else int(values.at("step", values.count, step))


def _is_skipped(line: Mapping[str, Any]) -> bool:
    skipped = line.get("skipped", False)
    return skipped if type(skipped) is bool else bool(_get(line, "skipped", values.truth, False))


def _norm(line: Mapping[str, Any]) -> float:
    norm: float = _number(line, "grad/norm", 0.0)
    if norm < 0.0:
        raise MisfitError(f"must be a number >= 0, got {norm}", ("grad/norm",))
    return norm


def _tensors(line: Mapping[str, Any], unknown: Unknown) -> TensorStats:
    table: Mapping[str, Any] | None = _get(line, "tensors", values.mapping)
    if table is not None:
        return TensorStats(_pack(table, unknown), tuple(table))
    norm = _norm(line)
    nans, infs, numel = (_count(line, f"grad/num_{what}") for what in ("nans", "infs", "elements"))
    if math.isnan(norm) and not nans:  # a hand-written log may have no counts
        nans = 1
    if math.isinf(norm) and not infs:
        infs = 1
    high, low, mean, std = (_number(line, f"grad/{what}", 0.0) for what in ("max", "min", "mean", "std"))
    count = float(numel - nans - infs)
    sum_sq = norm * norm if math.isfinite(norm) else max(count, 0.0) * (mean * mean + std * std)
    total = TensorRow(
        numel=numel,
        sum_sq=sum_sq,
        sum=mean * count,
        abs_max=high,
        abs_min_nonzero=low,
        num_zeros=_count(line, "grad/num_zeros"),
        num_nans=nans,
        num_infs=infs,
        sum_sq_dev=max(count, 0.0) * std * std,
        finite_norm=norm if math.isfinite(norm) else math.sqrt(sum_sq),
    )
    names = _get(line, "nonfinite", partial(values.each, values.text), [])
    bad = list(reversed(names))  # the log has them in backward order
    row = TensorRow(num_nans=int(nans > 0), num_infs=int(nans == 0))
    return TensorStats(array("d", chain.from_iterable([row] * len(bad))).tobytes(), bad, total)


def _pack(table: Mapping[str, Any], unknown: Unknown) -> bytes:
    """The rows of a table as a `TensorStats` holds them. Cost: 0.5 us a row; 10 us if one has a NaN or an Inf."""
    rows = table.values()
    if all(type(row) is list and len(row) == len(COLUMNS) for row in rows):
        try:
            data = array("d", chain.from_iterable(rows))
        except (TypeError, OverflowError):  # "Infinity", an endless number, or no number: read row by row below
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
    """Whether all numbers are finite, and none is negative in a column that has no negative numbers."""
    return math.isfinite(sum(numbers)) and (column == "sum" or not numbers or min(numbers) >= 0.0)


def _row(plain: Any, unknown: Unknown) -> list[float]:
    """A row of a table. Columns that the log lacks are `completed`; those that this version does not know are cut."""
    if len(values.row(plain)) > len(COLUMNS):
        _note(unknown, [f"columns from the {len(COLUMNS) + 1}th on"], "tensors/")
    row = list(completed([float(values.number(value)) for value in plain[: len(COLUMNS)]]))
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

    return tuple(_get(line, "batches", partial(values.each, read), ()))
