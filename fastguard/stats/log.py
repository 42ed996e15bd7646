"""The reader of a log with one JSON object a line. `fastguard.sinks.JsonlSink` writes it."""

from __future__ import annotations

import os
from typing import Any

from . import strict_json


class JsonlLog(list[dict[str, Any]]):
    """The records of a log file, oldest first: a list of dicts that also knows what it could not read.

    Attributes:
        skipped_lines: numbers, from 1, of the lines that a crash or a full disk cut off.
        model: what was noted of the model (`fastguard.history.ModelNotes`), as it was at last; empty if nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped_lines: list[int] = []
        self.model: dict[str, Any] = {}

    @property
    def num_skipped(self) -> int:
        """How many lines were cut off."""
        return len(self.skipped_lines)


def read_jsonl(path: str | os.PathLike[str]) -> JsonlLog:
    """The records that a `JsonlSink` wrote to `path`, with NaN and Inf as floats.

    A line that was cut off is left out and listed in `.skipped_lines`; a file that is still being written can be read.

    Raises:
        OSError: if the file can't be read.
        ValueError: at a line that was never the beginning of a record: this is some other file.

    Cost: one pass over the file; 10 us a line.
    """
    log = JsonlLog()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line:
                continue
            if line[:1] not in (b"{", b"\0"):  # some file systems leave zeros where a crash took the data
                raise ValueError(
                    f"`path` must be a log with one JSON object a line, got {line[:40]!r} - at {path}, line {number}"
                )
            record = _parse(line)
            if record is None:
                log.skipped_lines.append(number)
            elif "step" not in record and isinstance(record.get("model"), dict):
                log.model.update(record["model"])
            else:
                log.append(record)
    return log


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = strict_json.loads(line)
    except ValueError:
        return None
    names = record.pop("nonfinite", None)  # names: a tensor may be called "NaN"
    model = record.pop("model", None)  # names as well
    record = strict_json.decode(record)
    if model is not None:
        record["model"] = model
    if names is not None:
        record["nonfinite"] = names
    return record
