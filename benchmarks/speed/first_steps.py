"""What guarding adds to a run's first steps, in which a guard looks most often; every loss is observed."""

from __future__ import annotations

import tempfile
from itertools import permutations
from pathlib import Path
from typing import Any

from fastguard.commands import bench
from fastguard.commands.bench.clipping import StepCase
from fastguard.commands.bench.harness import Settings, call_ns, gc_off

NUM_STEPS = 1000


def measure_first_steps(case: StepCase, settings: Settings) -> dict[str, Any]:
    """As `bench.measure_steps`, from the very first step on; the settings of optimizer and guard stay the default.

    Raises:
        WrongResultError: as `measure_steps` does.
    """
    return bench.summary([_once(case) for _ in range(min(bench.NUM_REPETITIONS, settings.num_rounds))])


def _once(case: StepCase) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, bench.without_a_word():
        runs = {kind: bench.StepRun(case, kind) for kind in (bench.PLAIN, bench.CLIP, bench.OBSERVED)}
        orders = list(permutations(runs))
        times: dict[str, list[int]] = {kind: [] for kind in runs}
        with gc_off():
            for index in range(NUM_STEPS):
                for kind in orders[index % len(orders)]:
                    times[kind].append(call_ns(runs[kind].step))
        bench.check_runs(case, runs, bench.OBSERVED, NUM_STEPS, Path(folder))
    return bench.added(times, bench.OBSERVED, 0)
