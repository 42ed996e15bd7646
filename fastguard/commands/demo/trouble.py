"""`fastguard demo --fault NAME` for what a run cannot go on from by itself: trained without recovery, and with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastguard

from ..._text import shown
from ...errors import RecoveryFailedError
from ..cli import EXIT_FAILED
from . import page
from .lab.tasks import TASKS
from .lab.training import Setup, Training
from .progress import Progress

_AT = 400  # the step at which it happens
_NUM_STEPS = 900
_NEAR = 1.1  # of the undisturbed run's loss
_SETTINGS: dict[str, Any] = {"every": 20, "ramp": 40, "window": 400}  # for runs of a few hundred steps


@dataclass(frozen=True)
class Trouble:
    """Something that ruins a run.

    Attributes:
        name, title: what it is called, and what is done to the run.
        task: one of `TASKS`.
        bring: changes the setup of a run.
    """

    name: str
    title: str
    task: str
    bring: Callable[[Setup], None]


def _ruin_weights(setup: Setup) -> None:
    def ruin(training: Training) -> None:
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(30.0)

    setup.at(_AT, ruin)


def _raise_rate(setup: Setup) -> None:
    def times(factor: float) -> Callable[[Training], None]:
        def change(training: Training) -> None:
            for group in training.optimizer.param_groups:
                group["lr"] *= factor

        return change

    setup.at(_AT, times(100.0))
    setup.at(_AT + 20, times(0.01))


TROUBLES = {
    one.name: one
    for one in (
        Trouble("ruined-weights", f"all weights × 30 at step {_AT}", "char-mlp", _ruin_weights),
        Trouble("rate-burst", f"a learning rate × 100 for 20 steps from step {_AT} on", "char-mlp", _raise_rate),
    )
}


def run(name: str, seed: int, folder: Path, *, opens: bool = False) -> int:
    """Trains undisturbed, in trouble, and in trouble with recovery; 0 if the last comes out near the first."""
    trouble = TROUBLES[name]
    torch.set_num_threads(1)
    print(f"trouble:  {name}: {trouble.title}")
    print(f"training: {trouble.task}, {_NUM_STEPS} steps, seed {seed}, clipped to a norm of 1")
    log = folder / f"{name}.jsonl"
    print(f"log:      {shown(log)}, of the run with recovery\n", flush=True)
    started = time.perf_counter()
    clean, _ = _train(trouble, seed, is_disturbed=False)
    alone, _ = _train(trouble, seed)
    helped, guard = _train(trouble, seed, log=log)
    print("$ print(optimizer.guard.report())\n")
    print(guard.report())
    guard.close()
    print(f"\n{'':<26}loss at the end")
    for what, loss in (("undisturbed", clean), ("without recovery", alone), ("with recovery=True", helped)):
        print(f"{what:<26}{'gave up' if loss is None else f'{loss:.4g}'}")
    for line in guard.recoveries:
        print(line)
    print(f"\ntrained three times, in {time.perf_counter() - started:.0f} s")
    print(page.told(log, log.with_suffix(".html"), opens=opens))
    if clean is None or helped is None or helped > _NEAR * clean:
        print(f"THE DEMO FAILED: recovery did not bring the run to within {_NEAR - 1:.0%} of the undisturbed one")
        return EXIT_FAILED
    return 0


def _train(
    trouble: Trouble, seed: int, *, is_disturbed: bool = True, log: Path | None = None
) -> tuple[float | None, fastguard.Guard]:
    """The loss at the end, None where recovery gave up, and the guard. With a log it has recovery."""
    setup = TASKS[trouble.task](seed)
    setup.num_steps, setup.val_every = _NUM_STEPS, 50
    if is_disturbed:
        trouble.bring(setup)
    sinks = [] if log is None else [fastguard.JsonlSink(log, append=False, tensors_every=10)]
    recovery = None if log is None else fastguard.Recovery(**_SETTINGS)
    training = Training(setup, sinks, recovery=recovery)
    with Progress(setup.num_steps) as progress:
        try:
            outcome = training.run(progress)
        except RecoveryFailedError:
            return None, training.guard
    return (outcome.final_loss if outcome.stopped is None else None), training.guard
