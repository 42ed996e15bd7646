"""A log file with one JSON object per line, which survives crashes."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..records import StepStats, strict_json
from ..records.log import JsonlLog as JsonlLog
from ..records.log import LogState, run_id_of
from ..records.log import read_jsonl as read_jsonl
from .sink import Sink, flatten_step

_log = logging.getLogger("fastguard")
_monotonic = time.monotonic
_FLAGS = os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_SAMPLED = ("activations", "weights", "batches")
LOOK_EVERY_S = 0.25  # how often the sink checks that its file is still there


class JsonlSink(Sink, LogState):
    """Writes each record as one line of strict JSON. The keys are those of `fastguard.sinks.flatten`.

    A line also has `time`, when it was written, in seconds since 1970. Every `tensors_every` steps, and at every step
    with NaN or Inf, it has `tensors`: for each name a list of numbers in the order of `fastguard.records.COLUMNS`.
    A step with sampled activations or weights has `activations` or `weights`: for each name the fields of
    `ModuleActivity`, with those of its `stats`, or of `WeightStats`. If a clip policy clips groups separately,
    `clip/groups` has the norm, the clipped norm and the trigger of each. NaN and Inf are the strings "NaN", "Infinity"
    and "-Infinity". A value that is not known has no key.

    A line is a single unbuffered write to the end of the file, so a crash loses at most the line being written. A line
    cut off by an earlier crash is closed before the first new one.

    If the file is moved away, deleted or emptied, the sink notices within a quarter of a second, warns, and continues
    in a new file at `path`. The new file starts with the facts about the model, and with the lines that went into a
    deleted file in the meantime.

    Args:
        path: the file; parent folders are created. The attribute is the file that is written.
        tensors_every: write the table of all tensors at steps divisible by this number; 0 writes it only when there is
            a NaN or an Inf.
        append: True appends to an existing file, False empties it. None appends only to a log of the same run, whose
            guard was resumed by `load_state_dict`; any other run goes to a new file beside it, such as `run-2.jsonl`.

    Raises:
        OSError: the file can't be opened, or is a FIFO. Raised here, not at the first step.

    Cost: 10 us and 330 bytes a step; 2 us and 100 bytes more for each tensor in a table, 10 us and 400 bytes for each
    sampled module or weight; four times a second 5 us. No sync.
    """

    def __init__(self, path: str | os.PathLike[str], *, tensors_every: int = 100, append: bool | None = None) -> None:
        if tensors_every < 0:
            raise ValueError(f"`tensors_every` must be at least 0, got {tensors_every}. 0 writes no regular tables.")
        self.path = Path(path)
        self.tensors_every = tensors_every
        self._given = self.path if append is None else None
        self._run_id: str | None = None
        self._model: dict[str, Any] = {}
        self._owed: list[bytes] = []  # lines that must be written before the next one
        self._fd = -1
        self._torn = bytearray(1)  # whether the file ends within a line; C++ writes it too
        self._tried: tuple[int | None, bytes] = None, b""  # the newest line, and the step that it is of
        self._look_at = _monotonic() + LOOK_EVERY_S
        self._open(append is not False)

    def _open(self, append: bool) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = _open(self.path, 0 if append else os.O_TRUNC)
        status, self._torn[0] = os.fstat(self._fd), False
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and status.st_size:
            with self.path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                self._torn[0] = file.read(1) != b"\n"
        # A FIFO or device is not watched, nor is a file to which the file system gives another number at each look.
        self._is_watched = is_file and os.path.samestat(status, os.stat(self.path))
        self._size = status.st_size

    def write(self, record: StepStats) -> None:
        """Writes one line.

        Raises:
            ValueError: the sink is closed.
            OSError: the line could not be written completely; the next one starts on a new line.
        """
        flat = flatten_step(record)
        line = {"step": flat.pop("step"), "time": round(time.time(), 6), **flat}
        is_due = self.tensors_every and record.step % self.tensors_every == 0
        if is_due or not record.is_finite:
            line["tensors"] = dict(zip(record.tensors.names, record.tensors, strict=True))
        if record.groups:
            line["clip/groups"] = {group.name: list(group[1:]) for group in record.groups}
        line.update(_plain({name: getattr(record, name) for name in _SAMPLED}))
        self._append(_line_of(line), record.step)

    def write_line(self, step: int, line: bytes) -> bool:
        """Writes the line of a clean step, unless its table is due; returns whether it did.

        Args:
            line: the line that `write` would write for a step without a table.

        Raises:
            ValueError, OSError: as `write`.
        """
        if self.tensors_every and step % self.tensors_every == 0:
            return False
        self._append(line, step)
        return True

    def note(self, facts: dict[str, Any]) -> None:
        """Writes new or changed facts about the model as a line: a dict under `model`. Raises as `write`."""
        run_id = facts.get("run_id")
        if run_id == "":  # resumed from the state of a rank without sinks: the run continues in this file
            facts = {name: fact for name, fact in facts.items() if name != "run_id"}
        elif run_id is not None and run_id != self._run_id:
            self._choose_file(run_id)
            self._run_id, self._model = run_id, {}
        self._model.update(facts)
        line = _line_of_model(facts)
        try:
            self._append(line, None)
        except OSError:
            self._owed.append(line)
            self._look_at = 0.0
            raise

    def _choose_file(self, run_id: str) -> None:
        """Continues in the first of run.jsonl, run-2.jsonl, ... that contains this run or no run."""
        given = self._given
        if given is None or not given.is_file():  # a FIFO or a device
            return
        self._release()
        for number in itertools.count(1):
            self.path = given if number == 1 else given.with_name(f"{given.stem}-{number}{given.suffix}")
            try:
                holder = run_id_of(self.path)
            except FileNotFoundError:
                holder = None
            except (PermissionError, ValueError):  # a file of another kind
                continue
            if holder in (None, run_id):
                self._open(append=True)
                if holder is None:  # if several processes start at once, the first to write this line gets the file
                    os.write(self._fd, _line_of({"time": round(time.time(), 6), "run_id": run_id}))
                    holder = run_id_of(self.path)
                if holder in (None, run_id):
                    break
                self._release()
        if number > 1:
            _log.warning("log %s holds another run; this run is written to %s", given, self.path)

    def has_taken(self, step: int) -> bool | None:
        """Whether the last line written is that of `step`; None if that cannot be read back."""
        tried, text = self._tried
        if tried != step:
            return False
        try:
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            found = os.pread(self._fd, len(text), max(0, end - len(text)))
        except (OSError, AttributeError):  # a FIFO, a system without pread
            return None
        if end:
            self._torn[0] = found[-1:] != b"\n"
        return found == text

    def _append(self, text: bytes, step: int | None) -> None:
        """Writes a line, which is that of `step` unless that is None."""
        if self._fd < 0:
            raise ValueError(f"`JsonlSink` must be open to write, got a closed one - at {self.path}. Make a new one.")
        if _monotonic() >= self._look_at:
            self._check_file()
        self._tried = step, text
        if self._torn[0]:
            self._finish(b"\n" + text, 0)
        elif (num_written := os.write(self._fd, text)) < len(text):
            self._finish(text, num_written)

    def _finish(self, text: bytes, num_written: int) -> None:
        while num_written < len(text):
            self._torn[0] |= num_written > 0
            num_written += os.write(self._fd, text[num_written:])
        self._torn[0] = False

    def _check_file(self) -> None:
        """Continues in a new file if this one is gone, and writes the lines that are owed."""
        self._look_at = 0.0  # should this fail, the next line tries again
        if self._is_watched:
            here, facts = os.fstat(self._fd), [_line_of_model(self._model)] if self._model else []
            if not _is_at(self.path, here):
                self._owed = facts
                if not here.st_nlink:  # else all lines are in the file that was moved away
                    self._owed += self._lines_since(self._size)
                old = self._fd
                self._open(append=True)
                os.close(old)
                fate = "moved away" if here.st_nlink else "deleted"
                _log.warning("log %s was %s while it was being written; it continues in a new file", self.path, fate)
            elif here.st_size < self._size:
                self._owed = facts
                self._size = 0
                _log.warning("log %s was emptied while it was being written", self.path)
        while self._owed:
            self._finish(b"\n" + self._owed[0] if self._torn[0] else self._owed[0], 0)
            del self._owed[0]
        self._size = os.fstat(self._fd).st_size
        self._look_at = _monotonic() + LOOK_EVERY_S

    def _lines_since(self, start: int) -> list[bytes]:
        """What was written to this file, now deleted, since it was last seen at its path."""
        try:
            lines = os.pread(self._fd, max(0, os.fstat(self._fd).st_size - start), start)
        except (OSError, AttributeError) as error:  # a system without pread
            _log.warning("the last lines of the deleted log %s cannot be saved: %s", self.path, error)
            return []
        return [lines if lines.endswith(b"\n") else lines + b"\n"] if lines else []

    def close(self) -> None:
        """Closes the file. A second call does nothing.

        Raises:
            OSError: the file was deleted shortly before, and no new one can be written.
        """
        self._given = None
        if self._fd >= 0:
            try:
                self._check_file()
            finally:
                self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_torn"):  # else `__init__` has refused an argument
            self._release()

    def __repr__(self) -> str:
        return f"JsonlSink({str(self.path)!r})"


def with_samples(line: bytes, samples: Mapping[str, Any]) -> bytes:
    """The line of a clean step with sampled fields of its record, byte for byte as `JsonlSink.write` has it."""
    start, mark, rest = line.partition(b',"clip/coef"')
    cosine = samples.get("grad_cosine")
    known = {} if cosine is None else {"grad/cosine": cosine}
    return start + _items(known) + mark + rest[:-2] + _items(_plain(samples)) + b"}\n"


def _items(plain: dict[str, Any]) -> bytes:
    return b"," + _line_of(plain)[1:-2] if plain else b""


def _plain(samples: Mapping[str, Any]) -> dict[str, Any]:
    """What was sampled of modules, weights and batches, as plain data."""
    plain: dict[str, Any] = {}
    for key in _SAMPLED[:2]:
        if items := samples.get(key):
            of_each = [item.to_dict() for item in items]
            plain[key] = {one.pop("name"): one for one in of_each}
    if batches := samples.get("batches"):
        plain["batches"] = [batch.to_dict() for batch in batches]
    return plain


def _line_of(plain: dict[str, Any]) -> bytes:
    return strict_json.dumps(plain).encode("ascii") + b"\n"


def _line_of_model(facts: dict[str, Any]) -> bytes:
    return _line_of({"time": round(time.time(), 6), "model": facts})


def _open(path: Path, flags: int) -> int:
    """A descriptor to append to `path`, and to read back from it."""
    if path.is_fifo():  # which would fill up, and let the training wait
        raise OSError(errno.EINVAL, "`path` must be a file, got a FIFO", str(path))
    return os.open(path, os.O_RDWR | _FLAGS | flags, 0o666)


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Whether the file with this status is still at `path`; True if the file system cannot tell."""
    try:
        return os.path.samestat(os.stat(path), status)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
