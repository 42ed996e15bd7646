"""Runs the cases and keeps what the guard recorded, so that rules can be asked again without training again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastguard
from benchmarks.lab.plant import Planted
from benchmarks.lab.training import WATCHING, Outcome, Training
from fastguard.records import StepStats

from .cases import CASES, Case

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "faults"
# What neither trains nor records: a change in these leaves the runs as they are.
_NOT_HASHED = frozenset(
    ("bench", "cli.py", "demo", "diagnose.py", "diagnosis", "history", "info.py", "report.py", "report_tables.py")
)


@dataclass(frozen=True)
class Run:
    """One finished training.

    Attributes:
        case, seed: which one.
        planted: step and layers of the fault; None for a healthy run.
        outcome: losses and what became of the parameters.
        sound: the same for the same run without the fault; None for a healthy run.
        records: what the guard handed to its sinks, one a step.
        notes: what the guard told of the model: after how many records, and what had changed.
        max_norm: where the guard clipped.
        seconds: of the faulty or healthy run.
    """

    case: str
    seed: int
    planted: Planted | None
    outcome: Outcome
    sound: Outcome | None
    records: list[StepStats]
    notes: list[tuple[int, dict[str, Any]]]
    max_norm: float | None
    seconds: float

    @property
    def is_proven(self) -> bool:
        """Whether the fault really harmed this training, or a healthy one really ended well.

        Well: all is finite, the training loss has fallen, and the validation loss is within a third of its best, or
        within a fiftieth of where the loss began.
        """
        fault = CASES[self.case].fault
        if fault is not None and self.planted is not None and self.sound is not None:
            return fault.proof(self.outcome, self.sound, self.planted)
        last, best = self.outcome.final_val_loss, min(loss for _, loss in self.outcome.val_losses)
        is_near_best = last < max(1.33 * best, best + 0.02 * self.outcome.losses[0])
        is_whole = not self.outcome.num_ruined and self.outcome.stopped is None
        return is_near_best and is_whole and self.outcome.final_loss < self.outcome.losses[0]


class Notebook(fastguard.MemorySink):
    """Keeps the records, and what the guard noted of the model between them."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[int, dict[str, Any]]] = []

    def note(self, facts: dict[str, Any]) -> None:
        """Takes what has changed of what is known of the model."""
        self.notes.append((len(self), facts))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One thread, so that runs side by side do not differ; and no word of skips, which many of them are for."""
    logger, num_threads = logging.getLogger("fastguard"), torch.get_num_threads()
    level = logger.level
    torch.set_num_threads(1)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        logger.setLevel(level)


def train(case: Case, seed: int) -> Run:
    """Trains `case`; of its sound twin, if it has a fault, the outcome in the cache will do."""
    with alone():
        setup, planted = case.prepare(seed)
        memory = Notebook()
        started = time.perf_counter()
        outcome = Training(setup, [memory], check_every=10, **WATCHING).run()
        seconds = time.perf_counter() - started
    sound = None if case.sound is None else load_or_train(case.sound, seed).outcome
    return Run(case.name, seed, planted, outcome, sound, list(memory.records), memory.notes, setup.max_norm, seconds)


@functools.cache
def source_hash() -> str:
    """Of all that decides what a run records."""
    digest = hashlib.sha256(f"{torch.__version__} {WATCHING}".encode())
    folder = ROOT / "benchmarks" / "faults"
    paths = [folder / name for name in ("cases.py", "digits.py", "healthy.py")]
    package = ROOT / "fastguard"
    for path in package.rglob("*.py"):
        top, *below = path.relative_to(package).parts
        is_lab = top == "demo" and (below[0] == "lab" or below[0] in ("model.py", "text.py"))
        if is_lab or top not in _NOT_HASHED:
            paths.append(path)
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load_or_train(name: str, seed: int, *, fresh: bool = False) -> Run:
    """The run of a case: from the cache if it has it, unless `fresh`, else trained now and kept."""
    path = CACHE / source_hash() / f"{name}-{seed}.pickle.z"
    if path.exists() and not fresh:
        run: Run = pickle.loads(zlib.decompress(path.read_bytes()))
        return run
    run = train(CASES[name], seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(zlib.compress(pickle.dumps(run), 1))
    partial.replace(path)
    return run
