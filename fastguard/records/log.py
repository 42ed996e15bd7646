"""The reader of a log with one JSON object a line. `fastguard.sinks.JsonlSink` writes it."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import threading
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, cast

from .._text import shown
from . import strict_json

# The keys of a line, as `fastguard.sinks` writes it: what is one number or so, what holds more, and notes of the model.
_GRADIENT_KEYS = ("norm", "max", "min", "mean", "std", "num_zeros", "num_nans", "num_infs", "num_elements")
NUMBER_KEYS = frozenset(
    {
        *("step", "time", "loss", "val_loss", "lr", "loss_scale", "clip/coef", "clip/trigger", "clipped", "skipped"),
        *(f"grad/{key}" for key in (*_GRADIENT_KEYS, "cosine", "clipped_norm")),
    }
)
KEYS = NUMBER_KEYS | {"nonfinite", "clip/over", "clip/groups", "tensors", "activations", "weights", "batches", "model"}

_log = logging.getLogger("fastguard")
MAX_LINE_BYTES = 64 << 20  # a table of half a million tensors
_REPORT_EVERY = 128  # lines
_Parse = Callable[[bytes], dict[str, Any] | None]
_ReadLine = Callable[[int], bytes]
MAX_LISTED = 1000  # lines that could not be read, by number
KEPT_BYTES = 8 << 20  # of a file, as records in memory: 50 MB
_NESTED = 100  # lists and dicts
_OTHER_FILES = {
    b"\x1f\x8b": "a gzip file, which is to be unpacked first",
    b"\x28\xb5\x2f\xfd": "a zstd file, which is to be unpacked first",
    b"\xff\xfe": "text in UTF-16, which is to be saved as UTF-8",
    b"\xfe\xff": "text in UTF-16, which is to be saved as UTF-8",
}
_UTF8_MARK = b"\xef\xbb\xbf"


class _LogFacts:
    """What a log says beside its records.

    A note with another run id begins another run; in a log without ids, as version 0.2 wrote it, step 0 after other
    steps does.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.skipped_lines: list[int] = []
        self.num_skipped = 0
        self.model: dict[str, Any] = {}
        self.run_id, self.num_runs = "", 1
        self._has_steps = False
        self._news: dict[str, Any] = {}  # noted since the newest step

    def _skip(self, line: int) -> None:
        self.num_skipped += 1
        if self.num_skipped <= MAX_LISTED:
            self.skipped_lines.append(line)

    def _record(self, line: bytes, number: int, readline: _ReadLine, parse: _Parse) -> dict[str, Any] | None:
        """What stands in a line, unless it is a note, empty or cut off."""
        is_whole = len(line) < MAX_LINE_BYTES + line.endswith(b"\n")
        text = _text_of(line) if number == 1 else line.strip()
        if not text:
            return None
        if text[:1] not in (b"{", b"\0"):  # some file systems leave zeros where a crash took the data
            raise ValueError(_refusal(text, self.path, number))
        while not is_whole and line and not line.endswith(b"\n"):
            line = readline(MAX_LINE_BYTES)
        record = parse(text) if is_whole else None
        if record is None:
            self._skip(number)
        elif "step" not in record and isinstance(record.get("model"), dict):
            self._note(record["model"])
            return None
        elif "step" not in record and isinstance(record.get("run_id"), str):  # a run asks for the file
            self.run_id = self.run_id if self.run_id or self._has_steps else record["run_id"]
            return None
        return record

    def _note(self, facts: dict[str, Any]) -> None:
        run_id = facts.get("run_id", self.run_id)
        if run_id != self.run_id:
            self._begin_run()
            self.run_id = run_id
        self.model, self._news = {**self.model, **facts}, {**self._news, **facts}

    def _see(self, record: dict[str, Any]) -> None:
        """Takes note of a step, which may begin another run."""
        if "step" in record:
            if self._has_steps and not self.run_id and self._begins_run(record):
                news = self._news
                self._begin_run()
                self.model = news
            self._has_steps, self._news = True, {}

    def _begins_run(self, record: dict[str, Any]) -> bool:
        """Whether a step after others is another run's, where the log does not say which run it is of."""
        return bool(record["step"] == 0)

    def _warn_of_runs(self) -> None:
        if self.num_runs > 1:
            _log.warning("log %s holds %d runs; only the last one is read", shown(self.path), self.num_runs)

    def _begin_run(self) -> None:
        self.num_runs += self._has_steps
        self._has_steps, self.model, self._news = False, {}, {}


class LineReader(_LogFacts):
    """As a `LogReader`, of lines that are handed over one by one. Goes on where it was when it is iterated over again.

    Args:
        path: what errors call the log.
        lines: where the lines come from, by `readline(limit)`; b"" says that there is no line, or none yet.
    """

    def __init__(self, path: str | os.PathLike[str], lines: Any) -> None:
        super().__init__(path)
        self.line = 0
        self._lines = lines
        self._parse = _parser()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        read = self._lines.readline
        for line in iter(functools.partial(read, MAX_LINE_BYTES), b""):
            self.line += 1
            record = self._parse(line) if line[-2:] == b"}\n" and line[:8] == b'{"step":' else None
            if record is None:
                record = self._record(line, self.line, read, self._parse)
            if record is not None:
                self._see(record)
                yield record


class LogReader(LineReader):
    """The records of a log file, read one after the other in bounded memory: iterate over it, once.

    The records are as they stand in the file: NaN and Inf are strings. A line that is no JSON, or longer than 64 MiB,
    is counted and left out. orjson reads the lines where it is installed, Python's json where it is not or refuses
    one; the records are the same.

    Args:
        path: the file. It is opened by iterating.
        progress: called with the number of bytes read so far, every now and then.

    Attributes:
        skipped_lines, num_skipped, model: as in `JsonlLog`, so far; `model` is another dict after each note.
        run_id: of the run that the newest record belongs to; "" if the log does not say.
        num_runs: runs so far, with the newest record's; `fill` takes the last one.
        line: number, from 1, of the line that was read last.

    Raises:
        OSError, ValueError: as `read_jsonl`; when iterated.

    Cost: 2 us a line with orjson, 5 us without.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[int], object] | None = None) -> None:
        super().__init__(path, None)
        self._progress = progress

    def __iter__(self) -> Iterator[dict[str, Any]]:
        report = self._progress or (lambda num_bytes: None)
        with open(self.path, "rb") as self._lines:
            for record in super().__iter__():
                yield record
                if not self.line % _REPORT_EVERY:
                    report(self._lines.tell())
            report(self._lines.tell())


class JsonlLog(_LogFacts, Sequence[dict[str, Any]]):
    """The records of a log file, oldest first: a sequence of dicts that also knows what it could not read.

    It has the lines that were there when it was made: those of the last run, if the file holds several. Of a file of
    more than 8 MiB it keeps no records, but where they are: each is read from the file again whenever it is asked for,
    and is a new dict.

    Attributes:
        run_id: of the run; "" if the log does not say.
        num_runs: how many runs the file holds.
        skipped_lines: numbers, from 1, of the first thousand lines that a crash or a full disk cut off.
        num_skipped: how many there are.
        model: what was noted of the model (`fastguard.records.ModelNotes`), as it was at last; empty if nothing.

    Raises:
        OSError, ValueError: as `read_jsonl`; ValueError too when a record is asked for that is no longer in the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._kept: list[dict[str, Any]] | None = []
        self._starts, self._sums = array("Q"), array("I")
        self._lock = threading.Lock()
        self._parse = _parser()
        self._file = _seekable(path)
        self._close = weakref.finalize(self, self._file.close)
        try:
            self._read()
        finally:
            if self._kept is not None:
                self._close()

    def _read(self) -> None:
        lines = _PlacedLines(self._file)
        reader = LineReader(self.path, lines)
        for record in reader:
            if reader.num_runs != self.num_runs:
                self.num_runs = reader.num_runs
                self._starts, self._sums = array("Q"), array("I")
                self._kept = self._kept and []
            text = _text_of(lines.line)
            try:
                record = _decoded(record, text)
            except RecursionError:
                reader._skip(reader.line)
                continue
            self._starts.append(lines.start)
            self._sums.append(zlib.crc32(text))
            if self._kept is not None:
                self._kept.append(record)
                if lines.start > KEPT_BYTES:
                    self._kept = None
        self.skipped_lines, self.num_skipped, self.model = reader.skipped_lines, reader.num_skipped, reader.model
        self.run_id = reader.run_id
        self._warn_of_runs()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if self._kept is not None:
            return self._kept[index]
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        start, known = self._starts[index], self._sums[index]
        with self._lock:
            self._file.seek(start)
            text = _text_of(self._file.readline())
        record = self._parse(text) if zlib.crc32(text) == known else None
        if record is None:
            raise ValueError(f"the log was emptied or written anew after it was read - at {shown(self.path)}")
        return _decoded(record, text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, JsonlLog)):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"JsonlLog({str(self.path)!r}, {len(self)} records)"


class _PlacedLines:
    """Lines of a file, and where the one that was read last begins."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = self.start = 0
        self.line = b""

    def readline(self, limit: int, /) -> bytes:
        self.start = self._end
        self.line = self._file.readline(limit)
        self._end += len(self.line)
        return self.line


def _seekable(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, or what a pipe gives, as one."""
    file = open(path, "rb")  # noqa: SIM115 - the log closes it
    if file.seekable():
        return file
    import shutil
    import tempfile

    copy = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
    with file:
        shutil.copyfileobj(file, copy)
    copy.seek(0)
    return copy


def _text_of(line: bytes) -> bytes:
    return line.removeprefix(_UTF8_MARK).strip()


def read_jsonl(path: str | os.PathLike[str]) -> JsonlLog:
    """The records that a `JsonlSink` wrote to `path`, with NaN and Inf as floats.

    A line that was cut off is left out and listed in `.skipped_lines`; a file that is still being written can be read.

    Raises:
        OSError: if the file can't be read.
        ValueError: at a line that was never the beginning of a record: this is some other file.

    Cost: one pass over the file, 10 us a line; of more than 8 MiB half of it now, and all of it again when the records
    are iterated over. 2 KB a line, at most 50 MB; from then on 12 bytes a line.
    """
    return JsonlLog(path)


def run_id_of(path: str | os.PathLike[str]) -> str | None:
    """The id of the run that the log at `path` belongs to: "" if it does not say, None if it is empty."""
    with open(path, "rb") as file:
        reader = LineReader(path, file)
        is_empty = next(iter(reader), None) is None and not (reader.model or reader.run_id)
        return None if is_empty else reader.run_id


def _decoded(record: dict[str, Any], text: bytes) -> dict[str, Any]:
    """`record` with NaN and Inf as floats, wherever a value stands; a tensor may be called "NaN".

    Its `text` nearly always shows that there is none: neither by name nor, behind an escape, in another spelling.
    """
    is_plain = b'NaN"' not in text and b'Infinity"' not in text and b"\\" not in text
    if is_plain and text.count(b"[") + text.count(b"{") <= _NESTED:  # else it may be too deep to be gone into
        return record
    names = {key: record.pop(key) for key in ("nonfinite", "model") if key in record}
    return {**strict_json.decode(record), **names}


def _refusal(line: bytes, path: str | os.PathLike[str], number: int) -> str:
    what = next((what for start, what in _OTHER_FILES.items() if number == 1 and line.startswith(start)), None)
    what = what or f"'{shown(line[:40].decode(errors='backslashreplace'))}'"
    return f"a log must have one JSON object per line, got {what} - at {shown(path)}, line {number}"


def _parser() -> _Parse:
    """What gives the object that a line starting with a brace stands for, None if it is no JSON."""
    try:
        quick = importlib.import_module("orjson").loads
    except ImportError:
        return _parse

    def parse(line: bytes) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = quick(line)
        except (ValueError, RecursionError, MemoryError):
            return _parse(line)  # cut off; or a bare NaN, half a surrogate, 1e999, which Python's json reads
        return record

    return parse


_raw_decode = json.JSONDecoder().raw_decode


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        text = line.decode()
        record, end = _raw_decode(text)
    except (ValueError, RecursionError, MemoryError):  # among the first: bytes that are not UTF-8, endless digits
        return None
    return record if end == len(text) else None
