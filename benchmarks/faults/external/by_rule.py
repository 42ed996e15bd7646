"""What each rule is worth: `python -m benchmarks.faults.external.by_rule`.

A table by rule over the runs of one half: the sound runs in which it speaks, the faulty ones, those of them where its
family is right, those where no other rule is right (found by it alone), and when it first speaks in sound runs: the
median step, and the share of the run that is over by then. `--replay` asks about kept runs within minutes.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from collections.abc import Sequence
from statistics import median
from typing import Any

from fastguard.diagnosis import RULES

from . import score
from .case import HALVES
from .cases import CASES
from .runs import load_or_prove, load_or_train

Asked = dict[str, Any]


def asked(name: str, replay: bool = False) -> Asked | None:
    """What its guards say of one run; None where the run does not count.

    "alarms" are by rule: the step at which it first speaks, and the share of the run that is over by then; "right" are
    those of them whose family is right.
    """
    case = CASES[name]
    if not load_or_prove(case, replay=replay).holds:
        return None
    run = load_or_train(case, replay=replay)
    alarms: dict[str, tuple[int, float]] = {}
    for part in run.parts:
        for rule, (_, step) in score.ask(part).alarms.items():
            alarms.setdefault(rule, (step, step / max(part.records[-1].step, 1)))
    families = () if case.truth is None else case.truth.families
    right = [rule for rule in alarms if RULES[rule].family in families]
    refused = run.outcome.refused is not None
    return {"run": name, "sound": case.truth is None, "refused": refused, "alarms": alarms, "right": right}


def table(runs: Sequence[Asked]) -> list[str]:
    """A line a rule, those first that speak in most sound runs."""
    lines = []
    for name in {rule for run in runs for rule in run["alarms"]}:
        sound = [run for run in runs if run["sound"] and name in run["alarms"]]
        faulty = [run for run in runs if not run["sound"] and name in run["alarms"]]
        right = [run for run in faulty if name in run["right"]]
        alone = sum(run["right"] == [name] and not run["refused"] for run in right)
        when = [f"{median(run['alarms'][name][i] for run in sound):.3g}" for i in (0, 1)] if sound else ["", ""]
        precision = len(right) / (len(sound) + len(faulty))
        cells = (len(sound), len(faulty), len(right), alone, f"{precision:.2f}", *when)
        lines.append((-len(sound), -len(faulty), f"{name:32}" + "".join(f"{cell:>10}" for cell in cells)))
    titles = ("sound", "faulty", "right", "alone", "precision", "step", "share")
    return [f"{'rule':32}" + "".join(f"{title:>10}" for title in titles), *(line for *_, line in sorted(lines))]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults.external.by_rule")
    parser.add_argument("--half", choices=HALVES, default="tune", help="whose runs (default: tune)")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--replay", action="store_true", help="ask about kept runs, even if older code recorded them")
    arguments = parser.parse_args(argv)
    names = [case.name for case in CASES.values() if case.half == arguments.half]
    names = [name for name in names if name.startswith(arguments.only)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.imap(functools.partial(asked, replay=arguments.replay), names, chunksize=4)
        print(*table([one for one in found if one is not None]), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
