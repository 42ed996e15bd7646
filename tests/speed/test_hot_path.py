"""How much Python stands in the way of a step. Counted, not timed: the same on every machine."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("benchmarks.speed", reason="the benchmarks are not beside these tests", exc_type=ImportError)

from benchmarks.speed import frames, parts, table
from fastguard import backends

LIMITS = {measure.key: measure.at_most for measure in table.MEASURES}


@pytest.mark.skipif(not backends()["cpu"].available, reason=str(backends()["cpu"].reason))
def test_frames_of_a_clean_step_on_the_cpu():
    assert frames.count_frames("auto")["clean"] <= LIMITS["frames-cpu"]


@pytest.mark.slow
def test_frames_of_a_clean_step_on_the_gpu_path():
    pytest.importorskip("triton", reason="Triton is not installed")
    counted = frames.count_frames_interpreted(num_warm_up=24, num_steps=7)
    assert counted["clean"] <= LIMITS["frames-gpu"]


def test_frames_are_those_of_this_package_alone():
    counted = frames.count_frames("reference", num_warm_up=2, num_steps=3)
    assert len(counted["counts"]) == 3 and 0 < counted["clean"] <= max(counted["counts"])
    assert frames._frames_of(lambda: sorted([3, 1, 2], key=lambda x: -x)) == 0
    assert sys.getprofile() is None or sys.getprofile().__name__ != "count"


def test_the_package_has_not_grown():
    assert 1000 < parts.package_lines() <= LIMITS["package-lines"]
