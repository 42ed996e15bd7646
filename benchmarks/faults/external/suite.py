"""The command: trains what is not in the cache, asks the rules, and prints the table."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..suite import conditions
from . import score, table
from .case import HALVES, Case, Proof
from .cases import CASES
from .runs import SETTINGS, load_or_prove, load_or_train
from .score import Verdict

Work = tuple[str, tuple[str, ...], int, bool, bool]


def judged(work: Work) -> tuple[Proof, float, dict[str, Verdict]]:
    """Proves one case, trains or loads it, and asks the rules: its proof, its seconds, a verdict a setting."""
    name, settings, check_every, fresh, replay = work
    case = CASES[name]
    if fresh:
        load_or_train(case, fresh=True)  # before the proof, which looks at it
    found, seconds, verdicts = load_or_prove(case, fresh=fresh, replay=replay), 0.0, {}
    for watched in settings if found.holds else ():
        run = load_or_train(case, watched, fresh=fresh and watched != "default", replay=replay)
        verdicts[watched] = score.judge(case, run, [score.ask(part, check_every) for part in run.parts])
        seconds += run.seconds
    return found, seconds, verdicts


def run_all(cases: Sequence[Case], arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of `cases`, a half at a time."""
    settings = tuple(SETTINGS) if arguments.settings == "both" else (arguments.settings,)
    how = (settings, arguments.check_every, arguments.fresh, arguments.replay)
    work: list[Work] = [(case.name, *how) for case in cases]
    proofs: dict[str, Proof] = {}
    verdicts: dict[str, dict[str, list[Verdict]]] = {half: {s: [] for s in settings} for half in HALVES}
    seconds = 0.0
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for case, (found, took, said) in zip(cases, pool.imap(judged, work)):
            if sys.stderr.isatty():
                print(f"\r{len(proofs) + 1} of {len(cases)}: {case.name:70}", end="", file=sys.stderr, flush=True)
            seconds += took
            proofs[case.name] = found
            for watched, verdict in said.items():
                verdicts[case.half][watched].append(verdict)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return {
        "training_s": round(seconds, 1),
        "halves": {
            half: half_of(found, [c for c in cases if c.half == half], proofs) for half, found in verdicts.items()
        },
    }


def half_of(verdicts: dict[str, list[Verdict]], cases: Sequence[Case], proofs: dict[str, Proof]) -> dict[str, Any]:
    """The results of one half."""
    return {
        "num_cases": len(cases),
        "kinds": sorted({f"{case.set}/{case.kind}" for case in cases}),
        "unproven": {c.name: dict(proofs[c.name].figures) for c in cases if not proofs[c.name].holds},
        "settings": {
            watched: {
                "summary": score.summary(said),
                "sets": score.by_set(said),
                "false_alarms": score.false_alarms(said),
                "misses": list(score.misses(said)),
            }
            for watched, said in verdicts.items()
        },
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.external",
        description="Trains sound and faulty models that nobody tuned on, and measures how often the rules are right.",
    )
    parser.add_argument("--half", choices=[*HALVES, "both"], default="both", help="which kinds (default: both)")
    parser.add_argument("--only", action="append", metavar="NAME", help="cases that begin with this; several times")
    parser.add_argument(
        "--settings", choices=[*SETTINGS, "both"], default="both", help="what is watched (default: both)"
    )
    parser.add_argument("--check-every", type=int, default=10, help="ask the rules every so many steps (default: 10)")
    parser.add_argument("--processes", type=int, default=2, help="trainings at the same time (default: 2)")
    parser.add_argument("--fresh", action="store_true", help="train again instead of reading the cache")
    parser.add_argument("--replay", action="store_true", help="ask about kept runs, even if older code recorded them")
    parser.add_argument("--json", type=Path, help="a file for the results")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite. What was missed are results, not errors: 0."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    chosen = [
        case
        for case in CASES.values()
        if arguments.half in ("both", case.half) and (not arguments.only or case.name.startswith(tuple(arguments.only)))
    ]
    if not chosen:
        parser.error(f"--only: no case begins with {' or '.join(arguments.only)}")
    results = {"conditions": conditions(arguments.check_every), **run_all(chosen, arguments)}
    results["seconds"] = round(time.perf_counter() - started, 1)
    print(table.text(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0
