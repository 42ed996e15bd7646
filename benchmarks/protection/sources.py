"""Where the recorded norms come from: the fault suites' healthy runs, and trainings made here. Each is kept."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastguard

from ..faults import runs
from ..faults.cases import SOUND, TUNE_SEEDS
from ..faults.external import runs as external
from ..faults.external.cases import CASES as EXTERNAL
from .norms import Trace, trace_of
from .tasks import TASKS, prepared
from .training import Guarded, train

CACHE = runs.ROOT / "build" / "protection"


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


@functools.cache
def digest_of(paths: Iterable[Path]) -> str:
    """Of torch's version and what stands in these files."""
    found = hashlib.sha256(torch.__version__.encode())
    for path in sorted(paths):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _trained_by(source: Source) -> tuple[Path, ...]:
    """The files that say how it trains. The guard's own are not among them: it leaves a training as it is."""
    if source.kind == "external":
        return external.own_sources(EXTERNAL[source.name])
    here, lab = Path(__file__).parent, runs.ROOT / "fastguard" / "commands" / "demo"
    suite = here.parent / "faults"
    own = {
        "faults": [suite / name for name in ("cases.py", "digits.py", "healthy.py")],
        "here": [here / name for name in ("tasks.py", "training.py")],
    }
    return (*own[source.kind], *(lab / "lab").glob("*.py"), lab / "model.py", lab / "text.py", here / "norms.py")


def name_of(source: Source) -> str:
    """A name for files, which says what it was recorded of."""
    plain = source.name.replace("/", "+")
    return f"{source.kind}-{plain}-{source.seed}.{digest_of(_trained_by(source))}"


def load(source: Source) -> list[Trace]:
    """Its trace, one for each optimizer that it has; none where it turned out not to be healthy. Out of the cache, if
    it is there, else recorded now and kept."""
    path = CACHE / "traces" / f"{name_of(source)}.pickle.z"
    if path.exists():
        kept: list[Trace] = pickle.loads(zlib.decompress(path.read_bytes()))
        return kept
    traces = _record(source)
    keep(path, zlib.compress(pickle.dumps(traces), 1))
    return traces


def keep(path: Path, content: bytes) -> None:
    """Writes a file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}-{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def _record(source: Source) -> list[Trace]:
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
