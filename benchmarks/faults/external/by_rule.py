"""What each rule is worth: `python -m benchmarks.faults.external.by_rule`.

A table by rule over all runs that may be looked at (no half that is only counted): the sound runs that it spoke in,
the faulty ones, those of them where its family is right, those where no other rule was right (found by it alone), and
when it spoke first in sound runs: the median step, and the share of the run that was over by then. The same of the
runs of each set as they were when they were new, which is what to expect of kinds that nobody has seen; these are in
benchmarks/results/faults-first-asked.json, beside what was told of causes, which confidences are fitted on
(`benchmarks.faults.fit`).

    python -m benchmarks.faults.external.by_rule --note sound2/ --note afresh2/

asks the runs whose names begin so and writes them there; with an older package ahead on PYTHONPATH, by its rules. The
halves "tune" are as they were first asked: by the rules of 6831c36^ (wild), ab49ca7 (afresh) and 69e3ce3 (afresh2 and
sound2). The halves "apart" are by those of f69aa4f, the last before anybody had looked at these runs. Both halves of
fresh4 and the half "apart" of fresh3 are by those of 54ce83b, which were made without a look at them, but for one
condition of one rule; both halves of fresh5 are by those of 855cd84, and of fresh6 by those of 76c52e7, made before
they were written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from fastguard.diagnosis import RULES, diagnose, find_causes, fitted

from . import score
from .cases import CASES
from .runs import ROOT, load_or_prove, load_or_train

FIRST_ASKED = ROOT / "benchmarks" / "results" / "faults-first-asked.json"
SEEN = ("wild", "afresh", "afresh2", "sound2")  # sets whose counted halves have been looked at since
Asked = dict[str, Any]


def asked(name: str) -> Asked | None:
    """What is said of one run by its guards; None where it does not count.

    "alarms" are by rule: the step it spoke first at, and the share of the run that was over; "right" are those of them
    whose family is right, "told" for each cause at the end its name, its share of the evidence, the number of families
    of rules among its symptoms, and whether it is right.
    """
    case = CASES[name]
    if not load_or_prove(case).holds:
        return None
    run = load_or_train(case)
    alarms: dict[str, tuple[int, float]] = {}
    told = []
    for part in run.parts:
        for rule, (_, step) in score.ask(part).alarms.items():
            alarms.setdefault(rule, (step, round(step / max(part.records[-1].step, 1), 3)))
        history = part.history()
        history.has_ended = True
        for cause in find_causes(diagnose(history), history):
            if cause.severity != "info" and cause.rule != score.UNKNOWN:
                has_share = "share" in cause.evidence  # older packages multiplied it by a number, or left it as it was
                share = cause.evidence["share"] if has_share else cause.confidence / getattr(fitted, "TRUST", 1.0)
                families = {RULES[symptom.rule].family for symptom in cause.symptoms}
                is_right = case.truth is not None and cause.rule in case.truth.causes
                told.append((cause.rule, round(share, 4), len(families), is_right))
    families_right = () if case.truth is None else case.truth.families
    return {
        "run": name,
        "sound": case.truth is None,
        "refused": run.outcome.refused is not None,
        "alarms": alarms,
        "right": [rule for rule in alarms if RULES[rule].family in families_right],
        "told": told,
    }


def ask_all(names: Sequence[str], processes: int = 2) -> list[Asked]:
    """`asked` of each run that counts."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return [one for one in pool.imap(asked, names, chunksize=4) if one is not None]


def totals(runs: Iterable[Asked]) -> dict[str, float]:
    """Alarms a sound run, the share of sound runs with any, and the share of the faulty ones that was found."""
    sound = [run for run in runs if run["sound"]]
    faulty = [run for run in runs if not run["sound"]]
    return {
        "sound": len(sound),
        "alarms": sum(len(run["alarms"]) for run in sound) / max(len(sound), 1),
        "alarmed": sum(bool(run["alarms"]) for run in sound) / max(len(sound), 1),
        "faulty": len(faulty),
        "found": sum(run["refused"] or bool(run["right"]) for run in faulty) / max(len(faulty), 1),
    }


def table(runs: Sequence[Asked]) -> list[str]:
    """A line a rule, those first that spoke in most sound runs."""
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
    """Prints the tables, or notes runs."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults.external.by_rule")
    parser.add_argument("--note", action="append", metavar="NAME", help="write runs that begin so as first asked")
    parser.add_argument("--half", help="with --note: of this half only")
    arguments = parser.parse_args(argv)
    open_to_all = [case for case in CASES.values() if case.half == "tune" or case.set in SEEN]
    to_be_noted = [case for case in CASES.values() if case.half != "report"]
    first = json.loads(FIRST_ASKED.read_text(encoding="utf-8")) if FIRST_ASKED.exists() else []
    if arguments.note:
        chosen = [case.name for case in to_be_noted if case.name.startswith(tuple(arguments.note))]
        if arguments.half:
            chosen = [name for name in chosen if CASES[name].half == arguments.half]
        news = ask_all(chosen)
        kept = [run for run in first if run["run"] not in chosen]
        lines = ",\n".join(json.dumps(run) for run in (*kept, *news))
        FIRST_ASKED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(f"{len(news)} runs: {FIRST_ASKED}", totals(news), sep="\n")
        return 0
    known = {run["run"] for run in first}
    for title, runs in (("first asked", first), ("now", ask_all([case.name for case in open_to_all]))):
        print(f"{title}: {totals(runs)}", *table(runs), "", sep="\n")
        if title == "now":
            print(f"now, of the same runs: {totals([run for run in runs if run['run'] in known])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
