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
from .codec import Spread, reader_of
from .columns import COLUMNS, TensorRow, completed
from .events import Entry
from .log import LogReader
from .model import FACTS, ModelNotes
from .sampled import GradientCosine
from .samples import BatchSample, ModuleActivity, WeightStats
from .table import ClippedGroup, StepStats, TensorStats
from .values import MisfitError

MAX_UNKNOWN = 256
_TOGETHER = 256  # steps that a history takes at once

Unknown = dict[str, None]  # keys that this version does not know, in the order of first appearance


def fill(history: Any, log: Iterable[Mapping[str, Any]], path: str | os.PathLike[str] = "the log") -> list[str]:
    """Gives `history`, a `TrainingHistory`, the steps of `log` and its facts about the model. Returns the unknown keys.

    `log` is a `LogReader`, a `JsonlLog`, or any records with the keys of a log. Unknown keys, and lines that have no
    others, are ignored: a newer version wrote them. Of several runs in a file the last one is read, with a warning.
    Raises OSError for a file that cannot be read, and ValueError for what is not such a log: it names `path` and line.

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
                _note(unknown, noted.keys() - FACTS.keys() - _FACTS_NOT_READ, "model/")
                history.model = ModelNotes.of(noted)
            root = "record"
            if line is None:
                break
            step = _step_of(line, unknown)
            lacks_norms = lacks_norms and line.get("grad/norm") is None and "tensors" not in line
            if type(step) is Entry:
                newest = line
                if line.get("grad/cosine") is not None:
                    history.grad_cosines.append(GradientCosine(step.step, values.number(line["grad/cosine"])))
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
            history.last = record_of(newest)
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


def _table(plain: Any) -> TensorStats:
    """A table of tensors. Cost: 0.5 us a row; 10 us if one has a NaN or an Inf."""
    rows = values.mapping(plain).values()
    if all(type(row) is list and len(row) == len(COLUMNS) for row in rows):
        try:
            data = array("d", chain.from_iterable(rows))
        except (TypeError, OverflowError):  # "Infinity", an endless number, or no number: read row by row below
            pass
        else:
            columns = {name: data[i :: len(COLUMNS)] for i, name in enumerate(COLUMNS)}
            if all(math.isfinite(sum(x)) and (n == "sum" or min(x, default=0.0) >= 0.0) for n, x in columns.items()):
                return TensorStats(data.tobytes(), tuple(plain))
    each = values.by_name(_row, plain).values()
    return TensorStats(array("d", chain.from_iterable(each)).tobytes(), tuple(plain))


def _row(plain: Any) -> list[float]:
    """A row of a table. Columns that the log lacks are `completed`; those that this version does not know are cut."""
    row = list(completed([float(values.number(value)) for value in values.row(plain)[: len(COLUMNS)]]))
    for name, value in zip(COLUMNS, row):
        if name.startswith("num") and not 0.0 <= value < math.inf:
            raise MisfitError(f"must have a count for {name}, got {value}")
        if not name.startswith("num") and name != "sum" and not value >= 0.0:
            raise MisfitError(f"must have a number >= 0 for {name}, got {value}")
    return row


def _named(kind: Any, plain: Any) -> tuple[Any, ...]:
    known = values.by_name(values.mapping, plain)
    return tuple(values.at(name, kind.from_dict, {**one, "name": name}) for name, one in known.items())


_norms = reader_of(tuple[Spread, Spread, Spread])  # of a clipped group
# What a record calls the keys of a line, but for those of its gradients.
_RECORD_FIELDS = {
    **{name: name for name in ("step", "skipped", "loss", "val_loss", "lr", "loss_scale")},
    **{"clip/coef": "clip_coef", "clip/trigger": "trigger", "clip/over": "over", "clip/groups": "groups"},
    **{"grad/cosine": "grad_cosine", "activations": "activations", "weights": "weights", "batches": "batches"},
}
_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_RECORD_FIELDS, values.number),
    **dict.fromkeys(("grad/max", "grad/min", "grad/mean", "grad/std"), values.number),
    **dict.fromkeys(("step", *(f"grad/num_{what}" for what in ("zeros", "nans", "infs", "elements"))), values.count),
    **dict.fromkeys(("clip/over", "nonfinite"), reader_of(tuple[str, ...])),
    **{"grad/norm": values.spread, "skipped": values.truth, "tensors": _table},
    "clip/groups": lambda plain: tuple(ClippedGroup(name, *of) for name, of in values.by_name(_norms, plain).items()),
    **{"activations": partial(_named, ModuleActivity), "weights": partial(_named, WeightStats)},
    "batches": lambda plain: tuple(values.each(BatchSample.from_dict, plain)),
}
# The keys of a line: those with a single value, even if it follows from others or is no longer read; then all.
_NUMBERS = (values.number, values.count, values.spread, values.truth)
_NOT_READ = ("time", "clipped", "grad/clipped_norm", "grad/noise_scale")
_FACTS_NOT_READ = {"num_averaged", "odd_ranks"}  # of older versions
NUMBER_KEYS = frozenset((*_NOT_READ, *(key for key, read in _READ.items() if read in _NUMBERS)))
KEYS = NUMBER_KEYS | _READ.keys() | {"model"}


def _read(line: Mapping[str, Any]) -> dict[str, Any]:
    """The known keys of a line that are not None; raises MisfitError for a value that does not fit its key."""
    found = {}
    for key, value in line.items():
        if (value is not None or key == "step") and (read := _READ.get(key)) is not None:
            found[key] = value if read is values.number and type(value) is float else values.at(key, read, value)
    return found


def _step_of(line: Mapping[str, Any], unknown: Unknown) -> Entry | StepStats | None:
    """An `Entry` of a step that is nothing but finite numbers, as most are; None for a line that is not a step."""
    if not line.keys() <= KEYS:
        _note(unknown, line.keys() - KEYS)
    if "step" not in line:
        return None
    if not line.keys() <= NUMBER_KEYS:
        return record_of(line)
    known = _read(line)
    if known.get("grad/num_nans") or known.get("grad/num_infs") or not math.isfinite(known.get("grad/norm", 0.0)):
        return record_of(line)
    numbers = known.get("grad/norm", 0.0), known.get("clip/coef", 1.0), known.get("skipped", False)
    loss, val_loss, lr, loss_scale = map(known.get, ("loss", "val_loss", "lr", "loss_scale"))
    return Entry(known["step"], *numbers, loss, val_loss, lr, loss_scale, None)


def record_of(line: Mapping[str, Any]) -> StepStats:
    """The step that a line of a log describes; raises MisfitError for a value that does not fit its key. Without a
    table of tensors the record has the statistics of all gradients together, and no rows; tensors with NaN or Inf are
    then known by name only."""
    known = _read(line)
    tensors = known["tensors"] if "tensors" in known else _total(known)
    return StepStats(tensors=tensors, **{field: known[key] for key, field in _RECORD_FIELDS.items() if key in known})


def _total(known: Mapping[str, Any]) -> TensorStats:
    """The statistics of all gradients together, from the numbers of a line."""
    norm = known.get("grad/norm", 0.0)
    nans, infs, numel = (known.get(f"grad/num_{what}", 0) for what in ("nans", "infs", "elements"))
    if math.isnan(norm) and not nans:  # a hand-written log may have no counts
        nans = 1
    if math.isinf(norm) and not infs:
        infs = 1
    high, low, mean, std = (known.get(f"grad/{what}", 0.0) for what in ("max", "min", "mean", "std"))
    count = float(numel - nans - infs)
    sum_sq = norm * norm if math.isfinite(norm) else max(count, 0.0) * (mean * mean + std * std)
    zeros, deviations = known.get("grad/num_zeros", 0), max(count, 0.0) * std * std
    finite_norm = norm if math.isfinite(norm) else math.sqrt(sum_sq)
    total = TensorRow(numel, sum_sq, mean * count, high, low, zeros, nans, infs, deviations, finite_norm)
    bad = known.get("nonfinite", ())[::-1]  # the log has them in backward order
    row = TensorRow(num_nans=int(nans > 0), num_infs=int(nans == 0))
    return TensorStats(array("d", chain.from_iterable([row] * len(bad))).tobytes(), bad, total)
