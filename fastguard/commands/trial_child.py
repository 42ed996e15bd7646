"""One run of `fastguard try`, in a process of its own: the script, unmodified, with one arm, for so many steps.

`fastguard.experiments.trial` starts it, in a copy of the script's folder, and hands it a `Task`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..experiments.arms import ARMS, SCRIPT_CLIP, Context
from ..experiments.auto import AutoGuard
from ..experiments.trial import Task
from ..records import TrainingHistory, failures
from ..sinks import JsonlSink
from . import run


class _Trial:
    """Applies the arm when the script's first guard is made, and ends the process when enough steps are taken."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._arm = ARMS[task.arm] if task.arm else None
        self._known = TrainingHistory.from_jsonl(task.base_log) if task.base_log else None
        self._num_steps = 0
        self._guard: Any = None

    def attach(self, guard: Any) -> None:
        """Takes a guard that was made within the first step of its optimizer."""
        if self._arm is not None:
            self._arm.apply(self._context(guard))
            if self._arm.from_start:  # the gradients of the first step are of the training as it was before the change
                first = iter((True,))
                guard.optimizers[0].register_step_pre_hook(
                    lambda optimizer, *given: optimizer.zero_grad(set_to_none=True) if next(first, False) else None
                )
        if self._guard is None:
            self._guard = guard
            guard.optimizers[0].register_step_pre_hook(lambda *args: self._before_step())

    def _context(self, guard: Any) -> Context:
        return Context(guard.optimizers, guard.model, guard, num_steps=self._task.num_steps, known=self._known)

    def _before_step(self) -> None:
        if self._num_steps == self._task.num_steps:
            self.end()
            os._exit(0)
        self._num_steps += 1
        self._say(str(self._num_steps))

    def end(self, problem: str = "") -> None:
        """Closes the log and says how the script ended; without an arm, also which arms do not apply, and why."""
        reasons = {}
        if self._guard is not None:
            self._guard.close()
            context = replace(self._context(self._guard), known=self._guard.history)
            reasons = {} if self._arm else {name: arm.why_not(context) for name, arm in ARMS.items()}
        known = {name: reason for name, reason in reasons.items() if reason}
        self._say(json.dumps({"problem": problem, "reasons": known}))

    def _say(self, line: str) -> None:
        os.write(self._task.progress, f"{line}\n".encode())


def _shift_seeds(by: int) -> None:
    """Seeds all generators, and adds `by` to the seeds that the script sets itself."""
    owners: list[tuple[Any, str]] = [(random, "seed"), (torch, "manual_seed")]
    with contextlib.suppress(ImportError):
        owners.append((importlib.import_module("numpy.random"), "seed"))
    for module, name in owners:
        original = getattr(module, name)

        def seed_shifted(seed: Any = None, *more: Any, original: Any = original, **options: Any) -> Any:
            return original(seed + by if isinstance(seed, int) else seed, *more, **options)

        original(by)
        setattr(module, name, seed_shifted if by else original)


def main() -> None:
    """Runs the task that the only argument describes."""
    given = json.loads(sys.argv[1])
    task = Task(**{**given, "arguments": tuple(given["arguments"])})
    _shift_seeds(task.seed)
    trial = _Trial(task)
    SCRIPT_CLIP.install()
    prepare = ARMS[task.arm].prepare if task.arm else None
    if prepare is not None:
        prepare()
    log = Path(task.log)
    watch = AutoGuard(lambda number: {"sinks": [] if number else [JsonlSink(log, append=False)]}, trial.attach)
    watch.start()
    script = [task.target, *task.arguments]
    problem = ""
    try:
        (run.module_as_main(script) if task.is_module else run.script_as_main(script))()
    except SystemExit as error:
        problem = f"it ended with {error.code}" if error.code else ""
    except BaseException as error:
        problem = failures.describe(error) if isinstance(error, Exception) else type(error).__name__
    watch.finish(has_ended=not problem)
    problem = problem or "; ".join(f"{what}: {why}" for what, why in watch.problems.items())
    trial.end(problem)


if __name__ == "__main__":
    main()
