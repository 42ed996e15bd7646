"""Trains the cases, and keeps what the guards recorded, so that rules can be asked again without training again."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastguard.records import StepStats, TrainingHistory

from ..alarms import histories
from ..runs import Notebook, alone
from .case import Case, Proof
from .cases import CASES
from .loop import Guarded, Outcome, carry_out

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / "build" / "faults-external"
# Without a budget of time, which would make the sampled steps depend on the machine's load.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "all": {"activations": {"overhead_budget": None}, "weights": 10},
}
# What neither trains nor records: a change in these leaves the runs as they are.
_NOT_RECORDING = frozenset(("commands", "diagnosis", "history", "report", "tools", "visualization"))
_COMMON = (
    "bases.py",
    "case.py",
    "damage.py",
    "data.py",
    "loop.py",
    "nets.py",
    "operators.py",
    "optimizers.py",
    "qualities.py",
)


@dataclass(frozen=True)
class Part:
    """What one guard recorded: a run with two optimizers has two of them.

    Attributes:
        records: what it handed to its sink, one a step.
        notes: what it told of the model: after how many records, and what had changed.
        max_norm: where it clipped.
    """

    records: list[StepStats]
    notes: list[tuple[int, dict[str, Any]]]
    max_norm: float | None

    def history(self) -> TrainingHistory:
        """The history as it was at the end."""
        history = TrainingHistory()
        for _, history in histories(self):  # noqa: B007
            pass
        return history


@dataclass(frozen=True)
class Run:
    """One finished training under guard.

    Attributes:
        case: its name.
        settings: what was watched: a key of `SETTINGS`.
        outcome: how it ended.
        parts: what each guard recorded; none where the optimizer was refused.
        seconds: of the training.
    """

    case: str
    settings: str
    outcome: Outcome
    parts: tuple[Part, ...]
    seconds: float


def train(case: Case, settings: str = "default") -> Run:
    """Trains `case` as a user would, under guard."""
    with alone():
        plan = case.make(case.seed)
        watch = Guarded(Notebook, SETTINGS[settings])
        started = time.perf_counter()
        outcome = carry_out(plan, watch)
        seconds = time.perf_counter() - started
        parts = []
        for guard, sink, limit in zip(watch.guards, watch.sinks, watch.limits):
            guard.flush()
            guard.report()  # brings what is known of the model up to date
            guard.close()
            parts.append(Part(list(sink.records), sink.notes, limit))
    return Run(case.name, settings, outcome, tuple(parts), seconds)


def proof(case: Case) -> Proof:
    """Whether the case is what it is meant to be: harmed by its set's test, or sound.

    Sound: it reached its quality, the guard let it end, and the last validation loss lies within a third of the best.
    """
    with alone():
        if case.harm is not None:
            return case.harm(case)
        plan = case.make(case.seed)
        run = load_or_train(case, "default")
        reached = run.outcome
        holds = reached.quality >= plan.least and reached.stopped is None and reached.refused is None
        figures = {"quality": reached.quality, "least": plan.least}
        losses = [record.val_loss for record in run.parts[0].records if record.val_loss is not None]
        if plan.judged_by_loss and losses:
            best = min(losses)
            limit = best + max(abs(best) / 3.0, 0.02 * abs(losses[0] - best))
            holds = holds and losses[-1] <= limit
            figures |= {"last_val_loss": losses[-1], "limit": limit}
        return Proof(holds, figures)


@functools.cache
def _hash(*folders: Path) -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(folders):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def own_sources(case: Case) -> tuple[Path, ...]:
    """The files that say how a case trains."""
    here = Path(__file__).parent
    home = here.joinpath(*case.home.removeprefix(__package__ + ".").split(".")).with_suffix(".py")
    return *(here / name for name in _COMMON), home


@functools.cache
def _guard_sources() -> tuple[Path, ...]:
    package = ROOT / "fastguard"
    return tuple(path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in _NOT_RECORDING)


def _place(case: Case, suffix: str, *sources: Path) -> Path:
    name = case.name.replace("/", "+")
    return CACHE / case.set / f"{name}@{_hash(*sources)}.{suffix}"


def _kept(path: Path) -> list[Path]:
    """What is kept of the same case and settings, the newest first, whichever sources recorded it."""
    name, _, rest = path.name.partition("@")
    found = path.parent.glob(f"{name}@*.{rest.partition('.')[2]}")
    return sorted(found, key=lambda one: one.stat().st_mtime, reverse=True)


def _keep(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in _kept(path):
        old.unlink(missing_ok=True)
    partial = path.with_name(f"{os.getpid()}-{path.name}")
    partial.write_bytes(content)
    partial.replace(path)


def load_or_train(case: Case, settings: str = "default", *, fresh: bool = False, replay: bool = False) -> Run:
    """The run of a case: from the cache if it is there, unless `fresh`, else trained now and kept.

    With `replay` a run that older sources recorded will do: the rules are asked about it as it is.
    """
    path = _place(case, f"{settings}.pickle.z", *own_sources(case), *_guard_sources())
    kept = [path] if path.exists() else _kept(path)[:1] if replay else []
    if kept and not fresh:
        run: Run = pickle.loads(zlib.decompress(kept[0].read_bytes()))
        return run
    run = train(case, settings)
    _keep(path, zlib.compress(pickle.dumps(run), 1))
    return run


def load_or_prove(case: Case, *, fresh: bool = False, replay: bool = False) -> Proof:
    """The proof of a case, from the cache if it is there. It depends on the guard only where the run must be sound."""
    watching = _guard_sources() if case.harm is None else ()
    own = Path(__file__).parent / "harm.py"
    path = _place(case, "proof.json", *own_sources(case), own, *watching)
    kept = [path] if path.exists() else _kept(path)[:1] if replay else []
    if kept and not fresh:
        return Proof(**json.loads(kept[0].read_text(encoding="utf-8")))
    found = proof(case)
    _keep(path, json.dumps({"holds": found.holds, "figures": dict(found.figures)}).encode())
    return found


def recorded(half: str, settings: str = "default") -> Iterator[tuple[Run, TrainingHistory]]:
    """Each run of a half that counts, with the history that its guard had at the end: a pair a guard.

    `CASES[run.case].truth` is what a right answer says of it, None of a sound one. What is not in the cache is trained.

    Args:
        half: "tune" or "report". Nothing may be fitted on the latter.
        settings: a key of `SETTINGS`.
    """
    for case in CASES.values():
        if case.half == half and load_or_prove(case).holds:
            run = load_or_train(case, settings)
            for part in run.parts:
                yield run, part.history()
