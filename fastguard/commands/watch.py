"""`fastguard watch`: a run in the terminal, from the log that it is writing. Needs no torch."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._text import count
from .cli import EXIT_FAILED, Parser, bug, drop_output, fail, say
from .following import FollowedRun, line_of, log_at

ASSESS_EVERY_S = 2.0
REDRAW_EVERY_S = 5.0  # while nothing is written
_BUSY_SHARE = 0.8  # of the time between two frames, while a long log is read


def main(argv: list[str]) -> int:
    """Shows a run until Ctrl-C. Returns 0 then, 1 if stdout was closed, 3 if the log cannot be read."""
    parser = Parser(
        "fastguard watch",
        "Shows a run while it writes its log: its status, its numbers, the layers to look at, and findings as they "
        "appear. The log may not exist yet, and may be moved away or restarted. If stdout is not a terminal, prints "
        "one line per finding.",
        "exit codes: 0 ended by Ctrl-C; 1 output pipe closed; 3 the log cannot be read; 64 an argument is wrong",
    )
    parser.add_argument("log", metavar="RUN.jsonl", help="the log, or a folder whose newest log is shown")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two looks (default: 0.5)")
    arguments = parser.parse_args(argv)
    if not 0.05 <= arguments.interval <= 3600:
        parser.error(f"`--interval` must be from 0.05 to 3600, got {arguments.interval:g}")
    try:
        with _ended_by_sigterm():
            path = _log_at(Path(arguments.log), arguments.interval)
            console = _terminal()
            if console is None:
                return _print_lines(path, arguments.interval)
            return _show(path, arguments.interval, console)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        return fail("watch", error)
    except Exception as error:
        return fail("watch", bug(error))


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that the terminal is restored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set a handler
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _log_at(given: Path, interval: float) -> Path:
    """`log_at(given)`; waits for the first log in a folder."""
    is_told = False
    while True:
        try:
            return log_at(given, "watch")
        except FileNotFoundError as error:
            if not is_told:
                say("watch", f"{error}; waiting")
            is_told = True
        time.sleep(interval)


def _terminal() -> Any:
    """A rich console for stdout, or None if stdout is not a terminal that can be drawn on."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        say("watch", "pip install fastguard[watch] for the live view; printing one line per finding")
        return None
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal and not console.is_dumb_terminal else None


def _ending_of(run: FollowedRun) -> str:
    status = run.report.status.upper().replace("-", " ") if run.report else "not judged"
    odd = f"; {run.num_left_out} damaged lines left out" if run.num_left_out else ""
    odd += f"; run {run.log.num_runs} of this log" if run.log.num_runs > 1 else ""
    return f"{status} after {count(run.history.num_steps, 'step')}{odd}"


def _print_lines(path: Path, interval: float) -> int:
    """Prints one line per finding, until Ctrl-C."""
    run = FollowedRun(path)
    told, num_printed, assessed_at, problem = run.told, 0, 0.0, ""
    say("watch", f"watching {path}")
    try:
        while True:
            is_behind = run.read(interval)
            if run.tail.problem != problem:
                problem = run.tail.problem
                say("watch", f"{path} {problem}; waiting" if problem else f"reading {path}")
            if run.has_news and not is_behind and time.monotonic() - assessed_at >= ASSESS_EVERY_S:
                run.assess()
                assessed_at = time.monotonic()
            if told is not run.told:  # another run's
                told, num_printed = run.told, 0
            for one in told[num_printed:]:
                print(line_of(one), flush=True)
            num_printed = len(told)
            time.sleep(0.0 if is_behind else interval)
    except KeyboardInterrupt:
        say("watch", _ending_of(run))
        return 0


def _show(path: Path, interval: float, console: Any) -> int:
    """Shows the live view on the terminal's alternate screen, and leaves a summary on the main one."""
    from rich.live import Live

    from .screen import as_text, lines_of

    run = FollowedRun(path)

    def draw(height: int | None = None) -> Any:
        return as_text(lines_of(run, now=time.time(), width=console.width, height=height), crops=height is not None)

    quiet = logging.NullHandler()  # a rule that fails is in the report
    logging.getLogger("fastguard").addHandler(quiet)
    options: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
    try:
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, **options) as live:
            drawn: object = None
            drawn_at = assessed_at = 0.0
            while True:
                began = time.monotonic()
                is_behind = run.read(_BUSY_SHARE * interval)
                if not is_behind and run.has_news and began - assessed_at >= ASSESS_EVERY_S:
                    run.assess()
                    assessed_at = began
                state = (run.num_records, run.num_assessed, run.tail.problem, console.size)
                if state != drawn or began - drawn_at >= REDRAW_EVERY_S:
                    live.update(draw(console.height), refresh=True)
                    drawn, drawn_at = state, began
                time.sleep(max(0.0, interval - (time.monotonic() - began)))
        console.print(draw(), soft_wrap=True)
        return 0
    except OSError:  # the terminal is gone
        drop_output()
        return EXIT_FAILED
    finally:
        logging.getLogger("fastguard").removeHandler(quiet)
