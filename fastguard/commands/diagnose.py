"""`fastguard diagnose`, `report` and `rules`: what is wrong with a run, by its log. None of them needs torch."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._text import count, did_you_mean, listed, shown
from ..diagnosis import RULES, Rule
from ..diagnosis.registry import CHECKS, SIGNS
from ..records import TrainingHistory
from ..records.loading import fill
from ..records.log import LogReader
from ..report import build_report
from ..report.page import render, save_page
from ..visualization.runs import run_of
from .cli import EXIT_FAILED as _FAILED
from .cli import EXIT_UNREADABLE as EXIT_UNREADABLE
from .cli import Parser, as_json, drop_output, fail, say
from .watch import log_at

EXIT_CODES = {"healthy": 0, "warning": 1, "critical": 2, "no-evidence": 4}
_WIDTH = 100


def _thresholds(settings: Sequence[str]) -> dict[str, dict[str, float]]:
    """`["norm-spike.ratio=20"]` as `{"norm-spike": {"ratio": 20.0}}`; a ValueError says what is wrong with one."""
    found: dict[str, dict[str, float]] = {}
    known = {
        f"{rule.name}.{name}": kind
        for rule in (*RULES.values(), *SIGNS.values())
        for name, kind in rule.thresholds.items()
    }
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in known:
            meant = did_you_mean(key, known, 8)
            raise ValueError(f"`--set` must be RULE.THRESHOLD=NUMBER, got {setting!r}. {meant}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"`--set` must give a finite number, got {setting!r}")
        name, _, threshold = key.rpartition(".")
        found.setdefault(name, {})[threshold] = type(known[key])(value)
    return found


def diagnose(argv: list[str]) -> int:
    """Prints the report on a log. 0: healthy, 1: warnings, 2: critical, 3: there is no report, one line says why.

    4: nothing is known, as the log's steps hold no gradient.
    """
    parser = Parser(
        "fastguard diagnose",
        "Says what is wrong with a run, from the log that a JsonlSink wrote, even if a crash cut it off.",
        "exit codes: 0 healthy, 1 warnings, 2 critical, 3 no diagnosis (the log cannot be read or holds no step), 4 no "
        "evidence (its steps hold no gradient, and nothing else is wrong), 64 an argument is wrong",
    )
    parser.add_argument("log", help="the log, or a folder whose newest log is read")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    wanted, meaning = "RULE.THRESHOLD=NUMBER", "change a threshold; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar=wanted, help=meaning)
    arguments = parser.parse_args(argv)
    try:
        thresholds = _thresholds(arguments.set)
    except ValueError as error:
        parser.error(str(error))
    path = log_at(Path(arguments.log), "diagnose")
    log, history = LogReader(path), TrainingHistory()
    unknown = fill(history, log, path)
    if log.num_skipped:
        lines = f"{count(log.num_skipped, 'line')} {'was' if log.num_skipped == 1 else 'were'}"
        say("diagnose", f"{lines} cut off or damaged, and left out: {log.skipped_lines[:8]}")
    if unknown:
        keys = f"{count(len(unknown), 'unknown key')} ignored: {listed(unknown, 8)}"
        say("diagnose", f"written by a newer version? {keys}")
    if not history.num_steps:
        raise ValueError(f"`log` must hold a step, got none, so there is nothing to diagnose - at {shown(path)}")
    report = build_report(history, thresholds=thresholds)
    return print_report(report, arguments.json, "diagnose")


def print_report(report: Any, as_plain: bool, command: str) -> int:
    """Prints a report, or its JSON, and returns its exit code, or another one if it cannot be printed."""
    try:
        print(as_json(report.to_dict()) if as_plain else str(report), flush=True)
    except BrokenPipeError:  # the reader has seen enough
        drop_output()
    except OSError as error:
        drop_output()
        return fail(command, f"the report cannot be written: {error}")
    return EXIT_CODES[report.status]


def _lines(rule: Rule) -> list[str]:
    lines = [f"{rule.name} [{rule.family}, up to {rule.severity}]"]
    for one in rule.signs:
        what = (one.check.__doc__ or "").partition("\n\n")[0].replace("\n    ", " ").strip()
        settings = ", ".join(f"{name}={value:g}" for name, value in one.thresholds.items())
        own = "" if one.name == rule.name else f"{one.name}: "
        for label, text in ((own, what), ("thresholds: ", settings), ("source: ", one.source)):
            if text:
                lines += textwrap.wrap(label + text, _WIDTH, initial_indent="    ", subsequent_indent="      ")
    return lines


def rules(argv: list[str]) -> int:
    """Prints every rule with what it finds, its thresholds and their source."""
    parser = Parser("fastguard rules", "Lists the rules: what each finds, its thresholds, and their sources.")
    parser.add_argument("names", nargs="*", metavar="RULE", help="only these; checks of preflight, too")
    arguments = parser.parse_args(argv)
    if not {*arguments.names} <= {*RULES, *SIGNS}:
        with contextlib.suppress(ImportError):  # the checks of preflight need torch
            importlib.import_module("fastguard.tools.preflight")
    chosen = []
    for name in arguments.names:
        if name not in RULES and name not in SIGNS and name not in CHECKS:
            named = did_you_mean(name, {*RULES, *CHECKS}, 8)
            parser.error(f"unknown rule {name!r}. {named} `fastguard rules` lists all")
        chosen.append(CHECKS[name] if name in CHECKS else RULES[RULES[name].whole])
    chosen = chosen or sorted(RULES.values(), key=lambda rule: rule.family)
    print("\n".join("\n".join(_lines(rule)) for rule in chosen))
    return 0


_LEVELS = {"warning": ("warning", "critical", "no-evidence"), "critical": ("critical",)}


def report(argv: list[str]) -> int:
    """Writes the page and prints its path. 0: written, 1: written and worse than `--fail-on`, 3: not written."""
    parser = Parser(
        "fastguard report",
        "Makes one HTML file of a run from its log. It opens offline, and loads nothing from the network.",
        "exit codes: 0 the page is written, 1 it is written and the run is as bad as --fail-on or worse, 3 the log "
        "cannot be read or the page cannot be written, 64 an argument is wrong",
    )
    parser.add_argument("log", metavar="RUN.jsonl", help="the log, or a folder whose newest log is read")
    parser.add_argument("-o", "--output", help="the page; - for stdout (default: the log's path with .html)")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite an existing page")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object, and write no page")
    parser.add_argument("--fail-on", choices=list(_LEVELS), help="exit with 1 if the run is that bad or worse")
    arguments = parser.parse_args(argv)
    log = log_at(Path(arguments.log), "report")
    path = Path(arguments.output or log.with_suffix(".html"))
    is_page = not arguments.json and arguments.output != "-"
    if is_page and path.resolve() == log.resolve():
        raise ValueError(f"{path} is the log itself: choose another --output")
    if is_page and (path.exists() or path.is_symlink()) and not arguments.force:  # before a long log is read
        raise FileExistsError(f"{path} exists already: use --force to overwrite it")
    run = run_of(log)
    found = build_report(run.history)
    if arguments.json:
        print(as_json(found.to_dict()))
    elif is_page:
        save_page(render(run, found), path, force=arguments.force)
        print(shown(path) if sys.stdout.isatty() else path)
    else:
        print(render(run, found))
    return _FAILED if found.status in _LEVELS.get(arguments.fail_on, ()) else 0
