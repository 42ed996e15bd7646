"""How much Python stands in the way of a step. Counted, not timed: the same on every machine."""

import statistics
import sys
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.speed", reason="the benchmarks are not beside these tests", exc_type=ImportError)

from benchmarks.speed import frames, parts, table
from fastguard import backends
from fastguard.diagnosis import RULES

LIMITS = {measure.key: measure.at_most for measure in table.MEASURES}


@pytest.mark.skipif(not backends()["cpu"].available, reason=str(backends()["cpu"].reason))
def test_frames_of_a_step_and_its_forward_pass_on_the_cpu():
    counted = frames.count_frames("auto")
    assert len(counted["counts"]) == 256 and counted["clean"] <= LIMITS["frames-cpu"]
    # Rules have a budget of time, so how often they run depends on the machine: at most once here, unless it is loaded.
    without_rules = [count for count in counted["counts"] if count < 500]
    one_run = max(counted["counts"]) if len(without_rules) < 256 else 1100
    assert len(without_rules) >= 250  # of a starved process a run of the rules also tells a finding
    assert statistics.mean(without_rules) + one_run / 256 <= LIMITS["frames-cpu-mean"]


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


# Lines, and numbers of files. These may only fall: delete or fold before you add.
BUDGETS = {
    "package": 35_635,
    "core": 11_185,
    "files": 207,
    "tests": 32_707,
    "benchmarks": 17_957,
    "README": 158,
    "rules": 61,
}
CORE = ("records", "kernels", "step", "clip")


def num_lines(paths):
    return sum(path.read_bytes().count(b"\n") for path in paths)


def test_nothing_has_grown():
    root = Path(__file__).parents[2]
    package = list((root / "fastguard").rglob("*.py"))
    sizes = {
        "package": num_lines(package),
        "core": num_lines(path for path in package if path.relative_to(root / "fastguard").parts[0] in CORE),
        "files": len(package),
        "tests": num_lines((root / "tests").rglob("*.py")),
        "benchmarks": num_lines((root / "benchmarks").rglob("*.py")),
        "README": num_lines([root / "README.md"]),
        "rules": len(RULES),
    }
    assert {name: size for name, size in sizes.items() if size > BUDGETS[name]} == {}
    assert parts.package_lines() <= LIMITS["package-lines"] and min(sizes.values()) > 60
