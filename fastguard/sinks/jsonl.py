"""A log file of one JSON object a line, which survives crashes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ..stats import StepStats, strict_json
from ..stats.log import JsonlLog as JsonlLog
from ..stats.log import read_jsonl as read_jsonl
from .sink import Sink, flatten_step

_FLAGS = os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


class JsonlSink(Sink):
    """Writes each record as one line of strict JSON, under the keys of `fastguard.sinks.flatten`, for the gradients.

    A line also has `time` (seconds since 1970, when it was written). Every `tensors_every` steps, and at every step
    with NaN or Inf, it has `tensors`: a list of numbers for each name, in the order of `fastguard.stats.COLUMNS`.
    A step at which activations or weights were sampled has `activations` or `weights`: for each name a dict with the
    fields of `ModuleActivity` (those of its `stats` among them) or `WeightStats`.
    NaN and Inf are the strings "NaN", "Infinity" and "-Infinity". The keys that a step has no value for are left out.

    A line is a single unbuffered write to the end of the file, so a crash loses at most the line being written. A line
    cut off by an earlier crash is closed before the first new one.

    Args:
        path: the file; parent folders are made.
        tensors_every: steps from one table of all tensors to the next (those whose number it divides); 0 writes it
            only when there is a NaN or an Inf.
        append: go on at the end of an existing file; False starts it anew.

    Raises:
        OSError: if the file can't be opened; at once, not at the first step.

    Cost: 10 us and 330 bytes a step; 2 us and 100 bytes more for each tensor in a table, 10 us
    and 400 bytes for each sampled module or weight. No sync.
    """

    def __init__(self, path: str | os.PathLike[str], *, tensors_every: int = 100, append: bool = True) -> None:
        if tensors_every < 0:
            raise ValueError(f"`tensors_every` must be at least 0, got {tensors_every}. 0 writes no regular tables.")
        self.path = Path(path)
        self.tensors_every = tensors_every
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._is_cut_off = append and _is_cut_off(self.path)
        self._fd = os.open(self.path, os.O_WRONLY | _FLAGS | (0 if append else os.O_TRUNC), 0o666)

    def write(self, record: StepStats) -> None:
        """Writes one line.

        Raises:
            ValueError: after `close`.
            OSError: if the line could not be written whole; the next one will stand on a line of its own.
        """
        if self._fd < 0:
            raise ValueError(f"`JsonlSink` must be open to write, got a closed one - at {self.path}. Make a new one.")
        flat = flatten_step(record)
        line = {"step": flat.pop("step"), "time": round(time.time(), 6), **flat}
        is_due = self.tensors_every and record.step % self.tensors_every == 0
        if is_due or not record.is_finite:
            line["tensors"] = dict(zip(record.tensors.names, record.tensors, strict=True))
        for key, items in (("activations", record.activations), ("weights", record.weights)):
            if items:
                line[key] = {item.name: _without_name(item.to_dict()) for item in items}
        self._append(line)

    def write_line(self, step: int, line: bytes) -> bool:
        """Writes a clean step as the line that it is, unless its table is due; whether it did.

        Args:
            line: what `write` would make of the record, as far as the step has neither a table nor samples.

        Raises:
            ValueError, OSError: as `write`.
        """
        if self._fd < 0:
            raise ValueError(f"`JsonlSink` must be open to write, got a closed one - at {self.path}. Make a new one.")
        if self.tensors_every and step % self.tensors_every == 0:
            return False
        if self._is_cut_off:
            self._append_text(line)
        elif (num_written := os.write(self._fd, line)) < len(line):
            self._is_cut_off = True
            self._finish(line, num_written)
        return True

    def note(self, facts: dict[str, Any]) -> None:
        """Writes what is known of the model, or what changed of it, as a line of its own: a dict under `model`.

        Raises:
            ValueError, OSError: as `write`.
        """
        if self._fd < 0:
            raise ValueError(f"`JsonlSink` must be open to write, got a closed one - at {self.path}. Make a new one.")
        self._append({"time": round(time.time(), 6), "model": facts})

    def _append(self, line: dict[str, Any]) -> None:
        self._append_text(strict_json.dumps(line).encode("ascii") + b"\n")

    def _append_text(self, text: bytes) -> None:
        self._finish(b"\n" + text if self._is_cut_off else text, 0)

    def _finish(self, text: bytes, num_written: int) -> None:
        while num_written < len(text):
            num_written += os.write(self._fd, text[num_written:])
            self._is_cut_off = num_written < len(text)

    def close(self) -> None:
        """Closes the file; again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def __repr__(self) -> str:
        return f"JsonlSink({str(self.path)!r})"


def _without_name(plain: dict[str, Any]) -> dict[str, Any]:
    del plain["name"]
    return plain


def _is_cut_off(path: Path) -> bool:
    """Whether `path` is a regular file whose last line has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
