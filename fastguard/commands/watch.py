"""`fastguard watch`: a run in the terminal, from the log that it is writing. Needs no torch."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .._text import count, duration, prose, shown
from ..records.running import Bucket
from .cli import EXIT_FAILED, Parser, drop_output, say
from .following import FollowedRun, line_of, log_at, newer_run

_STYLES = {
    "no-evidence": "bold",
    "healthy": "bold green",
    "warning": "bold yellow",
    "critical": "bold red",
    "info": "cyan",
}
_LABEL, _VALUE = 11, 11
_LATELY = 100  # steps
_QUIET_S = 10.0
_MAX_QUIET_S = 1e9  # a log may contain any time
BLOCKS = "▁▂▃▄▅▆▇█"
_BAD = "x"
Line = list[tuple[str, str]]  # pieces of text, each with its style
ASSESS_EVERY_S = 2.0
REDRAW_EVERY_S = 5.0  # while nothing is written
_BUSY_SHARE = 0.8  # of the time between two frames, while a long log is read


def lines_of(run: FollowedRun, *, now: float, width: int, height: int | None = None) -> list[Line]:
    """The view, the most important first.

    Args:
        run: what is shown.
        now: seconds since 1970.
        width, height: of the terminal; None: as many lines as there are.
    """
    head = [_head(run, now, width), _status(run), *_cause(run), *_notes(run)]
    numbers = _numbers(run, width) if run.history.recent else []
    layers, findings = _layers(run, width), _findings(run)
    room = 10**6 if height is None else height - len(head) - len(numbers)
    fitting = room - min(len(findings), 4)
    parts = [head, numbers, layers[:fitting] if fitting > 1 else [], findings]
    gap: list[Line] = [[]] if height is None or height > 20 else []
    lines: list[Line] = []
    for part in filter(None, parts):
        lines += [*gap, *part] if lines else part
    return lines[:height]


def as_text(lines: Iterable[Line], *, crops: bool) -> Any:
    """`lines` as rich prints them; those too long for the terminal are cut, or wrapped."""
    from rich.console import Group
    from rich.text import Text

    overflow: Any = "ellipsis" if crops else None
    return Group(*(Text.assemble(*line, no_wrap=crops, overflow=overflow) for line in lines))


def _head(run: FollowedRun, now: float, width: int) -> Line:
    times = run.times
    rate = ""
    if times and now - times[-1] > _QUIET_S:
        rate = f"nothing for {duration(min(now - times[-1], _MAX_QUIET_S))}"
    elif len(times) > 1 and times[-1] > times[0]:
        rate = f"{(len(times) - 1) / (times[-1] - times[0]):.3g} lines/s"
    name = shown(run.tail.path, max(10, width - len(rate) - 4))
    return [(name, "bold"), (" " * max(2, width - len(name) - len(rate)), ""), (rate, "dim")]


def _status(run: FollowedRun) -> Line:
    if run.newest_step < 0:
        return [("WAITING for a step", "bold")]
    report = run.report
    if report is None:
        return [(f"AT STEP {run.newest_step:,}, not judged yet", "bold")]
    from ..report.report import num_of_each  # takes 0.1 s, and the first picture needs none of it

    said = "no gradient was seen" if report.status == "no-evidence" else num_of_each(report.findings)
    return [
        (report.status.upper().replace("-", " "), _STYLES[report.status]),
        (f" at step {run.newest_step:,}: {said}", ""),
    ]


def _cause(run: FollowedRun) -> list[Line]:
    if not run.report:
        return []
    from ..diagnosis import UNKNOWN
    from ..report.report import place_of

    for one in run.report.causes:
        if one.rule != UNKNOWN:
            what = f"likely cause: {shown(one.rule)}{place_of(one)}"
            return [[(what, "bold")], [(f"    {prose(one.recommendation)}", "")]]
    return []


def _notes(run: FollowedRun) -> list[Line]:
    notes = []
    if run.tail.problem:
        notes.append(f"the log {shown(run.tail.problem)}")
    if newer := newer_run(run.tail.path):
        notes.append(newer)
    if run.tail.is_behind:
        notes.append(f"reading the log: {run.tail.offset / max(1, run.tail.size):.0%}")
    if run.log.num_runs > 1:
        notes.append(f"run {run.log.num_runs:,} of this log")
    if run.went_back_to is not None:
        notes.append(f"went back to step {run.went_back_to:,}: resumed, or rolled back")
    if run.num_left_out:
        notes.append(f"{run.num_left_out:,} damaged line{'' if run.num_left_out == 1 else 's'} left out")
    return [[(note, "dim")] for note in notes]


def _numbers(run: FollowedRun, width: int) -> list[Line]:
    history = run.history
    recent = list(history.recent)
    room = width - _LABEL - _VALUE - 2
    losses, norms = [entry.loss for entry in recent], [entry.norm for entry in recent]
    lines = [
        _row("loss", _last(losses), sparkline(losses, room), "cyan"),
        _row("grad norm", _last(norms), sparkline(norms, room, is_log=True), "magenta"),
    ]
    if history.num_steps > len(recent):
        buckets = history.overview.buckets
        begin = f"since {buckets[0].first_step:,}"
        for place, (key, is_log) in enumerate((("loss", False), ("norm", True))):
            values = _whole_run(run, buckets, key)
            lines.insert(2 * place + 1, _row("", begin, sparkline(values, room, is_log=is_log), "dim"))
    lately = recent[-_LATELY:]
    num_clean = sum(entry.is_clean for entry in lately)
    clipped = sum(entry.is_clean and entry.clip_coef != 1.0 for entry in lately)
    lines += [
        _row("lr", _last([entry.lr for entry in recent])),
        _rate_row("clipped", history.num_clipped, history.num_clean, clipped, num_clean),
        _rate_row("skipped", history.num_skipped, history.num_steps, sum(e.skipped for e in lately), len(lately)),
    ]
    val_loss = _last([validation.val_loss for validation in history.validations])
    if val_loss != "-":
        lines.insert(-3, _row("val loss", val_loss))
    if history.num_nonfinite:
        event = history.last_events[-1]
        first = f", first in {shown(event.names[0], 60)}" if event.names else ""
        lines.append(_row("NaN or Inf", f"{history.num_nonfinite:,}", f"last at step {event.step:,}{first}", "red"))
    return lines


def _row(label: str, value: str, more: str = "", style: str = "") -> Line:
    line = [(f"{label:<{_LABEL}}{value:>{_VALUE}}", "")]
    return [*line, ("  ", ""), (more, style)] if more else line


def _rate_row(label: str, count: int, total: int, lately: int, num_lately: int) -> Line:
    share = f"{100 * count / total:.3g} %" if total else "-"
    more = f"{count:,} of {total:,}"
    if num_lately < total:
        more += f"; {lately} of the last {num_lately}"
    return _row(label, share, more, "dim")


def _last(values: Sequence[float | None]) -> str:
    return next((f"{value:.4g}" for value in reversed(values) if value is not None), "-")


def _whole_run(run: FollowedRun, buckets: Iterable[Bucket], key: str) -> list[float | None]:
    """The largest value in each part of the run; NaN where a step that is still known had one."""
    bad = {event.step for event in (*run.history.first_events, *run.history.last_events)}
    values: list[float | None] = []
    for bucket in buckets:
        of_it = getattr(bucket, key)
        is_bad = key == "norm" and any(bucket.first_step <= step <= bucket.last_step for step in bad)
        values.append(math.nan if is_bad else of_it.max if of_it.num else None)
    return values


def _layers(run: FollowedRun, width: int) -> list[Line]:
    if not run.layers:
        return []
    room = max(8, width - 34)
    widest = max(len("layer"), *(len(shown(layer.name, room)) for layer in run.layers))
    lines = [[(f"{'layer':<{widest}}{'grad norm':>11}{'zeros':>8}{'update/weight':>15}", "dim")]]
    for name, norm, zero_share, ratio, is_named in run.layers:
        cells = f"{norm:>11.3g}{zero_share:>8.0%}{'-' if ratio is None else f'{ratio:.2g}':>15}"
        lines.append([(f"{shown(name, room):<{widest}}{cells}", "red" if is_named else "")])
    return lines


def _findings(run: FollowedRun) -> list[Line]:
    """As the rules find them now."""
    if not run.report:
        return []
    from ..report.report import headline

    lines: list[Line] = []
    for one in run.report.findings:
        lines.append([(headline(one), _STYLES[one.severity])])
        lines.append([(f"    {prose(one.summary)}", "")])
    return lines


def sparkline(values: Sequence[float | None], width: int, *, is_log: bool = False) -> str:
    """The values from left to right in at most `width` characters, the largest of those that share one.

    NaN and Inf are an x, for all values that share its place; None is left out. In a logarithmic line, values that are
    not above 0 are at the bottom.

    >>> sparkline([1.0, 2.0, 3.0, None, math.nan, 8.0, 1.0, 1.0], 8), sparkline(range(100), 4)
    ('▁▂▃ x█▁▁', '▃▄▆█')
    """
    num = min(width, len(values))
    if num <= 0:
        return ""
    cells = [values[i * len(values) // num : (i + 1) * len(values) // num] for i in range(num)]
    known = [_height(v, is_log) for v in values if v is not None and math.isfinite(v)]
    finite = [height for height in known if height > -math.inf]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    text = []
    for cell in cells:
        its = [v for v in cell if v is not None]
        if not its or not all(map(math.isfinite, its)):
            text.append(_BAD if its else " ")
        else:
            share = max(0.0, (_height(max(its), is_log) - low) / (high - low)) if high > low else 0.0
            text.append(BLOCKS[round(share * (len(BLOCKS) - 1))])
    return "".join(text)


def _height(value: float, is_log: bool) -> float:
    """Halved, so that no difference overflows."""
    if is_log:
        return math.log(value) if value > 0.0 else -math.inf
    return 0.5 * value


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
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which restores the terminal
    with contextlib.suppress(KeyboardInterrupt):
        path = _log_at(Path(arguments.log), arguments.interval)
        console = _terminal()
        if console is None:
            return _print_lines(path, arguments.interval)
        return _show(path, arguments.interval, console)
    return 0


def _log_at(given: Path, interval: float) -> Path:
    """`log_at(given)`; waits for the first log in a folder."""
    try:
        return log_at(given, "watch")
    except FileNotFoundError as error:
        say("watch", f"{error}; waiting")
    while True:
        time.sleep(interval)
        with contextlib.suppress(FileNotFoundError):
            return log_at(given, "watch")


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


def _follow(run: FollowedRun, interval: float, look: Callable[[], None]) -> None:
    """Reads the run until Ctrl-C, judges it now and then, and calls `look` after each reading."""
    assessed_at = 0.0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            began = time.monotonic()
            is_behind = run.read(_BUSY_SHARE * interval)
            if not is_behind and run.has_news and began - assessed_at >= ASSESS_EVERY_S:
                run.assess()
                assessed_at = began
            look()
            time.sleep(max(0.0, interval - (time.monotonic() - began)))


def _print_lines(path: Path, interval: float) -> int:
    """Prints one line per finding, until Ctrl-C."""
    run = FollowedRun(path)
    told, num_printed, problem = run.told, 0, ""
    say("watch", f"watching {path}")

    def look() -> None:
        nonlocal told, num_printed, problem
        if run.tail.problem != problem:
            problem = run.tail.problem
            say("watch", f"{path} {problem}; waiting" if problem else f"reading {path}")
        if told is not run.told:  # another run's
            told, num_printed = run.told, 0
        for one in told[num_printed:]:
            print(line_of(one), flush=True)
        num_printed = len(told)

    _follow(run, interval, look)
    say("watch", _ending_of(run))
    return 0


def _show(path: Path, interval: float, console: Any) -> int:
    """Shows the live view on the terminal's alternate screen, and leaves a summary on the main one."""
    from rich.live import Live

    run, drawn, drawn_at = FollowedRun(path), None, 0.0

    def draw(height: int | None = None) -> Any:
        return as_text(lines_of(run, now=time.time(), width=console.width, height=height), crops=height is not None)

    def look() -> None:
        nonlocal drawn, drawn_at
        now, state = time.monotonic(), (run.num_records, run.num_assessed, run.tail.problem, console.size)
        if state != drawn or now - drawn_at >= REDRAW_EVERY_S:
            live.update(draw(console.height), refresh=True)
            drawn, drawn_at = state, now

    quiet = logging.NullHandler()  # a rule that fails is in the report
    logging.getLogger("fastguard").addHandler(quiet)
    options: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
    try:
        with Live(console=console, screen=True, **options) as live:
            _follow(run, interval, look)
        console.print(draw(), soft_wrap=True)
        return 0
    except OSError:  # the terminal is gone
        drop_output()
        return EXIT_FAILED
    finally:
        logging.getLogger("fastguard").removeHandler(quiet)
