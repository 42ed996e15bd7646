"""`fastguard report`: an HTML page of a run, from the log that a JsonlSink wrote. Does not need torch."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from pathlib import Path

from .._text import shown
from ..report import build_report
from ..visualization.runs import DrawnRun, from_log
from .cli import EXIT_FAILED, Parser, as_json
from .following import log_at

_LEVELS = {"warning": ("warning", "critical", "no-evidence"), "critical": ("critical",)}


def report(argv: list[str]) -> int:
    """Writes the page and prints its path. 0: written, 1: written and worse than `--fail-on`, 3: not written."""
    parser = Parser(
        "fastguard report",
        "Makes one HTML file of a run, or of two to eight to compare, from the logs that a JsonlSink wrote. It opens "
        "offline, and loads nothing from the network.",
        "exit codes: 0 the page is written, 1 it is written and a run is as bad as --fail-on or worse, 3 a log cannot "
        "be read or the page cannot be written, 64 an argument is wrong",
    )
    what = "a log, a folder with logs, or NAME=PATH; the first is compared with"
    parser.add_argument("logs", nargs="+", metavar="RUN.jsonl", help=what)
    parser.add_argument("-o", "--output", help="the page; - for stdout (default: the first log's path with .html)")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite an existing page")
    parser.add_argument("--title", default="", help="title of the page")
    parser.add_argument("--open", action="store_true", help="open it in a browser")
    parser.add_argument("--json", action="store_true", help="print the reports as one JSON object, and write no page")
    parser.add_argument("--fail-on", choices=list(_LEVELS), help="exit with 1 if a run is that bad or worse")
    arguments = parser.parse_args(argv)
    if len(arguments.logs) > 8:
        parser.error(f"`RUN.jsonl` must be 1 to 8 logs, got {len(arguments.logs)}")
    command = "report" if len(arguments.logs) == 1 else ""
    logs = [_named(given, command) for given in arguments.logs]
    path = Path(arguments.output or logs[0][1].with_suffix(".html"))
    is_page = not arguments.json and arguments.output != "-"
    if is_page and any(path.resolve() == log.resolve() for _, log in logs):
        raise ValueError(f"{path} is the log itself: choose another --output")
    if is_page and (path.exists() or path.is_symlink()) and not arguments.force:  # before a long log is read
        raise FileExistsError(f"{path} exists already: use --force to overwrite it")
    runs = [_drawn(name, log) for name, log in logs]
    reports = [build_report(run.history) for run in runs]
    if arguments.json:
        print(as_json({run.name: report.to_dict() for run, report in zip(runs, reports)}))
    else:
        from ..page.build import render, save_page

        written = shlex.join(["fastguard", "report", *argv])
        page = render(runs, reports, arguments.title or ", ".join(run.name for run in runs), shown(written, 300))
        if arguments.output == "-":
            print(page)
        else:
            save_page(page, path, force=arguments.force)
            print(shown(path) if sys.stdout.isatty() else path)
            if arguments.open:
                webbrowser.open(path.resolve().as_uri())
    bad = _LEVELS.get(arguments.fail_on, ())
    return EXIT_FAILED if any(report.status in bad for report in reports) else 0


def _named(given: str, command: str) -> tuple[str, Path]:
    """Of `NAME=PATH` both, unless there is a file of that whole name; else no name."""
    name, _, path = given.partition("=")
    if name and path and not Path(given).exists():
        return name, log_at(Path(path), command)
    return "", log_at(Path(given), command)


def _drawn(name: str, path: Path) -> DrawnRun:
    run = from_log(path, shown(name))
    if not run.history.num_steps:
        raise ValueError(f"{shown(path)} holds no step, so there is nothing to draw")
    return run
