"""The `fastguard` command: a table of subcommands. A subcommand's module is imported only when it is called for."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from .. import __version__
from .._text import did_you_mean, ended, prose, shown
from ..errors import FastguardError

EXIT_FAILED = 1
EXIT_UNREADABLE = 3  # of those that read a log
EXIT_USAGE = 64  # EX_USAGE of sysexits.h; 2 is what `diagnose` says of a critical run


class Command(NamedTuple):
    """One subcommand."""

    help: str  # a line about it
    entry: str  # `module:function` of what takes its arguments and returns the exit code
    # errors that it explains in one line, with the exit code 3; any other error is then a bug, which has the same code.
    # Empty for a command without that code
    says: tuple[type[Exception], ...] = ()


class NoReportError(Exception):
    """Why there is no report, in a line."""


_HERE = "fastguard.commands."
_UNREADABLE = (OSError, ValueError, ImportError)
COMMANDS = {
    "run": Command("run a training script, unmodified, under a guard that only watches", _HERE + "run:main"),
    "try": Command("run a script again with one thing changed at a time", _HERE + "trying:main"),
    "info": Command("print versions, and which backends work here", _HERE + "info:main"),
    "demo": Command("train a small transformer under guard, with one bad batch", _HERE + "demo:main"),
    "diagnose": Command("say from its log what is wrong with a run", _HERE + "diagnose:diagnose", _UNREADABLE),
    "report": Command("make a page of a run from its log", _HERE + "diagnose:report", _UNREADABLE),
    "watch": Command("show a run in the terminal while it writes its log", _HERE + "watch:main", _UNREADABLE),
    "preflight": Command("check a training before its first step", _HERE + "preflight:main", (NoReportError,)),
    "rules": Command("list the rules with their thresholds and sources", _HERE + "diagnose:rules"),
    "bench": Command("measure the cost against torch's own functions", _HERE + "bench:main"),
}


class CommandError(Exception):
    """A command cannot run with these arguments; the message is one line, and the exit code 64."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line with a remedy, and exit with 64."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        about, end = _wrapped(description), _wrapped(epilog)
        super().__init__(prog, description=about, epilog=end, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (-\S+)", message)
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if unknown is not None:
            message += f". {did_you_mean(unknown[1], self._option_string_actions)}"
        elif choice is not None:
            named = did_you_mean(choice[1], choice[2].replace("'", "").split(", "))
            message = f"{message[: choice.start()]}got {choice[1]!r}. {named}"
        self.exit(EXIT_USAGE, f"{self.prog}: error: {ended(shown(message))} See `{self.prog} --help`.\n")


def _wrapped(text: str) -> str:
    """Paragraphs of help in lines of 100 characters; a list, whose lines are indented, stays as it is."""
    parts = text.split("\n\n")
    return "\n\n".join(p if "\n  " in p else textwrap.fill(p, 100, break_on_hyphens=False) for p in parts)


def say(command: str, message: object) -> None:
    """Prints a line of a subcommand to stderr."""
    print(f"fastguard {command}: {prose(message)}", file=sys.stderr, flush=True)


def fail(command: str, problem: object) -> int:
    """Says why there is nothing to read or to report, and returns the exit code for that."""
    if isinstance(problem, OSError) and problem.strerror and problem.filename is not None:
        problem = f"{shown(problem.filename)}: {problem.strerror}"
    say(command, f"error: {problem}")
    return EXIT_UNREADABLE


def _parser() -> Parser:
    width = max(map(len, COMMANDS)) + 3
    listed = "\n".join(f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items())
    parser = Parser(
        "fastguard",
        "Every gradient checked, clipped and explained at every step of a PyTorch training run.",
        f"commands:\n{listed}\n\n`fastguard <command> --help` describes each command.\n\n"
        "exit codes: 0 success, 1 success but a problem was found, 64 wrong arguments; `diagnose`, `report`, `watch` "
        "and `preflight` have further ones",
    )
    parser.usage = "%(prog)s [-h] [--version] <command> [options]"
    parser.add_argument("--version", action="version", version=f"fastguard {__version__}")
    return parser


def _entry(name: str) -> Callable[[list[str]], int]:
    if name not in COMMANDS:
        raise CommandError(f"unknown command {name!r}. {did_you_mean(name, COMMANDS)}")
    module, function = COMMANDS[name].entry.split(":")
    try:
        entry: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "fastguard":
            raise
        raise CommandError(f"`fastguard {name}` needs {error.name}: pip install {error.name}") from None
    return entry


def as_json(plain: Any) -> str:
    """`plain` as indented JSON in printable ASCII."""
    return json.dumps(plain, indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def write_page(log: Any, page: Any, title: str) -> str:
    """Writes the page of `log` over what is at `page`; returns why it could not, or ""."""
    try:
        from ..page import build_page, save_page

        save_page(build_page(log, title=title), page, force=True)
    except ImportError:
        return "it needs plotly: pip install 'fastguard[report]'"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def drop_output() -> None:
    """Discards the rest of stdout, so that Python raises nothing when it ends."""
    with contextlib.suppress(OSError, ValueError):  # stdout is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"]:  # whose errors and streams are the script's
        try:
            return _entry("run")(arguments[1:])
        except CommandError as error:
            print(f"fastguard run: error: {shown(error)}", file=sys.stderr)
            return EXIT_USAGE
    for stream in (sys.stdout, sys.stderr):  # escape characters that its encoding lacks, instead of raising
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # torch warns if NumPy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        # Options of a subcommand are its own, so the first word decides who parses the rest.
        if not arguments or arguments[0].startswith("-"):
            parser = _parser()
            parser.parse_args(arguments)
            parser.print_help()
            return 0 if arguments else EXIT_USAGE
        code = _call(*arguments)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.flush()  # here, where an error still has an exit code
        return code
    except BrokenPipeError:  # `fastguard info | head`
        drop_output()
        return EXIT_FAILED
    except (CommandError, FastguardError, OSError) as error:
        if isinstance(error, OSError):  # a full disk behind stdout
            drop_output()
        print(f"fastguard: error: {shown(error)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("\nfastguard: interrupted", file=sys.stderr)
        return 130


def _call(name: str, *arguments: str) -> int:
    entry = _entry(name)
    try:
        return entry(list(arguments))
    except (CommandError, BrokenPipeError):
        raise
    except Exception as error:
        if not COMMANDS[name].says:
            raise
        if isinstance(error, COMMANDS[name].says):
            return fail(name, error)
        from ..records import failures  # not needed to list the commands

        return fail(name, f"this is a bug of fastguard, please report it: {failures.describe(error)}")
