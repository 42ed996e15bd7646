"""One package in a process of its own: `python -m benchmarks.optimizers.worker PACKAGE RESULTS`.

Each class has a process, too, a fork of this one, which may crash or hang.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from . import discovery, packages
from .training import Way, train
from .trial import Verdict, judge, one_line

SECONDS = 120.0  # of CPU time for one class, so that a busy machine changes no verdict
PATIENCE = 15  # times as long on the clock, for one that waits for what never comes


def package_named(name: str) -> packages.Package:
    """The package of that name."""
    return next(p for p in packages.PACKAGES if p.name == name)


def _warm_up() -> None:
    """Imports what torch imports at a first step, once for all forks."""
    for settings in (None, {}):
        train(Way(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), num_steps=2), settings=settings)


def _process_group() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _child(package: packages.Package, cls: Any, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(SECONDS), resource.RLIM_INFINITY))
    recipe = package.recipe(cls)
    if recipe.group:
        _process_group()
    verdict = Verdict(cls.__qualname__, cls.__module__, note=recipe.note)

    def ready(so_far: Verdict) -> None:
        nonlocal verdict
        verdict = so_far
        answer.send(("ready", verdict))

    try:
        verdict = judge(cls, package.way(cls), note=recipe.note, ready=ready)
    except BaseException as error:  # also SystemExit, which some raise
        _give_up(verdict, one_line(error))
    answer.send(("done", verdict))
    answer.close()
    os._exit(0)  # nothing of the package's at exit


def _give_up(verdict: Verdict, reason: str) -> None:
    """Enters what ended a trial: it does not run here, unless it did without a guard, which says how it is stepped."""
    if verdict.stepped:
        verdict.idle, verdict.skip, verdict.clip = {"wrap": [reason]}, [reason], [reason]
    else:
        verdict.unusable = reason


def ask(package: packages.Package, cls: Any) -> Verdict:
    """The verdict on a class, whatever becomes of the process in which it is tried."""
    recipe = package.recipe(cls)
    if recipe.unusable is not None:
        return Verdict(cls.__qualname__, cls.__module__, unusable=recipe.unusable)
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(package, cls, sending))
    process.start()
    sending.close()
    verdict = Verdict(cls.__qualname__, cls.__module__, note=recipe.note)
    deadline = time.monotonic() + PATIENCE * SECONDS
    reason = f"took longer than {PATIENCE * SECONDS:.0f} s"
    try:
        while receiving.poll(max(0.0, deadline - time.monotonic())):
            how_far, verdict = receiving.recv()
            if how_far == "done":
                return verdict
    except EOFError:
        process.join(5)
        code = process.exitcode or 0
        if code == -signal.SIGXCPU:
            reason = f"took more than {math.ceil(SECONDS)} s of CPU time"
        else:
            reason = f"ended its process: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    finally:
        process.kill()
        process.join()
    _give_up(verdict, reason)
    return verdict


def base_of(cls: type, all_of_them: Sequence[type]) -> int:
    """How many of the classes are derived from `cls`."""
    return sum(issubclass(other, cls) and other is not cls for other in all_of_them)


def _cpu_s() -> float:
    """Seconds of CPU time of this process, and of those that it waited for."""
    return sum(os.times()[:4])


def main(name: str, path: Path, only: Sequence[str] = ()) -> int:
    """Asks all classes of a package and writes a line of JSON each, the first about the package."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    package = package_named(name)
    with path.open("w", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            print(json.dumps(line, ensure_ascii=False), file=file, flush=True)

        try:
            classes, failed = discovery.classes(package.roots, package.bare)
        except ImportError as error:
            write({"package": name, "missing": one_line(error)})
            return 0
        _warm_up()
        chosen = [cls for cls in classes if not only or cls.__qualname__ in only]
        write({"package": name, "version": version(name), "classes": len(chosen), "not_imported": failed})
        for cls in chosen:
            verdict = ask(package, cls)
            if verdict.unusable and (derived := base_of(cls, classes)):
                verdict.note = f"{verdict.note} base class of {derived}".strip()
            write(dataclasses.asdict(verdict))
        write({"package": name, "cpu_seconds": round(_cpu_s(), 1)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
