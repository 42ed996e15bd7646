"""What guarding adds to whole steps: more steps than `fastguard bench` takes, and means beside the medians."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import fastguard
from fastguard.commands.bench import (
    NO_CLIPPING,
    PLAIN,
    WrongResultError,
    call_ns,
    gc_off,
    require_equal,
    without_a_word,
)

from . import clipping
from .cases import StepCase
from .timing import Settings, Spread, compared

CLIP, GUARDED, OBSERVED, RECORDED = "clip", "guarded", "observed", "recorded"
NUM_REPETITIONS = 5
MIN_STEPS = 12
FIRST_STEPS = 1000
_MAX_STEPS, _MAX_WARM_UP = 3000, 100
_LR = 1e-6  # so small that the last step does the same work as the first


class StepRun:
    """One of the runs that start alike: unguarded, with torch's `clip_grad_norm_`, guarded, guarded with each loss
    observed, or that with each record written to `log`."""

    def __init__(self, case: StepCase, kind: str, log: Path) -> None:
        task = case.build()
        self.loss = task.loss
        self.parameters = list(task.model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.parameters, lr=_LR, fused=True)
        if kind in (GUARDED, OBSERVED, RECORDED):
            sinks = [fastguard.JsonlSink(log)] if kind == RECORDED else []
            fastguard.wrap(self.optimizer, task.model, max_norm=NO_CLIPPING, sinks=sinks)
        self._clips, self._observes = kind == CLIP, kind in (OBSERVED, RECORDED)

    def step(self) -> None:
        """Takes one step."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self.parameters, NO_CLIPPING)
        self.optimizer.step()
        if self._observes:
            self.optimizer.guard.observe(loss=loss)


def time_steps(case: StepCase, ours: str, settings: Settings, max_steps: int, from_start: bool) -> dict[str, float]:
    """Takes one step of each run in turn, in every order; returns what the runs add to the plain one, in us.

    That is the median of the differences in one iteration, and the mean without the slowest 1 %, in which another
    process had the core. With `from_start`, the first `max_steps` steps are timed, with no warm-up.
    """
    with tempfile.TemporaryDirectory() as folder, without_a_word():
        log = Path(folder) / "log.jsonl"
        runs = {kind: StepRun(case, kind, log) for kind in (PLAIN, CLIP, ours)}
        orders = list(itertools.permutations(runs))
        times: dict[str, list[int]] = {kind: [] for kind in runs}
        num_warm_up, num_steps = (0, max_steps) if from_start else (len(orders), len(orders))
        index = 0
        with gc_off():
            while index < num_warm_up + num_steps:
                for kind in orders[index % len(orders)]:
                    times[kind].append(call_ns(runs[kind].step))
                index += 1
                if not from_start and index == len(orders):
                    budget_ns = 4e9 * settings.budget_s / NUM_REPETITIONS  # small differences of large times
                    affordable = int(budget_ns / sum(statistics.median(values) for values in times.values()))
                    num_steps = min(max_steps, max(MIN_STEPS, affordable))
                    num_warm_up = max(len(orders), min(_MAX_WARM_UP, num_steps // 4))
        require_equal({kind: run.parameters for kind, run in runs.items()})
        guard, num_recorded = runs[ours].optimizer.guard, index
        squares = [float(p.grad.double().square().sum()) for p in runs[ours].parameters if p.grad is not None]
        clipping.require_close(f"{case.title}: norm", guard.last.norm, math.sqrt(math.fsum(squares)), 1e-6)
        guard.close()
        if ours == RECORDED:
            num_recorded = sum("step" in json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
        if guard.last.step + 1 != index or num_recorded != index:
            raise WrongResultError(f"{case.title}: of {index} steps {num_recorded} were recorded")
    counted = {kind: values[num_warm_up:] for kind, values in times.items()}
    means = {kind: statistics.mean(sorted(v)[: math.ceil(0.99 * len(v))]) for kind, v in counted.items()}
    found = {f"{kind}_us": statistics.median(values) / 1e3 for kind, values in counted.items()}
    for key, kind in (("ours_us", ours), ("theirs_us", CLIP)):
        differences = [a - b for a, b in zip(counted[kind], counted[PLAIN], strict=True)]
        found[key] = statistics.median(differences) / 1e3
        found[f"{key}_mean"] = (means[kind] - means[PLAIN]) / 1e3
    return {**found, "num_steps": len(counted[ours])}


def measure_steps(
    case: StepCase,
    settings: Settings,
    ours: str = GUARDED,
    *,
    max_steps: int = _MAX_STEPS,
    from_start: bool = False,
) -> dict[str, Any]:
    """What guarding adds to whole steps (zero_grad, forward, backward, clip if asked for, optimizer step), and what
    `clip_grad_norm_` adds, by `time_steps`: medians, and under "mean" the means; `from_start` without a warm-up.

    Raises:
        WrongResultError: the runs did not end with the same parameters, the guard's norm is wrong, or a record is
            missing.
    """
    num_repetitions = min(NUM_REPETITIONS, settings.num_rounds)
    repetitions = [time_steps(case, ours, settings, max_steps, from_start) for _ in range(num_repetitions)]
    ours_mean, theirs_mean = ([r[f"{who}_us_mean"] for r in repetitions] for who in ("ours", "theirs"))
    return {
        **compared([r["ours_us"] for r in repetitions], [r["theirs_us"] for r in repetitions]),
        "mean": compared(ours_mean, theirs_mean),
        "plain_us": Spread.of(r["plain_us"] for r in repetitions)._asdict(),
        "repetitions": repetitions,
    }
