"""The benchmarks of reliability in short: what is ended, sinks that cannot write, a soak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks.reliability", reason="the benchmarks are not beside these tests", exc_type=ImportError)

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")]


def _figures(name: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.reliability.{name}", *arguments, "--dry"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.stdout


def test_trainings_that_are_ended_at_random_moments() -> None:
    figures, shown = _figures("kill", "--number", "30")
    assert figures["num_moments"] == 90
    assert (figures["num_wrong"], figures["num_unreadable_logs"], figures["num_records_lost_in_silence"]) == (
        0,
        0,
        0,
    ), shown
    assert figures["kill_9"]["most_records_behind"] <= 1 and figures["sigterm"]["most_records_behind"] == 0, shown


def test_sinks_that_cannot_write() -> None:
    figures, shown = _figures("disks")
    assert figures["num_wrong"] == 0 and figures["number"] + figures["num_not_run"] == 11, shown
    assert figures["number"] >= 9, shown


def test_checkpoints_whose_saving_is_killed() -> None:
    figures, shown = _figures("checkpoints", "--number", "25")
    assert figures["number"] == 50 and figures["num_wrong"] == 0, shown
    assert figures["each_write"]["num_points"] > 100, shown


def test_a_short_soak() -> None:
    figures, shown = _figures("soak", "--number", "60000")
    assert figures["growth_bytes"] <= 2**20 and figures["num_lines_missing"] == figures["num_records_lost"] == 0, shown
    assert figures["num_skipped"] == 12
