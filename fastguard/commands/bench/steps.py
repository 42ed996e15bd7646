"""What guarding adds to a whole step, against what `clip_grad_norm_` adds to it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch

import fastguard

from .cases import StepCase
from .harness import Spread, garbage_collector_off
from .rivals import NO_CLIPPING, WrongResultError

PLAIN, CLIP, GUARDED = "plain", "clip", "guarded"
KINDS = (PLAIN, CLIP, GUARDED)
_MAX_WARM_UP = 30
_LR = 1e-6  # so small that the last step does the same work as the first


class Run:
    """One of three runs that start alike: unguarded, with torch's `clip_grad_norm_`, or guarded."""

    def __init__(self, case: StepCase, kind: str) -> None:
        task = case.build()
        self.loss = task.loss
        self.parameters = list(task.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=_LR, fused=True)
        if kind == GUARDED:
            fastguard.wrap(self.optimizer, task.model, max_norm=NO_CLIPPING)
        self.step: Callable[[], None] = self._clip_and_step if kind == CLIP else self._step

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def _clip_and_step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, NO_CLIPPING)
        self.optimizer.step()


def _repetition(case: StepCase, num_steps: int) -> dict[str, float]:
    """One step of each run in turn, in every order; medians of the steps and of their differences in one iteration."""
    runs = {kind: Run(case, kind) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    orders = list(permutations(KINDS))
    num_warm_up = min(_MAX_WARM_UP, num_steps)
    with garbage_collector_off():
        for index in range(-num_warm_up, num_steps):
            for kind in orders[index % len(orders)]:
                step = runs[kind].step
                started = time.perf_counter_ns()
                step()
                elapsed = time.perf_counter_ns() - started
                if index >= 0:
                    times[kind].append(elapsed / 1e3)
    for kind in (CLIP, GUARDED):
        for a, b in zip(runs[PLAIN].parameters, runs[kind].parameters, strict=True):
            if not torch.equal(a, b):
                raise WrongResultError(f"{case.title}: parameters of the {kind} run are not those of the plain one")
    record = runs[GUARDED].optimizer.guard.last  # type: ignore[attr-defined]
    if record.step != num_warm_up + num_steps - 1:
        raise WrongResultError(f"{case.title}: the guard recorded {record.step + 1} steps")
    medians = {f"{kind}_us": statistics.median(times[kind]) for kind in KINDS}
    for kind in (CLIP, GUARDED):
        differences = [a - b for a, b in zip(times[kind], times[PLAIN], strict=True)]
        medians[f"{kind}_adds_us"] = statistics.median(differences)
    return medians


def measure_steps(case: StepCase, num_repetitions: int = 5, num_steps: int | None = None) -> dict[str, Any]:
    """Times of whole steps (zero_grad, forward, backward, clip if asked for, optimizer step).

    Three runs from the same weights on the same batch take one step each in turn. What clipping and guarding add is
    the median, over the iterations, of the difference from the plain step of the same iteration.

    Raises:
        WrongResultError: the runs did not end with the same parameters, bit for bit.
    """
    num_steps = case.num_steps if num_steps is None else num_steps
    repetitions = [_repetition(case, num_steps) for _ in range(num_repetitions)]
    result: dict[str, Any] = {
        "title": case.title,
        "num_steps": num_steps,
        "num_tensors": len(list(case.build().model.parameters())),
        "repetitions": repetitions,
    }
    for key in repetitions[0]:
        result[key] = Spread.of(r[key] for r in repetitions).to_dict()
    result["ratio"] = Spread.of(r["guarded_adds_us"] / r["clip_adds_us"] for r in repetitions).to_dict()
    return result
