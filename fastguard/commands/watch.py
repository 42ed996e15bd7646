"""`fastguard watch`: a run as a block of text, from the log that it is writing. Needs no torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import stat
import sys
import time
from pathlib import Path
from typing import Any

from .._text import count, number, prose, shown
from ..records import TrainingHistory
from ..records.loading import fill
from ..records.log import LogReader
from ..report import Report, build_report
from ..report.text import headline
from .cli import Parser, say

_INTERVAL_S = 0.5  # between two looks
_REST = 4.0  # times as long as the log took to read, so that a long one does not keep a core busy


class FollowedRun:
    """The last run of a log, as far as it is written. A log that has changed is read again from its beginning."""

    def __init__(self, given: Path) -> None:
        self.given = self.path = given
        self.problem = ""  # why the file cannot be read now; "" if it can
        self.log, self.history = LogReader(given), TrainingHistory()
        self.report: Report | None = None
        self._seen: Any = None

    def read(self) -> None:
        """Reads what has been written, and asks the rules. Raises ValueError for what is no log."""
        try:
            self.path = log_at(self.given)
            there = os.stat(self.path)
            if not stat.S_ISREG(there.st_mode):
                raise ValueError(f"`path` must be a file or a folder with logs, got neither - at {shown(self.path)}")
            seen = self.path, there.st_size, there.st_mtime_ns
            if seen != self._seen:
                log, history = LogReader(self.path), TrainingHistory()
                log._warn_of_runs = lambda: None  # type: ignore[method-assign]  # the block shows it
                fill(history, log, self.path)
                self._seen, self.log, self.history = seen, log, history
                self.report = build_report(history) if history.num_steps else None
            self.problem = ""
        except OSError as error:  # not there yet, or a network that is down for a while
            self.problem = f"cannot be read: {error.strerror or error}"


def lines_of(run: FollowedRun) -> list[str]:
    """The newest numbers of the run, and its report as `fastguard diagnose` prints it, in printable ASCII."""
    lines = [shown(run.path)]
    lines += [f"the log {shown(run.problem)}"] if run.problem else []
    lines += filter(None, [newer_run(run.path)])
    lines += [f"run {run.log.num_runs:,} of this log"] if run.log.num_runs > 1 else []
    num_cut = run.log.num_skipped - (run.log.line in run.log.skipped_lines[-1:])  # the last line may still grow
    lines += [f"{count(num_cut, 'damaged line')} left out"] if num_cut else []
    if run.report is None:
        return [*lines, "WAITING for a step"]
    known = run.report.numbers
    keys = (("loss", "loss"), ("grad norm", "norm"), ("val loss", "val_loss"), ("lr", "lr"))
    newest = ", ".join(f"{label} {number(known[f'{key}_last'])}" for label, key in keys if f"{key}_last" in known)
    return [*lines, f"step {run.history.newest_step:,}: {newest}", "", *str(run.report).splitlines()]


def main(argv: list[str]) -> int:
    """Shows a run until Ctrl-C. Returns 0 then; 3 if the log cannot be read."""
    parser = Parser(
        "fastguard watch",
        "Shows a run while it writes its log: its status, its newest numbers, and findings as they appear. The log may "
        "not exist yet, and may be moved away or restarted. If stdout is not a terminal, prints one line per finding.",
        "exit codes: 0 ended by Ctrl-C; 1 output pipe closed; 3 the log cannot be read; 64 an argument is wrong",
    )
    parser.add_argument("log", metavar="RUN.jsonl", help="the log, or a folder whose newest log is shown")
    arguments = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        run = FollowedRun(Path(arguments.log))
        say("watch", f"watching {run.given}")
        with contextlib.suppress(KeyboardInterrupt):
            _follow(run)
        status = run.report.status.upper().replace("-", " ") if run.report else "not judged"
        say("watch", f"{status} after {count(run.history.num_steps, 'step')}")
    return 0


def _follow(run: FollowedRun) -> None:
    """Reads and shows the run for ever: as a block that fits the terminal, or as lines where there is none."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    drawn, problem, run_id, printed = "", "", "", set[tuple[str, str]]()
    while True:
        began = time.monotonic()
        run.read()
        taken = time.monotonic() - began
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
            if run.log.run_id != run_id:
                run_id, printed = run.log.run_id, set()
            for finding in run.report.findings if run.report is not None else ():
                if (finding.rule, finding.severity) not in printed:
                    advice = f" What to do: {finding.recommendation}" if finding.recommendation else ""
                    print(f"{headline(finding)}: {prose(finding.summary + advice)}", flush=True)
                    printed.add((finding.rule, finding.severity))
        time.sleep(max(_INTERVAL_S - taken, _REST * taken))


def newer_run(path: Path) -> str:
    """A remark if `path`, run.jsonl or run-2.jsonl, has a newer run in run-3.jsonl, for example; else ""."""
    stem, num = re.fullmatch(r"(.*?)(?:-(\d+))?", path.stem, re.DOTALL).groups()  # type: ignore[union-attr]
    newest = path
    with contextlib.suppress(OSError):  # there is no further one
        for place in itertools.count(int(num or 1) + 1):
            newest = max(newest, path.with_name(f"{stem}-{place}{path.suffix}"), key=os.path.getmtime)
    return "" if newest is path else f"{shown(path)} holds an older run: the newest is in {shown(newest.name)}"


def log_at(path: Path, command: str = "") -> Path:
    """`path`; for a folder, the newest log in it or in its folders. A `command` says if there is a newer run."""
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
