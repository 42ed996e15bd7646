"""The set-ups that preflight is measured on: enough of each, halves that have all, and a score that counts right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastguard.tools.preflight.causes import EXPLANATIONS

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks" / "faults" / "preflight.py").is_file():
    pytest.skip("benchmarks/ is not beside the tests: they run from a copy without it", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.faults import preflight as benchmark  # noqa: E402

NAMES = [fault.name for fault in benchmark.FAULTS]


def asked(source="", right=(), causes=(), findings=()):
    return benchmark.Asked("a", 0, "report", source, right, causes, findings, 1.0)


def test_there_are_enough_and_names_are_their_own():
    assert len(benchmark.TASKS) >= 40 and len(set(NAMES)) == len(NAMES) >= 40
    assert not set(NAMES) & set(benchmark.TASKS)


def test_either_half_has_every_set():
    for half in ("tune", "report"):
        mine = [fault for fault in benchmark.FAULTS if benchmark.half(fault.name) == half]
        assert {fault.source for fault in mine} == {"A", "B", "C", "D"}
        assert sum(benchmark.half(name) == half for name in benchmark.TASKS) >= 20


def test_right_causes_are_causes_that_can_be_told_or_are_known_to_be_out_of_sight():
    right = {cause for fault in benchmark.FAULTS for cause in fault.causes}
    assert right - EXPLANATIONS.keys() == {"wrong-targets"}  # labels that were changed: nobody sees it beforehand


def test_the_score():
    figures = benchmark.measures(
        [
            asked(),
            asked(findings=("x",), causes=("wrong-loss",)),
            asked("A", ("wrong-loss",), ("wrong-loss", "dead-units"), ("x",)),
            asked("B", ("wrong-loss",), ("dead-units", "wrong-loss"), ("x",)),
            asked("D", ("wrong-loss",)),
        ]
    )
    assert figures["false_alarms"] == 0.5
    assert figures["first_cause_right"] == pytest.approx(1 / 3)
    assert figures["first_cause_right_published"] == 0.5
    assert figures["cause_among_those_told"] == pytest.approx(2 / 3)
    assert figures["wrong_cause_first"] == 0.5
    assert figures["by_set"] == {"A": 1.0, "B": 0.0, "C": None, "D": 0.0}
