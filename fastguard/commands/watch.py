"""`fastguard watch`: a run as a block of text, from the log that it is writing. Needs no torch."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import stat
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from .._text import count, number, prose, shown
from ..records import TrainingHistory
from ..records.failures import Failures
from ..records.loading import fill
from ..records.log import LogReader
from ..records.model import ModelNotes
from .cli import Parser, say

_LINES_AT_ONCE = 256
_ASSESS_EVERY_S = 2.0
_BUSY_SHARE = 0.8  # of the time between two looks, while a long log is read


class FollowedRun:
    """The run of a log, read as far as it is written. Lines that cannot be read are counted and left out.

    A last line without an end waits until it has one. Another file in the log's place, or an emptied one, is another
    log, which is read from its beginning.

    Args:
        path: the log; it need not be there yet.

    Attributes:
        path, log: the file, and the reader of its records.
        problem: why the file cannot be read now; "" if it can.
        history: the run.
        report: of the newest `assess`; None before.
        num_left_out: lines that are no record, or were cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.problem = path, ""
        self._file: BinaryIO | None = None
        self._has_identity = False
        self._budget = 0
        self._begin_log()

    def _begin_log(self) -> None:
        self.log = LogReader(self.path, lines=self)
        self._num_runs, self._num_misfits = 1, 0
        self._begin_run()

    def _begin_run(self) -> None:
        self.history = TrainingHistory()
        self.report: Any = None
        self._failures = Failures()
        self._noted: Any = None
        self._num_assessed = 0

    @property
    def num_left_out(self) -> int:
        return self._num_misfits + self.log.num_skipped

    @property
    def newest_step(self) -> int:
        """-1 before there is one."""
        return self.history.step[-1] if self.history.num_steps else -1

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    __del__ = close

    def _look(self) -> None:
        """Opens the file, unless it is the one that is open."""
        there = os.stat(self.path)
        if self._file is not None:
            is_same = not self._has_identity or os.path.samestat(there, os.fstat(self._file.fileno()))
            if is_same and there.st_size >= self._file.tell():
                return
        if not stat.S_ISREG(there.st_mode):
            raise ValueError(
                f"`path` must be a file, or a folder with logs, got something else - at {shown(self.path)}"
            )
        self.close()
        self._file = open(self.path, "rb")  # noqa: SIM115
        # some file systems give another number at each look
        self._has_identity = os.path.samestat(there, os.fstat(self._file.fileno()))
        self._begin_log()

    def readline(self, limit: int = -1, /) -> bytes:
        """The next whole line, for the `LogReader`; b"" if there is none now, or enough were read."""
        if self._file is None or self._budget <= 0:
            return b""
        place, line = self._file.tell(), self._file.readline(limit)
        if not line.endswith(b"\n") and len(line) != limit:
            self._file.seek(place)
            return b""
        self._budget -= 1
        return line

    def read(self, seconds: float = math.inf) -> bool:
        """Reads what has been written, for about `seconds`; returns whether there may be more.

        Raises:
            ValueError: this is no log.

        Cost: 25 us a line.
        """
        until = time.monotonic() + seconds
        try:
            self._look()
            self.problem = ""
        except (FileNotFoundError, NotADirectoryError):
            self.problem = "is not there"
        except OSError as error:  # a network that is down for a while
            self.problem = f"cannot be read: {error.strerror}"
        while not self.problem:
            self._budget = _LINES_AT_ONCE
            try:
                for record in self.log:
                    self._take(record)
                if self.log.model is not self._noted:
                    self._noted = self.log.model
                    self.history.model = ModelNotes.of(self._noted)
            except ValueError:
                if self.log.line == 1:
                    raise
                self._num_misfits += 1
            except OSError as error:
                self.problem = f"cannot be read: {error.strerror}"
            if self._budget == _LINES_AT_ONCE or time.monotonic() > until:
                return self._budget == 0
        return False

    def _take(self, record: dict[str, Any]) -> None:
        """Adds a record to the history of its run."""
        if self.log.num_runs != self._num_runs:
            self._num_runs = self.log.num_runs
            self._begin_run()
        lacks_norms = self.history.lacks_norms or not self.history.num_steps
        fill(self.history, [record], self.path)
        self.history.lacks_norms = self.history.lacks_norms and lacks_norms

    def assess(self) -> None:
        """Asks the rules about new steps. Cost: 2 ms."""
        if self.history.num_steps != self._num_assessed:
            from ..report import build_report

            self._num_assessed = self.history.num_steps
            self.report = build_report(self.history, failures=self._failures)


def lines_of(run: FollowedRun) -> list[str]:
    """The newest numbers of the run, and its report as `fastguard diagnose` prints it, in printable ASCII."""
    lines = [shown(run.path)]
    lines += [f"the log {shown(run.problem)}"] if run.problem else []
    lines += filter(None, [newer_run(run.path)])
    lines += [f"run {run.log.num_runs:,} of this log"] if run.log.num_runs > 1 else []
    lines += [f"{count(run.num_left_out, 'damaged line')} left out"] if run.num_left_out else []
    if run.newest_step < 0:
        return [*lines, "WAITING for a step"]
    newest = []
    for label, name in (("loss", "loss"), ("grad norm", "norm"), ("val loss", "val_loss"), ("lr", "lr")):
        source = run.history.validations if name == "val_loss" else run.history.recent
        known = [value for value in (getattr(one, name) for one in source) if value is not None]
        newest += [f"{label} {number(known[-1])}"] if known else []
    lines.append(f"step {run.newest_step:,}: {', '.join(newest)}")
    return [*lines, "", *str(run.report or "not judged yet").splitlines()]


def line_of(finding: Any) -> str:
    """A finding in one line."""
    from ..report.text import headline

    advice = f" What to do: {finding.recommendation}" if finding.recommendation else ""
    return f"{headline(finding)}: {prose(finding.summary + advice)}"


def main(argv: list[str]) -> int:
    """Shows a run until Ctrl-C. Returns 0 then; 3 if the log cannot be read."""
    parser = Parser(
        "fastguard watch",
        "Shows a run while it writes its log: its status, its newest numbers, and findings as they appear. The log may "
        "not exist yet, and may be moved away or restarted. If stdout is not a terminal, prints one line per finding.",
        "exit codes: 0 ended by Ctrl-C; 1 output pipe closed; 3 the log cannot be read; 64 an argument is wrong",
    )
    parser.add_argument("log", metavar="RUN.jsonl", help="the log, or a folder whose newest log is shown")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two looks (default: 0.5)")
    arguments = parser.parse_args(argv)
    if not 0.05 <= arguments.interval <= 3600:
        parser.error(f"`--interval` must be from 0.05 to 3600, got {arguments.interval:g}")
    with contextlib.suppress(KeyboardInterrupt):
        run = FollowedRun(_log_at(Path(arguments.log), arguments.interval))
        say("watch", f"watching {run.path}")
        with contextlib.suppress(KeyboardInterrupt):
            _follow(run, arguments.interval)
        status = run.report.status.upper().replace("-", " ") if run.report else "not judged"
        say("watch", f"{status} after {count(run.history.num_steps, 'step')}")
    return 0


def _follow(run: FollowedRun, interval: float) -> None:
    """Reads and shows the run for ever: as a block that fits the terminal, or as lines where there is none."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    assessed_at, drawn, problem = 0.0, "", ""
    history, printed = run.history, set[tuple[str, str]]()
    while True:
        began = time.monotonic()
        if not run.read(_BUSY_SHARE * interval) and began - assessed_at >= _ASSESS_EVERY_S:
            run.assess()
            assessed_at = began
        if is_terminal:
            width, height = shutil.get_terminal_size()
            block = "\n".join(line[: width - 1] for line in lines_of(run)[: height - 1])
            if block != drawn:
                print(f"\x1b[H\x1b[2J{block}", flush=True)
                drawn = block
        else:
            if run.problem != problem:
                problem = run.problem
                say("watch", f"{run.path} {problem}; waiting" if problem else f"reading {run.path}")
            if run.history is not history:  # another run's
                history, printed = run.history, set()
            for finding in run.report.findings if run.report is not None else ():
                if (finding.rule, finding.severity) not in printed:
                    print(line_of(finding), flush=True)
                    printed.add((finding.rule, finding.severity))
        time.sleep(max(0.0, interval - (time.monotonic() - began)))


def _log_at(given: Path, interval: float) -> Path:
    """`log_at(given)`; waits for the first log in a folder."""
    is_said = False
    while True:
        with contextlib.suppress(FileNotFoundError):
            return log_at(given, "watch")
        if not is_said:
            say("watch", f"there is no log in {shown(given)} yet; waiting")
            is_said = True
        time.sleep(interval)


def newer_run(path: Path) -> str:
    """A remark if `path`, run.jsonl or run-2.jsonl, has a newer run in run-3.jsonl, for example; else ""."""
    stem, num = re.fullmatch(r"(.*?)(?:-(\d+))?", path.stem, re.DOTALL).groups()  # type: ignore[union-attr]
    newest = path
    with contextlib.suppress(OSError):  # there is no further one
        for place in itertools.count(int(num or 1) + 1):
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
