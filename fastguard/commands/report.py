"""`fastguard report`: a page of a run, from the log that a JsonlSink wrote. Needs no torch."""

from __future__ import annotations

import shlex
import sys
import time
import webbrowser
from pathlib import Path

from .._text import shown
from ..report import build_report
from ..visualization.runs import DrawnRun, from_log
from .cli import EXIT_FAILED, Parser, as_json, bug, fail

_TELL_EVERY_S = 0.5
_LEVELS = {"warning": ("warning", "critical", "no-evidence"), "critical": ("critical",)}


def main(argv: list[str]) -> int:
    """Writes the page and prints its path. 0: written, 1: written and worse than `--fail-on`, 3: not written."""
    parser = Parser(
        "fastguard report",
        "Makes one HTML file of a run, or of two to eight to compare, from the logs that a JsonlSink wrote. It opens "
        "offline, and loads nothing from the network.",
        "exit codes: 0 the page is written, 1 it is, and a run is as bad as --fail-on says or worse, 3 it is not (a "
        "log cannot be read, the page cannot be written), 64 an argument is wrong",
    )
    parser.add_argument("logs", nargs="+", metavar="RUN.jsonl", help="a log, or NAME=PATH; the first is compared with")
    parser.add_argument("-o", "--output", help="the page; - for stdout (default: beside the first log, as .html)")
    parser.add_argument("-f", "--force", action="store_true", help="write over a page that is there")
    parser.add_argument("--title", default="", help="of the page")
    parser.add_argument("--open", action="store_true", help="open it in a browser")
    parser.add_argument("--json", action="store_true", help="print the reports as one JSON object, and write no page")
    parser.add_argument("--fail-on", choices=list(_LEVELS), help="exit with 1 if a run is that bad")
    arguments = parser.parse_args(argv)
    if len(arguments.logs) > 8:
        parser.error(f"`RUN.jsonl` must be 1 to 8 logs, got {len(arguments.logs)}")
    try:
        path = Path(arguments.output or _path_of(arguments.logs[0]).with_suffix(".html"))
        is_page = not arguments.json and arguments.output != "-"
        if is_page and any(path.resolve() == _path_of(log).resolve() for log in arguments.logs):
            raise ValueError(f"{path} is the log itself: choose another --output")
        if is_page and path.exists() and not arguments.force:  # before a long log is read
            raise FileExistsError(f"{path} exists already; --force writes over it")
        runs = [_run_of(given) for given in arguments.logs]
        reports = [build_report(run.history) for run in runs]
        if arguments.json:
            print(as_json({run.name: report.to_dict() for run, report in zip(runs, reports)}))
        else:
            from ..page.build import render, save_page

            command = shlex.join(["fastguard", "report", *argv])
            page = render(runs, reports, arguments.title or ", ".join(run.name for run in runs), shown(command, 300))
            if arguments.output == "-":
                print(page)
            else:
                save_page(page, path, force=arguments.force)
                print(shown(path) if sys.stdout.isatty() else path)
                if arguments.open:
                    webbrowser.open(path.resolve().as_uri())
    except (OSError, ValueError, ImportError) as error:
        return fail("report", error)
    except Exception as error:
        return fail("report", bug(error))
    bad = _LEVELS.get(arguments.fail_on, ())
    return EXIT_FAILED if any(report.status in bad for report in reports) else 0


def _path_of(given: str) -> Path:
    """Of `NAME=PATH` the path, unless there is a file of that whole name."""
    name, equals, path = given.partition("=")
    return Path(path) if equals and name and not Path(given).exists() else Path(given)


def _run_of(given: str) -> DrawnRun:
    path = _path_of(given)
    name = path.name if path == Path(given) else given.partition("=")[0]
    with _Reading(path) as reading:
        run = from_log(path, shown(name), reading.tell)
    if not run.history.num_steps:
        raise ValueError(f"{shown(path)} holds no step, so there is nothing to draw")
    return run


class _Reading:
    """A bar on stderr for a log that takes more than half a second to read; only where that is a terminal."""

    def __init__(self, path: Path) -> None:
        self._name, self._size = shown(path.name, 40), path.stat().st_size
        self._is_seen = sys.stderr.isatty()
        self._told_at = time.monotonic()
        self._has_told = False

    def tell(self, num_bytes: int) -> None:
        """So much of it is read."""
        if not self._is_seen or time.monotonic() - self._told_at < _TELL_EVERY_S:
            return
        self._told_at, self._has_told = time.monotonic(), True
        share = min(1.0, num_bytes / (self._size or 1))
        bar = "#" * round(30 * share)
        print(f"\r{self._name} [{bar:<30}] {share:4.0%}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *error: object) -> None:
        if self._has_told:
            print("\r" + " " * (len(self._name) + 39) + "\r", end="", file=sys.stderr, flush=True)
