"""`fastguard try`: the script again, with one thing changed at a time: which change helps, by how much, how surely."""

from __future__ import annotations

import math
import statistics
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._text import did_you_mean, in_columns, number, prose
from ..records import strict_json
from .cli import EXIT_FAILED, EXIT_USAGE, Parser, as_json, fail, say


def main(argv: list[str]) -> int:
    """Prints a table. 0: no change helps, 1: one does, 3: the script took too few steps."""
    parser = Parser(
        "fastguard try",
        "Runs a training script again and again, from the start, for a few hundred steps each: as it is with two\n"
        "seeds, then with one thing changed at a time. Says which change helps, by how much and how surely.",
        "Options come before the script, or all at the end of the line; after a -- all goes to the script. Each\n"
        "run works in a copy of the folder and can change no other file (Linux 5.13 or later); trackers are offline.\n"
        "\n"
        "exit codes: 0 done, no change helps, 1 done, a change helps or the targets do not follow from the inputs,\n"
        "3 the script took fewer than 16 steps, 64 it cannot be done as asked, 130 interrupted",
    )
    parser.usage = (
        "%(prog)s [-h] [-m] [--steps N] [--minutes M] [--arms NAMES] [--list] [--json]\n"
        "                     script.py [arguments]  (or the options last)"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: 300)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time for all runs (default: no limit)")
    parser.add_argument("--arms", metavar="NAMES", help="changes to try, with commas between (default: all that apply)")
    parser.add_argument("--list", action="store_true", dest="lists", help="list the changes, and run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
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
    with_value = ("--steps", "--minutes", "--arms")
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

    asked: dict[str, Any] = {"is_module": arguments.is_module, "num_steps": arguments.steps, "names": names}
    trial = Trial(script[0], script[1:], seconds=60.0 * arguments.minutes, told=_tell, **asked)
    try:
        outcome = trial.run()
    except TrialError as problem:
        return fail("try", problem)
    except OSError as problem:
        say("try", f"error: {problem}")
        return EXIT_USAGE
    code = EXIT_FAILED if outcome.best or outcome.accusation else 0
    if arguments.json:
        print(as_json(strict_json.encode(to_dict(outcome))))
        return code
    print("\n".join([verdict_of(outcome), "", *in_columns(rows_of(outcome), left=(0, 3, 4))]))
    for line in notes_of(outcome):
        print(f"\n{textwrap.fill(line, 100)}")
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


def _tell(name: str, step: int) -> None:
    """A line when a run begins."""
    if step == 0:
        say("try", f"{name} ...")
