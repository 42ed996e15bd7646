"""The reader of a log with one JSON object a line. `fastguard.sinks.JsonlSink` writes it."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

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

MAX_LINE_BYTES = 64 << 20  # a table of half a million tensors
MAX_LISTED = 1000  # lines that could not be read, by number
_OTHER_FILES = {
    b"\x1f\x8b": "a gzip file, which is to be unpacked first",
    b"\x28\xb5\x2f\xfd": "a zstd file, which is to be unpacked first",
    b"\xff\xfe": "text in UTF-16, which is to be saved as UTF-8",
    b"\xfe\xff": "text in UTF-16, which is to be saved as UTF-8",
}
_UTF8_MARK = b"\xef\xbb\xbf"


class _LogFacts:
    """What there is to know of a log beside its records."""

    def __init__(self) -> None:
        self.skipped_lines: list[int] = []
        self.num_skipped = 0
        self.model: dict[str, Any] = {}

    def _skip(self, line: int) -> None:
        self.num_skipped += 1
        if self.num_skipped <= MAX_LISTED:
            self.skipped_lines.append(line)


class JsonlLog(_LogFacts, list[dict[str, Any]]):
    """The records of a log file, oldest first: a list of dicts that also knows what it could not read.

    Attributes:
        skipped_lines: numbers, from 1, of the first thousand lines that a crash or a full disk cut off.
        num_skipped: how many there are.
        model: what was noted of the model (`fastguard.history.ModelNotes`), as it was at last; empty if nothing.
    """


class LogReader(_LogFacts):
    """The records of a log file, read one after the other in bounded memory: iterate over it, once.

    The records are as they stand in the file: NaN and Inf are strings. A line that is no JSON, or longer than 64 MiB,
    is counted and left out. orjson reads the lines where it is installed, Python's json where it is not or refuses
    one; the records are the same.

    Args:
        path: the file. It is opened by iterating.

    Attributes:
        skipped_lines, num_skipped, model: as in `JsonlLog`, so far; `model` is another dict after each note.
        line: number, from 1, of the line that was read last.

    Raises:
        OSError, ValueError: as `read_jsonl`; when iterated.

    Cost: 2 us a line with orjson, 6 us without.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = path
        self.line = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        parse = _parser()
        with open(self.path, "rb") as file:
            read = functools.partial(file.readline, MAX_LINE_BYTES)
            for number, line in enumerate(iter(read, b""), 1):
                if line[-2:] == b"}\n" and line[:8] == b'{"step":':  # as nearly all are
                    record = parse(line)
                    if record is not None:
                        self.line = number
                        yield record
                        continue
                is_whole = len(line) < MAX_LINE_BYTES or line.endswith(b"\n")
                if number == 1:
                    line = line.removeprefix(_UTF8_MARK)
                text = line.strip()
                if not text:
                    continue
                if text[:1] not in (b"{", b"\0"):  # some file systems leave zeros where a crash took the data
                    raise ValueError(_refusal(text, self.path, number))
                if not is_whole:
                    while line and not line.endswith(b"\n"):
                        line = read()
                record = parse(text) if is_whole else None
                if record is None:
                    self._skip(number)
                    continue
                self.line = number
                if "step" not in record and isinstance(record.get("model"), dict):
                    self.model = {**self.model, **record["model"]}
                else:
                    yield record


def read_jsonl(path: str | os.PathLike[str]) -> JsonlLog:
    """The records that a `JsonlSink` wrote to `path`, with NaN and Inf as floats.

    A line that was cut off is left out and listed in `.skipped_lines`; a file that is still being written can be read.

    Raises:
        OSError: if the file can't be read.
        ValueError: at a line that was never the beginning of a record: this is some other file.

    Cost: one pass over the file; 10 us and 2 KB a line. `TrainingHistory.from_jsonl` keeps no lines.
    """
    log, reader = JsonlLog(), LogReader(path)
    for record in reader:
        try:
            log.append(_decoded(record))
        except RecursionError:
            reader._skip(reader.line)
    log.skipped_lines, log.num_skipped, log.model = reader.skipped_lines, reader.num_skipped, reader.model
    return log


def _decoded(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with NaN and Inf as floats, wherever a value stands; a tensor may be called "NaN"."""
    names = {key: record.pop(key) for key in ("nonfinite", "model") if key in record}
    return {**strict_json.decode(record), **names}


def _refusal(line: bytes, path: str | os.PathLike[str], number: int) -> str:
    what = next((what for start, what in _OTHER_FILES.items() if number == 1 and line.startswith(start)), None)
    if what is not None:
        return f"`path` must be a log with one JSON object a line, got {what} - at {shown(path)}"
    return f"`path` must be a log with one JSON object a line, got {line[:40]!r} - at {shown(path)}, line {number}"


def _parser() -> Callable[[bytes], dict[str, Any] | None]:
    """A function that gives the object that a line starting with a brace stands for; None if it is no JSON."""
    try:
        quick = importlib.import_module("orjson").loads
    except ImportError:
        return _parse

    def parse(line: bytes) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = quick(line)
        except (
            ValueError,
            RecursionError,
            MemoryError,
        ):  # cut off; or a bare NaN, half a surrogate, 1e999, which Python's json reads
            return _parse(line)
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
