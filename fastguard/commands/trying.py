"""`fastguard try`: the script again, with one thing changed at a time: which change helps, by how much, how surely."""

from __future__ import annotations

import html
import itertools
import math
import os
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from .._text import did_you_mean, duration, in_columns, number, prose, shown
from ..records import strict_json
from .cli import EXIT_FAILED, EXIT_USAGE, Parser, as_json, fail, say

_BAR = 24
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}h1{font-size:1.3rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #ddd}"
)


def main(argv: list[str]) -> int:
    """Prints a table, and writes a page. 0: no change helps, 1: one does, 3: the script took too few steps."""
    parser = Parser(
        "fastguard try",
        "Runs a training script again and again, from the start, for a few hundred steps each: as it is with two\n"
        "seeds, then with one thing changed at a time. Says which change helps, by how much and how surely.",
        "Options come before the script, or all at the end of the line; after a -- all goes to the script. Each\n"
        "run works in a copy of the folder and can change no other file (Linux 5.13 or later); trackers are offline.\n"
        "The page goes to runs/.\n\n"
        "exit codes: 0 done, no change helps, 1 done, a change helps or the targets do not follow from the inputs,\n"
        "3 the script took fewer than 16 steps, 64 it cannot be done as asked, 130 interrupted",
    )
    parser.usage = (
        "%(prog)s [-h] [-m] [--steps N] [--minutes M] [--arms NAMES] [--list] [--json] [--output PAGE]\n"
        "                     script.py [arguments]  (or the options last)"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: 300)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time for all runs (default: no limit)")
    parser.add_argument("--arms", metavar="NAMES", help="changes to try, with commas between (default: all that apply)")
    parser.add_argument("--list", action="store_true", dest="lists", help="list the changes, and run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and write no page")
    parser.add_argument("-o", "--output", help="the page (default: runs/try-SCRIPT.html, numbered if that exists)")
    options, script = split(argv)
    arguments = parser.parse_args(options)
    from ..experiments.arms import ARMS

    if arguments.lists:
        print("\n".join(in_columns([(name, arm.text) for name, arm in ARMS.items()], left=(0, 1))))
        return 0
    if not script:
        parser.error("there must be a script to try")
    if not arguments.is_module and not Path(script[0]).is_file():
        parser.error(f"there is no script {script[0]!r}")
    names = None if arguments.arms is None else [name.strip() for name in arguments.arms.split(",")]
    for name in names or ():
        if name not in ARMS:
            parser.error(f"unknown arm {name!r}. {did_you_mean(name, ARMS)}")
    for option, value, least in (("--steps", arguments.steps, 16), ("--minutes", arguments.minutes, 0)):
        if not value >= least:
            parser.error(f"`{option}` must be at least {least}, got {value:g}")
    return _try(script, names, arguments)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The options, and the script with its arguments.

    The script is the first word that is neither an option nor an option's value. Without options before it, those at
    the end of the line count, unless a `--` comes before them.
    """
    with_value = ("--steps", "--minutes", "--arms", "-o", "--output")
    place = 0
    while place < len(argv) and argv[place].startswith("-"):
        place += 2 if argv[place] in with_value else 1
    options, script = argv[:place], argv[place:]
    if "--" in script:
        script.remove("--")
        return options, script
    while place <= options.count("-m"):
        if len(script) > 2 and script[-2] in with_value:
            options, script = options + script[-2:], script[:-2]
        elif len(script) > 1 and script[-1] == "--json":
            options, script = [*options, "--json"], script[:-1]
        else:
            break
    return options, script


def _try(script: list[str], names: list[str] | None, arguments: Any) -> int:
    from ..experiments.trial import Trial, TrialError

    progress = _Progress(sys.stderr, arguments.steps)
    asked: dict[str, Any] = {"is_module": arguments.is_module, "num_steps": arguments.steps, "names": names}
    trial = Trial(script[0], script[1:], seconds=60.0 * arguments.minutes, told=progress.tell, **asked)
    try:
        outcome = trial.run()
    except TrialError as problem:
        return fail("try", problem)
    except OSError as problem:
        say("try", f"error: {problem}")
        return EXIT_USAGE
    finally:
        progress.end()
    code = EXIT_FAILED if outcome.best or outcome.accusation else 0
    if arguments.json:
        print(as_json(strict_json.encode(to_dict(outcome))))
        return code
    verdict, rows, notes = verdict_of(outcome), rows_of(outcome), notes_of(outcome)
    print("\n".join([verdict, "", *in_columns(rows, left=(0, 3, 4))]))
    for line in notes:
        print(f"\n{textwrap.fill(line, 100)}")
    stem = Path(script[0]).stem
    free = (Path("runs", f"try-{stem}{'' if n == 1 else f'-{n}'}.html") for n in itertools.count(1))
    path = Path(arguments.output) if arguments.output else next(path for path in free if not os.path.lexists(path))
    write_page(verdict, rows, notes, path, " ".join(script))
    print(f"\n{shown(path)}")
    return code


def to_dict(outcome: Any) -> dict[str, Any]:
    """What was found, as plain types; NaN and Inf as floats."""
    return {
        "advice": None if outcome.best is None else outcome.best.arm.name,
        "targets_do_not_follow": outcome.accusation is not None,
        "verdict": verdict_of(outcome),
        "causes": {one.rule: one.confidence for one in outcome.causes},
        "noise": outcome.noise,
        "arms": [
            {
                "name": row.arm.name,
                **({} if row.comparison is None else asdict(row.comparison)),
                **{key: getattr(row, key) for key in ("verdict", "why", "num_seeds")},
            }
            for row in outcome.rows
        ],
    }


def verdict_of(outcome: Any) -> str:
    """The first line: what to change, or that nothing helps."""
    best, num = outcome.best, sum(row.comparison is not None for row in outcome.rows)
    if best is not None:
        found = best.comparison
        seeds = f"with {best.num_seeds} seeds" if best.num_seeds > 1 else "with one seed"
        what = "validation loss" if best.arm.by_validation else "training loss"
        if math.isinf(found.effect):
            return f"{best.arm.advice} The {what} then stays finite; without, it does not ({seeds})."
        return f"{best.arm.advice} The {what} is {number(found.effect)} lower then ({_interval(found)}; {seeds})."
    if outcome.accusation is not None:
        return (
            "Inputs and targets do not seem to belong together, or the model learns nothing from the inputs in these "
            f"steps: with inputs permuted the loss is the same. {outcome.accusation.arm.advice}"
        )
    return f"No change helps: none of {num} lowers the loss by more than the noise between seeds, {outcome.noise:.2g}."


def rows_of(outcome: Any) -> list[tuple[str, ...]]:
    """The table, with its head; arms that were not run are left out."""
    rows: list[tuple[str, ...]] = [("change", "training loss", "validation loss", "loss lower by (95 %)", "verdict")]
    for name, run in (("as it is", outcome.base), ("as it is, second seed", outcome.other)):
        rows.append((name, *_losses(run, outcome.base), "", ""))
    for row in outcome.rows:
        if row.comparison is not None:
            effect = f"{number(row.comparison.effect)} ({_interval(row.comparison)})"
            verdict = ": ".join(filter(None, (row.verdict, prose(row.why))))
            rows.append((row.arm.name, *_losses(row.run, outcome.base), effect, verdict))
    return rows


def notes_of(outcome: Any) -> list[str]:
    """What is to be said below the table."""
    first = [f"{one.rule} ({one.confidence:.2f}). {one.summary}" for one in outcome.causes[:1]]
    left_out = [f"{row.arm.name} ({prose(row.why)})" for row in outcome.rows if row.comparison is None]
    return [
        *(f"Likely cause in the run as it is: {one}" for one in first),
        *[f"Not tried: {'; '.join(left_out)}."] * bool(left_out),
        "A change that helps for so few steps need not help in the end, and that it helps is no proof of a fault.",
    ]


def _interval(found: Any) -> str:
    if math.isinf(found.effect):
        return "diverged"
    return f"{number(found.effect - 2.0 * found.error)} to {number(found.effect + 2.0 * found.error)}"


def _losses(run: Any, base: Any) -> tuple[str, str]:
    """Mean training loss over the compared steps, the last validation loss."""
    num = min(len(run.losses), len(base.losses))
    compared = run.losses[num // 4 : num]
    mean = number(statistics.fmean(compared)) if compared else "-"
    return mean, number(run.val_losses[max(run.val_losses)]) if run.val_losses else "-"


class _Progress:
    """A bar for each run; on what is no terminal, a line when one begins."""

    def __init__(self, stream: TextIO, num_steps: int) -> None:
        self._stream, self._num_steps = stream, num_steps
        self._is_terminal = stream.isatty()
        self._started = time.monotonic()
        self._drawn_at = -math.inf

    def tell(self, name: str, step: int) -> None:
        now = time.monotonic()
        if not self._is_terminal:
            if step == 0:
                print(f"fastguard try: {name} ...", file=self._stream, flush=True)
        elif step in (0, self._num_steps) or now > self._drawn_at + 0.1:
            self._drawn_at = now
            bar = f"[{'#' * (_BAR * step // self._num_steps):<{_BAR}}] {step}/{self._num_steps}"
            taken = duration(now - self._started)
            print(f"\r\033[K{name:<24} {bar}  {taken}", end="", file=self._stream, flush=True)

    def end(self) -> None:
        """Leaves the line empty."""
        if self._is_terminal:
            print(end="\r\033[K", file=self._stream, flush=True)


def write_page(verdict: str, rows: Sequence[Sequence[str]], notes: Sequence[str], path: Path, title: str) -> None:
    """Writes it; makes the folder if there is none."""
    from ..page import save_page

    path.parent.mkdir(parents=True, exist_ok=True)
    head, *body = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>fastguard try {html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(verdict)}</h1><table><tr>{head.replace('td>', 'th>')}</tr>",
        *(f"<tr>{row}</tr>" for row in body),
        "</table>",
        *(f"<p>{html.escape(note)}</p>" for note in notes),
    ]
    save_page("\n".join(parts), path)
