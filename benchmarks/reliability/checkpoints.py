"""Savings of a checkpoint that kill -9 ends, at each write and at random moments: what `latest` and `best` then give.

    python -m benchmarks.reliability.checkpoints                # 200 of each; results/reliability-checkpoints.json
    python -m benchmarks.reliability.checkpoints --number 20 --dry

Each saving is made by a process that was forked from this one. Of the first kind it is ended by itself: half-way
through its n-th write, or before its n-th flush to the disk, renaming or removal, for each n that there is, again from
the first until the number is reached; or for so many of them. Of the second it saves step after step, and is ended
from outside. Then the newest file must be the one that was there before or the one that was being written, it and the
best must load with `weights_only=True` and hold what was saved, and the next saving must clean up and succeed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastguard
from benchmarks.reliability.saving import finish
from fastguard.report import whole_file as module

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reliability-checkpoints.json"
MAX_WAIT_S = 0.05


class Run:
    """A small run under guard, whose parameters say at which step they were saved."""

    def __init__(self, folder: Path) -> None:
        self.model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.guard = fastguard.wrap(optimizer, self.model).guard  # type: ignore[attr-defined]
        self.optimizer = optimizer
        self.model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        self.checkpoints = fastguard.Checkpoints(folder, keep_last=2, keep_best=1)

    def save(self, step: int) -> None:
        """Saves a step; the metric of every third is the best so far."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(float(step))
        self.checkpoints.save(self.guard, step, metric=-float(step) if step % 3 == 0 else 1.0)

    def problems(self, *steps: int) -> list[str]:
        """What is wrong with the folder, of which the newest must be one of `steps`."""
        found = []
        for path in {self.checkpoints.latest(), self.checkpoints.best()}:
            try:
                contents = torch.load(path, weights_only=True)
                values = {float(v) for name in ("0.weight", "2.bias") for v in contents["model"][name].flatten()}
                if values != {float(contents["step"])}:
                    found.append(f"{path} holds parameters of {sorted(values)}")
            except Exception as error:  # whatever keeps it from being read
                found.append(f"{path}: {type(error).__name__}: {error}")
        newest = self.checkpoints.all()[-1].step
        if newest not in steps:
            found.append(f"the newest is of step {newest}, not of one of {steps}")
        return found


class Dying:
    """Counts what a saving does to files, and ends the process at the chosen one."""

    def __init__(self, point: int) -> None:
        self.left = point
        self._os, self._open = os, open

    def is_due(self) -> bool:
        """Counts one more."""
        self.left -= 1
        return self.left == 0

    def die(self) -> None:
        """As kill -9 does."""
        self._os.kill(self._os.getpid(), signal.SIGKILL)

    def opened(self, path: Any, mode: str) -> Any:
        """A file whose writes count. It is not buffered: what was written is with the system, as after kill -9."""
        return _File(self, self._open(path, mode, buffering=0))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._os, name)
        if name not in ("fsync", "replace"):
            return value

        def counted(*arguments: Any) -> Any:
            if self.is_due():
                self.die()
            return value(*arguments)

        return counted


class _File:
    def __init__(self, dying: Dying, file: Any) -> None:
        self._dying, self._file = dying, file

    def write(self, data: Any) -> int:
        if self._dying.is_due():
            self._file.write(memoryview(data).cast("B")[: len(data) // 2])
            self._dying.die()
        return self._file.write(data)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _unlink(dying: Dying) -> Callable[..., None]:
    plain = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if dying.is_due():
            dying.die()
        plain(self, missing_ok)

    return unlink


def _forked(what: Callable[[], Any]) -> int:
    child = os.fork()
    if not child:
        try:
            what()
            os._exit(0)
        finally:
            os._exit(9)
    return child


def _code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_each_write(run: Run, number: int) -> dict[str, Any]:
    """Ends savings at all points in turn, the last ones too, `number` in all."""
    found: list[str] = []

    def save(step: int, point: int) -> Dying:
        dying = Dying(point)
        module.os, module.open = dying, dying.opened  # type: ignore[attr-defined]
        Path.unlink = _unlink(dying)  # type: ignore[method-assign]
        run.save(step)
        return dying

    for step in (1, 2, 3):  # so that there are some to be removed
        run.save(step)
    counted = run.checkpoints.folder.parent / "points"
    never = 10**9
    if _code(_forked(lambda: counted.write_text(str(never - save(4, never).left)))):
        return {"number": 0, "num_wrong": 1, "failed": ["a saving that nobody ends does not go through"]}
    num_points = int(counted.read_text())
    num_killed = 0
    for i in range(number):
        point = 1 + (i % num_points if number >= num_points else i * (num_points - 1) // max(number - 1, 1))
        step = run.checkpoints.all()[-1].step
        code = _code(_forked(lambda point=point, step=step: save(step + 1, point)))  # type: ignore[misc]
        num_killed += code == -signal.SIGKILL
        if code not in (0, -signal.SIGKILL):  # 0: there is not always as much to remove, and so not the last point
            found.append(f"point {point}: the saving ended with {code}")
        found += [f"point {point}: {problem}" for problem in run.problems(step, step + 1)]
        run.save(step + 2)
        found += [f"after point {point}: {problem}" for problem in run.problems(step + 2)]
    if num_killed < 0.9 * number:
        found.append(f"only {num_killed} of {number} savings were ended")
    figures = {"number": number, "num_points": num_points, "num_killed": num_killed, "num_wrong": len(found)}
    return {**figures, "failed": found[:8]}


def at_random_moments(run: Run, number: int, seed: int) -> dict[str, Any]:
    """Ends processes that save step after step."""
    rng, found, saved = random.Random(seed), [], Counter[int]()
    for _ in range(number):
        start = run.checkpoints.all()[-1].step if run.checkpoints.latest() else 0

        def save(start: int = start) -> None:
            for step in range(start + 1, start + 10_000):
                run.save(step)

        child = _forked(save)
        time.sleep(rng.uniform(0.0, MAX_WAIT_S))
        os.kill(child, signal.SIGKILL)
        if _code(child) != -signal.SIGKILL:
            found.append("the process ended by itself")
        newest = run.checkpoints.all()
        if newest:
            found += run.problems(newest[-1].step)
            saved[newest[-1].step - start] += 1
    return {
        "number": number,
        "num_saved": sum(k * n for k, n in saved.items()),
        "num_wrong": len(found),
        "failed": found[:8],
    }


def main() -> int:
    """The command line: prints the figures, and saves them; 1 if one did not load."""
    name = "python -m benchmarks.reliability.checkpoints"
    parser = argparse.ArgumentParser(name, description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=200, help="savings of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="save nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = [Run(Path(folder) / kind) for kind in ("writes", "moments")]
        gc.freeze()
        figures: dict[str, Any] = {
            "each_write": at_each_write(runs[0], arguments.number),
            "random_moments": at_random_moments(runs[1], arguments.number, arguments.seed),
        }
    parts = list(figures.values())
    figures = {"number": sum(p["number"] for p in parts), "num_wrong": sum(p["num_wrong"] for p in parts), **figures}
    figures["seed"] = arguments.seed
    return finish(figures, RESULTS, dry=arguments.dry)


if __name__ == "__main__":
    sys.exit(main())
