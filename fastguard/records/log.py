"""Reads a log with one JSON object a line, which `fastguard.sinks.JsonlSink` writes: its records, and from them back to
the steps of a run, whatever the lines contain."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from .._text import NAME_WIDTH, prose, shown
from . import strict_json, values
from .codec import Spread, reader_of
from .columns import COLUMNS, TensorRow, completed
from .events import Entry, GradientCosine
from .model import FACTS, ModelNotes
from .samples import BatchSample, ModuleActivity, WeightStats
from .slot import extension
from .table import ClippedGroup, StepStats, TensorStats
from .values import MisfitError

# Base classes whose attributes lie in C structs: see csrc/state.h.
LineCounts: Any = getattr(extension, "LineCounts", object)
LogState: Any = getattr(extension, "LogState", object)
_log = logging.getLogger("fastguard")
MAX_LINE_BYTES = 64 << 20  # a table of half a million tensors
_raw_decode = json.JSONDecoder().raw_decode
MAX_LISTED = 1000  # lines that could not be read, by number
_NESTED = 100  # lists and dicts
_UTF8_MARK = b"\xef\xbb\xbf"
MAX_UNKNOWN = 256
_TOGETHER = 256  # steps that a history takes at once

Unknown = dict[str, None]  # keys that this version does not know, in the order of first appearance


class LogReader:
    """The records of a log file, one after the other, in bounded memory. Iterate over it once.

    The records are as in the file: NaN and Inf are strings. A line that is not JSON, or longer than 64 MiB, is left out
    and counted. If orjson is installed, it parses the lines, and Python's json those that it refuses: 2 us a line, or 5
    without. Facts with another run id begin another run; in a log without ids, as version 0.2 wrote it, step 0 after
    other steps does. Iterating opens `path`, and raises as `read_jsonl` does.

    Args:
        lines: an object to read lines from instead, by `readline(limit)`; b"" means that there is no line yet.
            Iterating again continues from there.
    """

    def __init__(self, path: str | os.PathLike[str], lines: Any = None) -> None:
        self.path = path
        self.skipped_lines: list[int] = []  # as in `JsonlLog`, so far; so are the others
        self.num_skipped = 0
        self.line, self.text = 0, b""  # number, from 1, of the newest line, and the line itself
        self.model: dict[str, Any] = {}  # another dict after each line of facts
        self.run_id, self.num_runs = "", 1  # of the newest record; runs so far
        self._lines = lines
        try:
            self._quick: Callable[[bytes], Any] | None = importlib.import_module("orjson").loads
        except ImportError:
            self._quick = None
        self._has_steps = False
        self._news: dict[str, Any] = {}  # facts since the newest step

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with contextlib.nullcontext(self._lines) if self._lines is not None else open(self.path, "rb") as lines:
            for line in iter(partial(lines.readline, MAX_LINE_BYTES), b""):
                self.line += 1
                self.text = line
                record = self._parse(line) if line[-2:] == b"}\n" and line[:8] == b'{"step":' else None
                if record is None:
                    record = self._record(line, self.line, lines.readline)
                if record is not None:
                    if "step" in record:
                        if self._has_steps and not self.run_id and record["step"] == 0:
                            news = self._news
                            self._begin_run()
                            self.model = news
                        self._has_steps, self._news = True, {}
                    yield record

    def _skip(self, line: int) -> None:
        self.num_skipped += 1
        if self.num_skipped <= MAX_LISTED:
            self.skipped_lines.append(line)

    def _record(self, line: bytes, number: int, readline: Callable[[int], bytes]) -> dict[str, Any] | None:
        """The record of a line, unless it is one of facts, empty or cut off."""
        is_whole = len(line) < MAX_LINE_BYTES + line.endswith(b"\n")
        text = line.removeprefix(_UTF8_MARK if number == 1 else b"").strip()
        if not text:
            return None
        if text[:1] not in (b"{", b"\0"):  # some file systems leave zeros after a crash
            what, where = shown(text[:40].decode(errors="backslashreplace")), f"{shown(self.path)}, line {number}"
            raise ValueError(f"a log must have one JSON object per line, got '{what}' - at {where}")
        while not is_whole and line and not line.endswith(b"\n"):
            line = readline(MAX_LINE_BYTES)
        record = self._parse(text) if is_whole else None
        if record is None:
            self._skip(number)
        elif "step" not in record and isinstance(record.get("model"), dict):
            self._note(record["model"])
            return None
        elif "step" not in record and isinstance(record.get("run_id"), str):  # a run claims the file
            self.run_id = self.run_id if self.run_id or self._has_steps else record["run_id"]
            return None
        return record

    def _note(self, facts: dict[str, Any]) -> None:
        run_id = facts.get("run_id", self.run_id)
        if run_id != self.run_id:
            self._begin_run()
            self.run_id = run_id
        self.model, self._news = {**self.model, **facts}, {**self._news, **facts}

    def _parse(self, line: bytes) -> Any:
        """What a line that starts with a brace holds; None if it is not JSON."""
        if self._quick is not None:
            try:
                return self._quick(line)
            except (ValueError, RecursionError, MemoryError):
                pass  # cut off; or a bare NaN, half a surrogate or 1e999, which Python's json accepts
        try:
            text = line.decode()
            record, end = _raw_decode(text)
        except (ValueError, RecursionError, MemoryError):  # ValueError also if not UTF-8, or for too many digits
            return None
        return record if end == len(text) else None

    def _warn_of_runs(self) -> None:
        if self.num_runs > 1:
            _log.warning("log %s holds %d runs; only the last one is read", shown(self.path), self.num_runs)

    def _begin_run(self) -> None:
        self.num_runs += self._has_steps
        self._has_steps, self.model, self._news = False, {}, {}


class JsonlLog(list[dict[str, Any]]):
    """The records of a log file, oldest first: a list of dicts with attributes.

    It has the lines that the file had when it was read. If the file has several runs, it has those of the last one.

    Attributes:
        run_id: id of the run; "" if the log has none.
        num_runs: number of runs in the file.
        skipped_lines: numbers, from 1, of the first thousand lines that a crash or a full disk cut off.
        num_skipped: the number of such lines.
        model: the newest facts about the model (`fastguard.records.ModelNotes`); empty if there are none.

    Raises:
        OSError, ValueError: as `read_jsonl`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        reader = LogReader(path)
        self.path, self.num_runs = path, 1
        for record in reader:
            if reader.num_runs != self.num_runs:
                self.num_runs = reader.num_runs
                self.clear()
            try:
                self.append(_decoded(record, reader.text))
            except RecursionError:
                reader._skip(reader.line)
        self.skipped_lines, self.num_skipped, self.model = reader.skipped_lines, reader.num_skipped, reader.model
        self.run_id = reader.run_id
        reader._warn_of_runs()

    def __repr__(self) -> str:
        return f"JsonlLog({str(self.path)!r}, {len(self)} records)"


def read_jsonl(path: str | os.PathLike[str]) -> JsonlLog:
    """The records that a `JsonlSink` wrote to `path`, with NaN and Inf as floats.

    A line that was cut off is left out and listed in `.skipped_lines`; you can read a file that is still being written.

    Raises:
        OSError: the file can't be read.
        ValueError: a line cannot be the beginning of a record: the file is not a log.

    Cost: 10 us and 2 KB of memory a line. `TrainingHistory.from_jsonl` keeps no lines.
    """
    return JsonlLog(path)


def run_id_of(path: str | os.PathLike[str]) -> str | None:
    """The id of the run in the log at `path`: "" if it has none, None if the log is empty."""
    reader = LogReader(path)
    is_empty = next(iter(reader), None) is None and not (reader.model or reader.run_id)
    return None if is_empty else reader.run_id


def _decoded(record: dict[str, Any], text: bytes) -> dict[str, Any]:
    """`record` with NaN and Inf as floats in place of their names; a tensor named "NaN" keeps its name. Its `text`
    nearly always shows that there is none, neither by name nor hidden behind an escape."""
    is_plain = b'NaN"' not in text and b'Infinity"' not in text and b"\\" not in text
    if is_plain and text.count(b"[") + text.count(b"{") <= _NESTED:  # else it may be nested too deeply to decode
        return record
    names = {key: record.pop(key) for key in ("nonfinite", "model") if key in record}
    return {**strict_json.decode(record), **names}


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
        for line in chain(log, [None]):  # facts may come after the last record
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
