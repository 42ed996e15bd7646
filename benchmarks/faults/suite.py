"""The command: runs the suite, and prints its table."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .. import machine
from . import alarms, score, table
from .cases import CASES, FAULTS, REPORT_SEEDS, TUNE_SEEDS, Case
from .digits import MissingDataError, digits
from .runs import load_or_train
from .score import Verdict

SEEDS = {"tune": TUNE_SEEDS, "report": REPORT_SEEDS}


def judged(work: tuple[str, int, int, bool]) -> tuple[bool, float, Verdict]:
    """Trains or loads one run and asks the rules: whether it is as planted, its seconds, and the verdict."""
    name, seed, check_every, fresh = work
    run = load_or_train(name, seed, fresh=fresh)
    return run.is_proven, run.seconds, score.judge(run, alarms.ask(run, check_every))


def half_of(name: str, cases: Sequence[Case], arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of all `cases` with the seeds of one half."""
    work = [(case.name, seed, arguments.check_every, arguments.fresh) for case in cases for seed in SEEDS[name]]
    verdicts: list[Verdict] = []
    unproven, seconds = [], 0.0
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for number, (is_proven, took, verdict) in enumerate(pool.imap(judged, work), 1):
            if sys.stderr.isatty():
                print(f"\r{name}: {number} of {len(work)} runs", end="", file=sys.stderr, flush=True)
            seconds += took
            if is_proven:
                verdicts.append(verdict)
            else:
                unproven.append(f"{work[number - 1][0]} (seed {work[number - 1][1]})")
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return {
        "seeds": list(SEEDS[name]),
        "training_s": round(seconds, 1),
        "unproven": unproven,
        "summary": score.summary(verdicts),
        "faults": score.by_fault(verdicts),
        "false_alarms": score.false_alarms(verdicts),
        "alarmed_healthy": [
            {"case": v.case, "seed": v.seed, "false_alarms": v.false_alarms}
            for v in verdicts
            if v.fault is None and v.false_alarms
        ],
        "wrong": [
            {"case": v.case, "seed": v.seed, "found": v.found, "cause": v.cause, "layer_right": v.layer_right}
            for v in verdicts
            if v.fault is not None and (not v.found or not v.cause_right or v.layer_right is False)
        ],
    }


def conditions(check_every: int) -> dict[str, Any]:
    """Machine, versions, date, and how often the rules were asked."""
    described = machine.Machine().to_dict()
    return {
        **{key: described[key] for key in ("cpu", "num_cores", "python", "fastguard", "date")},
        "torch": torch.__version__,
        "sklearn": version("scikit-learn"),
        "check_every": check_every,
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description="Plants faults in small real trainings and measures how often the rules are right. "
        "Data: digits from scikit-learn; text of Python's standard library.",
    )
    parser.add_argument("--half", choices=[*SEEDS, "both"], default="both", help="which seeds (default: both)")
    parser.add_argument("--only", action="append", metavar="NAME", help="cases that begin with this; several times")
    parser.add_argument("--check-every", type=int, default=10, help="ask the rules every so many steps (default: 10)")
    parser.add_argument("--processes", type=int, default=2, help="trainings at the same time (default: 2)")
    parser.add_argument("--fresh", action="store_true", help="train again instead of reading the cache")
    parser.add_argument("--json", type=Path, help="a file for the results")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite; 1 if a fault was not as planted, 0 otherwise: missed measures are results, not errors."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        digits()
    except MissingDataError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    started = time.perf_counter()
    chosen = [case for case in CASES.values() if not arguments.only or case.name.startswith(tuple(arguments.only))]
    if not chosen:
        parser.error(f"--only: no case begins with {' or '.join(arguments.only)}; the cases are: {', '.join(CASES)}")
    halves = list(SEEDS) if arguments.half == "both" else [arguments.half]
    results: dict[str, Any] = {
        "conditions": conditions(arguments.check_every),
        "faults": {name: fault.title for name, fault in FAULTS.items()},
        "halves": {half: half_of(half, chosen, arguments) for half in halves},
    }
    results["seconds"] = round(time.perf_counter() - started, 1)
    for half in halves:
        print(table.text(results, half), end="\n\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if any(results["halves"][half]["unproven"] for half in halves) else 0
