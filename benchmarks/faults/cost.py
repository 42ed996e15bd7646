"""What asking all rules costs, spread over the steps between two checks. `python -m benchmarks.faults.cost`: of many
tensors, and what the sampled evidence costs."""

from __future__ import annotations

import json
import math
import random
import struct
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

import fastguard
from fastguard.diagnosis import RULES, diagnose, find_causes
from fastguard.records import StepStats, TensorStats, TrainingHistory
from fastguard.records.columns import COLUMNS, completed
from fastguard.step.checkup import AHEAD, GLANCE_EVERY

from .alarms import histories
from .runs import ROOT, Run

CHECK_EVERY = 50
RESULTS = ROOT / "benchmarks" / "results" / "faults-cost.json"
_MANY = 1000  # tensors
_NUM_STEPS = 1000


def measure(runs: Sequence[Run], repeats: int = 3) -> dict[str, Any]:
    """Seconds of one check of all rules and causes, at each 50th step of `runs`; the median of `repeats` a check."""
    checks = []
    for run in runs:
        for number, (_, history) in enumerate(histories(run), 1):
            if number % CHECK_EVERY == 0:
                times = []
                for _ in range(repeats):
                    started = time.perf_counter()
                    find_causes(diagnose(history), history)
                    times.append(time.perf_counter() - started)
                checks.append(median(times))
    return {
        "check_us": 1e6 * median(checks),
        "check_us_max": 1e6 * max(checks),
        "per_step_us": 1e6 * median(checks) / CHECK_EVERY,
        "num_checks": len(checks),
        "check_every": CHECK_EVERY,
    }


def many_tensors(num_tensors: int = _MANY, num_steps: int = 600) -> TrainingHistory:
    """A run of a model with many tensors, invented: a falling loss, norms with noise."""
    history, dice = TrainingHistory(), random.Random(0)
    names = [
        f"blocks.{i // 4}.{part}"
        for i, part in zip(range(num_tensors), ("a.weight", "a.bias", "b.weight", "b.bias") * num_tensors)
    ]
    history.note_model(names=names, initialization={name: (0.1, 0.1) for name in names if name.endswith("weight")})
    for step in range(num_steps):
        rows = []
        for _ in names:
            norm = dice.lognormvariate(0.0, 0.3)
            rows += completed([64, norm * norm, 0.1, norm / 2, 1e-4, 0, 0, 0])
        table = TensorStats(struct.pack(f"{len(rows)}d", *rows), names)
        history.add(StepStats(step, table, loss=0.3 + 2.0 * math.exp(-step / 60) + dice.gauss(0.0, 0.02), lr=1e-3))
    assert len(rows) == len(names) * len(COLUMNS)
    return history


def asking(history: TrainingHistory, repeats: int = 20) -> dict[str, float]:
    """Microseconds of CPU time of all rules and causes, and of those that look ahead: the least of `repeats`."""
    early = [RULES[name] for name in AHEAD]

    def once(rules: list[Any] | None) -> float:
        history.revision += 1  # nothing is kept from the time before
        started = time.process_time()
        found = diagnose(history, rules=rules)
        if rules is None:
            find_causes(found, history)
        return 1e6 * (time.process_time() - started)

    return {
        "check_us": round(whole := min(once(None) for _ in range(repeats)), 1),
        "glance_us": round(glance := min(once(early) for _ in range(repeats)), 1),
        "per_step_us": round(whole / CHECK_EVERY + glance / GLANCE_EVERY, 2),
    }


def evidence(num_steps: int = _NUM_STEPS, repeats: int = 3) -> dict[str, float]:
    """Microseconds of CPU time that the sampled evidence adds to a step, on average over the first so many of a run.

    The difference between training with it and without, one after the other; the least of `repeats`.
    """

    def run(*, with_evidence: bool) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, check_every=0)
        if not with_evidence:
            optimizer.guard.sampling.observers.close()
            optimizer.guard.run.wakes_at = math.inf
        x, y = torch.randn(64, 32), torch.randint(10, (64,))
        started = time.process_time()
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.guard.observe(loss=loss)
        seconds = time.process_time() - started
        optimizer.guard.detach()
        return 1e6 * seconds / num_steps

    with_it, without = ([run(with_evidence=flag) for _ in range(repeats)] for flag in (True, False))
    return {"step_us": round(min(without), 1), "evidence_us": round(min(with_it) - min(without), 1)}


def main() -> int:
    """Measures, prints and saves."""
    torch.set_num_threads(1)
    found = {f"{num}_tensors": asking(many_tensors(num)) for num in (10, 100, _MANY)}
    results = {"rules": found, "evidence_of_the_first_1000_steps": evidence()}
    print(json.dumps(results, indent=1))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
