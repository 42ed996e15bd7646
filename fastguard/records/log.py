"""The reader of a log with one JSON object a line. `fastguard.sinks.JsonlSink` writes it."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .._text import shown
from . import strict_json
from .slot import extension

# Base classes whose attributes lie in C structs: see csrc/state.h.
LineCounts: Any = getattr(extension, "LineCounts", object)
LogState: Any = getattr(extension, "LogState", object)
_log = logging.getLogger("fastguard")
MAX_LINE_BYTES = 64 << 20  # a table of half a million tensors
_raw_decode = json.JSONDecoder().raw_decode
MAX_LISTED = 1000  # lines that could not be read, by number
_NESTED = 100  # lists and dicts
_UTF8_MARK = b"\xef\xbb\xbf"


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
