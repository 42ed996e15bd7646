"""How long before a slow divergence the guard warns: `python -m benchmarks.faults.early`.

Slow divergences are planted (`drifts.py`) in the suite's tasks; a run counts if it diverges, and not within 40 steps of
the fault's beginning. It has diverged from the first step on whose loss is more than three times the best level so far,
and so are most of the next twenty, or is not finite. The best level is the least median of nine losses, and counts as
at least 2 % of the run's first. The sound runs are the healthy ones of the suite that never diverge.

Each run is trained under guard as users have it, and what the guard tells is what its log says at that time. The lead
is the number of steps from the first warning to the divergence, and 0 where there was none. Kinds, which are a task or
a task with a drift, are in one half each, as in the external suite; thresholds were chosen on the half "tune".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import os
import pickle
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.lab.training import Outcome, Training
from fastguard.diagnosis import RULES
from fastguard.records import Entry, TrainingHistory
from fastguard.records.model import ModelNotes

from .. import machine
from .cases import CASES, TASKS
from .drifts import DRIFTS, NUM_STEPS
from .external.case import HALVES, half_of
from .runs import ROOT

RULE = "divergence-ahead"
RESULTS = ROOT / "benchmarks" / "results" / "faults-early.json"
CACHE = ROOT / "build" / "faults-early"
SEEDS = (0, 1)
DRIFTING = ("digits-mlp", "digits-mlp-sgd", "digits-cnn", "digits-autoencoder", "char-mlp", "char-lstm", "char-rnn",
            "char-transformer", "numbers-mlp", "regression-mlp")  # fmt: skip
RATIO, FLOOR, LEVEL, NEXT = 3.0, 0.02, 9, 20
GLANCE = 20  # steps between two askings, where a run is replayed


@dataclass(frozen=True)
class Case:
    """One training: a task, and for a faulty one a drift and its strength."""

    task: str
    seed: int
    drift: str = ""
    strength: float = 0.0

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.drift or 'sound'}@{self.task}-{self.strength:g}-{self.seed}"

    @property
    def half(self) -> str:
        """Where its kind belongs."""
        kind = f"{self.task}/{self.drift}" if self.drift else self.task
        return half_of("early", kind, DRIFTING.index(self.task) if self.drift else 0)


@dataclass(frozen=True)
class Record:
    """What is kept of a run.

    Attributes:
        losses: of each step.
        stopped: what the guard raised.
        told: rules whose warning was logged, each with the number of the step at which it was.
        entries, cosines, notes: the history, for asking again.
        seconds: of the training.
    """

    losses: list[float]
    stopped: str | None
    told: dict[str, int]
    entries: list[tuple[Any, ...]]
    cosines: list[tuple[int, float]]
    notes: dict[str, Any]
    seconds: float

    @property
    def diverged_at(self) -> int | None:
        """The step from which on the loss has run away; None if it never did."""
        return divergence(self.losses)


def divergence(losses: Sequence[float]) -> int | None:
    """The first step whose loss is not finite, or above three times the best level for good.

    >>> divergence([2.0] * 50 + [6.5] * 30), divergence([2.0] * 80), divergence([2.0] * 50 + [9.0] + [2.0] * 30)
    (50, None, None)
    """
    best = math.inf
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            return step
        if step >= LEVEL:
            best = min(best, median(losses[step - LEVEL : step]))
        limit = RATIO * max(best, FLOOR * abs(losses[0]))
        following = losses[step : step + NEXT]
        if loss > limit and sum(not other <= limit for other in following) > 0.75 * len(following):
            return step
    return None


class _Listener(logging.Handler):
    """Notes at which step each rule was logged first."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.training: Training | None = None
        self.told: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if self.training is not None and hasattr(record, "sign"):
            self.told.setdefault(record.sign, self.training.step)


def train(case: Case) -> Record:
    """Trains a case under guard, with default settings."""
    logger, threads = logging.getLogger("fastguard"), torch.get_num_threads()
    listener, propagates, level = _Listener(), logger.propagate, logger.level
    torch.set_num_threads(1)
    logger.addHandler(listener)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        if case.drift:
            setup = TASKS[case.task](case.seed)
            setup.num_steps = NUM_STEPS
            DRIFTS[case.drift].change(setup, case.strength, random.Random(case.name))
        else:
            setup = CASES[case.task].make(case.seed)
        started = time.perf_counter()
        listener.training = training = Training(setup)
        outcome: Outcome = training.run()
        seconds = time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)
        logger.removeHandler(listener)
        logger.propagate = propagates
        logger.setLevel(level)
    training.guard.report()
    history = training.guard.history
    entries, cosines = [tuple(entry) for entry in history.recent], [tuple(one) for one in history.grad_cosines]
    return Record(
        outcome.losses, outcome.stopped, listener.told, entries, cosines, history.model.state(), round(seconds, 2)
    )  # fmt: skip


def replayed(record: Record) -> Iterator[TrainingHistory]:
    """The history as it was at each `GLANCE` steps; the same object all along."""
    history = TrainingHistory()
    history.model = ModelNotes.of(record.notes)
    for number, entry in enumerate(record.entries, 1):
        history.extend([Entry(*entry)])
        if number % GLANCE == 0:
            yield history


def _hash() -> str:
    here = Path(__file__).parent
    own = [here / "drifts.py", here / "healthy.py", here / "digits.py"]
    lab = sorted((ROOT / "fastguard" / "commands" / "demo" / "lab").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in [*own, *lab])).hexdigest()[:12]


def load_or_train(case: Case, *, fresh: bool = False) -> Record:
    """The run of a case; from the cache, unless `fresh`."""
    path = CACHE / f"{case.name}.{_hash()}.pickle.z"
    if path.exists() and not fresh:
        return Record(**pickle.loads(zlib.decompress(path.read_bytes())))
    record = train(case)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(zlib.compress(pickle.dumps(vars(record)), 1))
    partial.replace(path)
    return record


def cases() -> list[Case]:
    """All of them: each drift that suits a task, and the suite's healthy runs."""
    found = [Case(name, seed) for name, case in CASES.items() if case.fault is None for seed in SEEDS]
    for task in DRIFTING:
        for drift in DRIFTS.values():
            if drift.suits(TASKS[task](0)):
                found += [Case(task, 0, drift.name, strength) for strength in drift.strengths]
    return found


def counts(case: Case, record: Record) -> bool:
    """Whether a run is what it is meant to be."""
    if not case.drift:
        return record.diverged_at is None and record.stopped is None
    return record.diverged_at is not None and record.diverged_at >= DRIFTS[case.drift].start + 40


def _worked(work: tuple[Case, bool]) -> tuple[bool, int | None, dict[str, int], float]:
    case, fresh = work
    record = load_or_train(case, fresh=fresh)
    return counts(case, record), record.diverged_at, record.told, record.seconds


def summary(said: Sequence[tuple[Case, int | None, dict[str, int]]], names: Sequence[str]) -> dict[str, Any]:
    """Leads and false alarms of the first of some rules."""
    leads, by_drift, false = [], dict[str, list[int]](), 0
    num_sound = sum(not case.drift for case, _, _ in said)
    for case, end, told in said:
        steps = [told[name] for name in names if name in told]
        if not case.drift:
            false += bool(steps)
        else:
            assert end is not None
            lead = max(0, end - min(steps)) if steps else 0
            leads.append(lead)
            by_drift.setdefault(case.drift, []).append(lead)
    return {
        "num_diverging": len(leads),
        "num_sound": num_sound,
        "num_tasks_diverging": len({case.task for case, _, _ in said if case.drift}),
        "num_tasks_sound": len({case.task for case, _, _ in said if not case.drift}),
        "median_lead": median(leads) if leads else None,
        "quartiles": [sorted(leads)[int(share * (len(leads) - 1))] for share in (0.25, 0.75)] if leads else None,
        "ahead": sum(lead > 0 for lead in leads) / len(leads) if leads else None,
        "at_least_15": sum(lead >= 15 for lead in leads) / len(leads) if leads else None,
        "by_drift": {name: {"num": len(own), "median_lead": median(own)} for name, own in sorted(by_drift.items())},
        "false_alarms_a_run": false / num_sound if num_sound else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is not in the cache; prints and saves leads and false alarms of both halves."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.early", description=__doc__)
    parser.add_argument("--half", choices=[*HALVES, "both"], default="both", help="which kinds (default: both)")
    parser.add_argument("--processes", type=int, default=2, help="trainings at the same time (default: 2)")
    parser.add_argument("--fresh", action="store_true", help="train anew instead of reading the cache")
    parser.add_argument("--json", type=Path, help=f"where results go (default: {RESULTS.name}; of one half nowhere)")
    arguments = parser.parse_args(argv)
    chosen = [case for case in cases() if arguments.half in ("both", case.half)]
    started = time.perf_counter()
    said: dict[str, list[tuple[Case, int | None, dict[str, int]]]] = {half: [] for half in HALVES}
    not_counted: list[str] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        work = [(case, arguments.fresh) for case in chosen]
        for case, (is_so, end, told, _) in zip(chosen, pool.imap(_worked, work, chunksize=4)):
            if is_so:
                said[case.half].append((case, end, told))
            else:
                not_counted.append(case.name)
    families = ("explosion", "loss", "lr")
    others = [s.name for r in RULES.values() for s in r.signs if s.family in families and s.name != RULE]
    described = machine.Machine().to_dict()
    results = {
        "conditions": {
            **{key: described[key] for key in ("cpu", "num_cores", "python", "fastguard", "date")},
            "torch": torch.__version__,
        },
        "halves": {
            half: {RULE: summary(of_half, [RULE]), "all other rules": summary(of_half, others)}
            for half, of_half in said.items()
            if of_half
        },
        "num_not_counted": len(not_counted),
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(results, indent=1))
    path = arguments.json or (RESULTS if arguments.half == "both" else None)
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"results: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
