"""What asking all rules costs, spread over the steps between two checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from fastguard.diagnosis import diagnose, find_causes

from .alarms import histories
from .runs import Run

CHECK_EVERY = 50


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
