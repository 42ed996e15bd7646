"""`fastguard preflight module:function`: checks a training before its first step."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from .._text import did_you_mean, shown
from ..records import failures
from ..report import Report
from .cli import CommandError, NoReportError, Parser
from .diagnose import print_report

_PARTS = ("model", "optimizer", "loss_fn", "batch")
_OPTIONS = ("num_batches", "num_steps", "seconds", "checks", "thresholds")


def main(argv: list[str]) -> int:
    """Prints the report. 0: healthy, 1: warnings, 2: critical, 3: there is none, one line says why."""
    parser = Parser(
        "fastguard preflight",
        "Checks a training before its first step: output against loss, data, parameters, settings, trial steps.",
        "The function takes no arguments and returns (model, optimizer, loss_fn, batch), or a dict with these keys. A "
        "dict may also contain arguments of fastguard.preflight. The working folder is searched first.\n\n"
        "exit codes: 0 healthy, 1 warnings, 2 critical, 3 no report (the function raised, or returned something else), "
        "64 an argument is wrong",
    )
    about = "the function that builds the training, such as train:make"
    parser.add_argument("target", metavar="module:function", help=about)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    arguments = parser.parse_args(argv)
    module, colon, function = arguments.target.partition(":")
    if not colon or not module or not function or ":" in function:
        parser.error(f"the target must be module:function, got {arguments.target!r}")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    report = _report(_find(module, function), arguments.target)
    return print_report(report, arguments.json, "preflight")


def _find(module: str, function: str) -> Any:
    """The function. An error in importing its module becomes one line."""
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            remedy = "Call this in the folder where its file is, without the .py."
            raise CommandError(f"there is no module {module!r}. {remedy}") from None
        raise NoReportError(f"{shown(module)} cannot be imported: {_told(error)}") from None
    for name in function.split("."):
        if not hasattr(found, name):
            known = [n for n, v in vars(found).items() if inspect.isfunction(v) and n[0] != "_"]
            raise CommandError(f"{module!r} has no {name!r}. {did_you_mean(name, known) if known else ''}".rstrip())
        found = getattr(found, name)
    if not callable(found):
        raise CommandError(f"{module}:{function} must be a function, got {type(found).__name__}")
    return found


def _told(error: BaseException) -> str:
    return failures.describe(error) if isinstance(error, Exception) else f"it ended Python ({error})"


def _report(make: Any, target: str) -> Report:
    import fastguard

    try:
        given = make()
    except (Exception, SystemExit) as error:
        raise NoReportError(f"{shown(target)} raised {_told(error)}") from None
    if isinstance(given, (tuple, list)) and len(given) == len(_PARTS):
        given = dict(zip(_PARTS, given))
    if not isinstance(given, Mapping):
        what = type(given).__name__ + (f" of {len(given)}" if isinstance(given, (tuple, list)) else "")
        raise NoReportError(f"{shown(target)} must return ({', '.join(_PARTS)}) or a dict with these keys, got {what}")
    missing = [part for part in _PARTS if part not in given]
    odd = [str(key) for key in given if key not in (*_PARTS, *_OPTIONS)]
    if missing or odd:
        what = f"lacks {', '.join(missing)}" if missing else f"holds {', '.join(odd)}, which is no argument"
        raise NoReportError(f"{shown(target)} must return a dict with {', '.join(_PARTS)}, got one that {what}")
    try:
        return fastguard.preflight(**given)
    except (TypeError, ValueError) as error:
        raise NoReportError(error) from None
