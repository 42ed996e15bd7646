"""Follows a run through its log while it is written. The rules are imported when first used."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .._text import prose, shown
from ..records import TrainingHistory
from ..records.failures import Failures
from ..records.loading import KEYS, fill
from ..records.log import MAX_LINE_BYTES, LogReader
from .cli import say

ASK_EVERY = 256  # steps: the rules see each one in their window at least once
NUM_LAYERS = 4
_NUM_TIMES = 64


class LogTail:
    """Reads complete lines of a growing file, with `readline` for a `LogReader`.

    A last line without an end is kept until it has one. A file that is moved or deleted is read to its end, then the
    one in its place; a file that is emptied is read from its beginning.

    Attributes:
        budget: lines that `readline` gives before it says b""; set it before each reading.
        offset, size: bytes that were read of the file, and that it held when it was last looked at.
        num_restarts: how often a file was read from its beginning after the first time.
        problem: why it cannot be read now; "" if it can.
    """

    _file: BinaryIO | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.budget = self.offset = self.size = 0
        self.num_restarts = -1
        self.problem = ""
        self._rest = b""
        self._is_watched = self._is_left = False

    @property
    def is_behind(self) -> bool:
        """Whether there are bytes to read."""
        return self._file is not None and self.offset < self.size

    def look(self) -> None:
        """Looks at the state of the file. Call it before each reading. Cost: 20 us."""
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        except OSError as error:  # a network that is down for a while
            self.problem = f"cannot be looked at: {error.strerror}"
            return
        self.problem = "" if there else f"is not there {'yet' if self.num_restarts < 0 else 'any more'}"
        if self._file is None and there is not None:
            self._open(there)
        elif self._file is not None:
            here = os.fstat(self._file.fileno())
            self.size = here.st_size
            self._is_left = self._is_watched and (there is None or not os.path.samestat(there, here))
            if self.size < self.offset:
                self._begin()

    def _open(self, there: os.stat_result) -> None:
        if not stat.S_ISREG(there.st_mode):
            raise ValueError(
                f"`path` must be a file, or a folder with logs, got something else - at {shown(self.path)}"
            )
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115
        except OSError as error:  # gone again, or not to be read by us
            self.problem = f"cannot be read: {error.strerror}"
            return
        here = os.fstat(self._file.fileno())
        self._is_watched = os.path.samestat(there, here)  # some file systems give another number at each look
        self.size, self._is_left = here.st_size, False
        self._begin()

    def _begin(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        self.offset, self._rest = 0, b""
        self.num_restarts += 1

    def readline(self, limit: int = -1, /) -> bytes:
        """The next whole line, with its end; b"" if there is none now, or the budget is spent."""
        while self.budget > 0 and self._file is not None:
            try:
                line = self._file.readline(MAX_LINE_BYTES - len(self._rest))
            except OSError as error:  # opened again at the next look
                self.problem = f"cannot be read: {error.strerror}"
                self.close()
                break
            self.offset += len(line)
            self._rest += line
            if self._rest.endswith(b"\n") or len(self._rest) >= MAX_LINE_BYTES:
                self.budget -= 1
                line, self._rest = self._rest, b""
                return line
            if not line:
                if not self._is_left:
                    break
                self.close()  # what has no end there never will have one
                self.look()
        self.size = max(self.size, self.offset)
        return b""

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    __del__ = close


class LayerLine(NamedTuple):
    """A layer: norm of its gradient, share of zeros, update over weight."""

    name: str
    norm: float
    zero_share: float
    update_ratio: float | None
    is_named: bool  # by a finding


class _Records(list[dict[str, Any]]):
    """Some records, and what is known of the model since."""

    model: dict[str, Any]


class FollowedRun:
    """The run of a log, read as far as it is written. What cannot be read of it is counted, and left out.

    Args:
        path: the log; it need not be there yet.

    Attributes:
        tail, log: the file, and its records.
        history: the run.
        report: of the newest `assess`; None before.
        told: new findings, the oldest first: one per rule, and another when it becomes more severe.
        num_assessed: steps there were at the newest `assess`.
        layers: those that findings name, then those with the largest gradients; as of the newest `assess`.
        num_records, num_left_out: records so far, of all runs; lines that are no record, or were cut off.
        newest_step: -1 before there was a step.
        went_back_to: the step with which the run went on from an earlier one; None if it never did.
        times: when the newest lines were written, in seconds since 1970.
    """

    def __init__(self, path: Path) -> None:
        self.tail = LogTail(path)
        self.log = LogReader(path, lines=self.tail)
        self.num_records = self._num_misfits = 0
        self._num_runs = 1
        self._is_log = False
        self._begin()

    def _begin(self) -> None:
        self.history = TrainingHistory()
        self.report: Any = None
        self.told: list[Any] = []
        self.layers: list[LayerLine] = []
        self.newest_step = -1
        self.went_back_to: int | None = None
        self.times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._failures = Failures()
        self._noted: Any = None
        self._num_asked = self.num_assessed = 0

    @property
    def num_left_out(self) -> int:
        return self._num_misfits + self.log.num_skipped

    @property
    def has_news(self) -> bool:
        """Whether there are steps that the rules were not asked about."""
        return self.history.num_steps != self.num_assessed

    def read(self, seconds: float = float("inf")) -> bool:
        """Reads what has been written, for about `seconds`; returns whether there is more.

        Raises:
            ValueError: this is no log.
        """
        until = time.monotonic() + seconds
        self.tail.look()
        while True:
            self.tail.budget = ASK_EVERY
            records: list[dict[str, Any]] = []
            try:
                for record in self.log:
                    if self.log.num_runs != self._num_runs:
                        self._num_runs = self.log.num_runs
                        records = []
                        self._begin()
                    if self._is_new(record):
                        self.num_records += 1
                        records.append(record)
            except ValueError:
                if self.log.line == 1:
                    raise
                self._num_misfits += 1
            is_at_end = self.tail.budget == ASK_EVERY
            self._take(records)
            if self.history.num_steps - self._num_asked >= ASK_EVERY:
                from ..diagnosis import diagnose

                self._num_asked = self.history.num_steps
                self._tell(diagnose(self.history, failures=self._failures))
            if is_at_end or time.monotonic() > until:
                return self.tail.is_behind and not is_at_end

    def _is_new(self, record: dict[str, Any]) -> bool:
        """Whether a record is new. A sink repeats what it last wrote to a file that was deleted."""
        step, written = record.get("step"), record.get("time")
        if type(step) is int and 0 <= step < 2**63:
            if step <= self.newest_step:
                if self.tail.num_restarts and written in self.times:
                    return False
                self.went_back_to = step
            self.newest_step = step
            self.times.append(written if type(written) is float else time.time())
        return True

    def _take(self, records: list[dict[str, Any]]) -> None:
        """Adds the records to the history, except those that do not fit."""
        history, num_steps, part = self.history, self.history.num_steps, _Records(records)
        lacks_norms = history.lacks_norms or not num_steps
        if self.log.model is not self._noted:
            self._noted = part.model = self.log.model
        try:
            fill(history, part, self.tail.path)
        except ValueError:
            if not (self._is_log or history.num_steps or hasattr(part, "model")):
                raise
            places = [i + 1 for i, record in enumerate(records) if "step" in record]
            taken = history.num_steps - num_steps
            for record in records[places[taken - 1] if taken else 0 :]:
                try:
                    fill(history, [record] if record.keys() & KEYS - {"time"} else [], self.tail.path)
                except ValueError:
                    self._num_misfits += 1
                lacks_norms = lacks_norms and history.lacks_norms
        history.lacks_norms = history.lacks_norms and lacks_norms
        self._is_log = self._is_log or history.num_steps > 0

    def _tell(self, findings: Iterable[Any]) -> None:
        known = {(told.rule, told.severity) for told in self.told}
        for finding in findings:
            worse = ("info", "warning", "critical")
            if not any((finding.rule, one) in known for one in worse[worse.index(finding.severity) :]):
                self.told.append(finding)

    def assess(self) -> None:
        """Asks the rules and causes, and chooses the layers to show. Cost: 2 ms, and 1 us a tensor."""
        self._num_asked = self.num_assessed = self.history.num_steps
        named: list[str] = []
        if self.history.num_steps:
            from ..report import build_report

            self.report = build_report(self.history, failures=self._failures)
            self._tell(self.report.findings)
            named = [layer for finding in self.report.findings for layer in finding.layers]
        tracks = dict(self.history.tensors.items())
        by_norm = sorted(tracks, key=lambda name: tracks[name].norm, reverse=True)
        chosen = [name for name in dict.fromkeys((*named, *by_norm)) if name in tracks][:NUM_LAYERS]
        weights = {name: sampled.last.value for name, sampled in self.history.weights.items() if name in chosen}
        ratios = [weights[name].update_ratio if name in weights else None for name in chosen]
        self.layers = [
            LayerLine(name, tracks[name].norm, tracks[name].zero_share, ratio, name in named)
            for name, ratio in zip(chosen, ratios)
        ]


def line_of(finding: Any) -> str:
    """A finding in one line."""
    from ..report.report import headline

    advice = f" What to do: {finding.recommendation}" if finding.recommendation else ""
    return f"{headline(finding)}: {prose(finding.summary + advice)}"


def newer_run(path: Path) -> str:
    """A remark if `path`, run.jsonl or run-2.jsonl, has a newer run in run-3.jsonl, for example; else ""."""
    stem, number = re.fullmatch(r"(.*?)(?:-(\d+))?", path.stem, re.DOTALL).groups()  # type: ignore[union-attr]
    newest = path
    with contextlib.suppress(OSError):  # there is no further one
        for place in itertools.count(int(number or 1) + 1):
            newest = max(newest, path.with_name(f"{stem}-{place}{path.suffix}"), key=os.path.getmtime)
    return "" if newest is path else f"{shown(path)} holds an older run: the newest is in {shown(newest.name)}"


def log_at(path: Path, command: str = "") -> Path:
    """`path`; for a folder, the newest log in it or in one of its folders. `command` says if there is a newer run.

    Raises:
        FileNotFoundError: the folder has none.
    """
    if not path.is_dir():
        if command and (remark := newer_run(path)):
            say(command, remark)
        return path
    found = []
    for pattern in ("*.jsonl", "*/*.jsonl"):
        for log in path.glob(pattern):
            with contextlib.suppress(OSError):  # gone since
                found.append((log.stat().st_mtime_ns, log))
    if not found:
        raise FileNotFoundError(f"there is no *.jsonl in {shown(path)}, nor in a folder in it")
    return max(found)[1]
