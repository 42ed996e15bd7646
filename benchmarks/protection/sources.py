"""Where the recorded norms come from: the fault suites' healthy runs, out of their caches, and trainings made here."""

from __future__ import annotations

from typing import Any, NamedTuple

import fastguard

from ..faults import runs
from ..faults.cases import SOUND, TUNE_SEEDS
from ..faults.external import runs as external
from ..faults.external.cases import CASES as EXTERNAL
from .norms import Trace, trace_of
from .tasks import TASKS, prepared
from .training import Guarded, train


class Source(NamedTuple):
    """One healthy training.

    Attributes:
        kind: "faults", "external" or "here".
    """

    kind: str
    name: str
    seed: int = 0


def sources(seeds: range, *, quick: bool = False) -> list[Source]:
    """All of them; with `quick` a few."""
    own = [Source("faults", case.name, seed) for case in SOUND for seed in TUNE_SEEDS]
    others = [Source("external", case.name) for case in EXTERNAL.values() if case.half == "tune" and not case.truth]
    here = [Source("here", task, seed) for task in TASKS for seed in seeds]
    return [*own[::20], *here[:3]] if quick else [*own, *others, *here]


class _Kept(Guarded):
    """Keeps the records."""

    def __init__(self) -> None:
        self.sink = fastguard.MemorySink()
        super().__init__(sinks=[self.sink])


def load(source: Source) -> list[Trace]:
    """Its trace, one for each optimizer that it has; none where it turned out not to be healthy."""
    name = f"{source.kind}/{source.name}-{source.seed}"
    if source.kind == "faults":
        run = runs.load_or_train(source.name, source.seed)
        return _long_enough([trace_of(name, run.records)] if run.is_proven else [])
    if source.kind == "external":
        case: Any = EXTERNAL[source.name]
        if not external.load_or_prove(case).holds:
            return []
        parts = external.load_or_train(case).parts
        return _long_enough([trace_of(f"{name}/{i}", part.records) for i, part in enumerate(parts)])
    kept = _Kept()
    with runs.alone():
        train(prepared(source.name, source.seed), kept)
    return _long_enough([trace_of(name, kept.sink.records)])


def _long_enough(traces: list[Trace]) -> list[Trace]:
    return [trace for trace in traces if len(trace) >= 50]
