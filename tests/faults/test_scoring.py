"""How verdicts are passed, added up and written down: on made-up alarms, without training."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install -e '.[dev]'")
pytest.importorskip("benchmarks.faults", reason="the fault suite is not beside these tests", exc_type=ImportError)

from benchmarks.faults import runs, score, table
from benchmarks.faults.alarms import Alarm, Said
from benchmarks.lab.plant import Planted
from benchmarks.lab.training import Outcome

OUTCOME = Outcome([2.0, 1.0], [(1, 1.0)], frozenset(), None, (), 0)


def run_of(case: str, planted: Planted | None) -> runs.Run:
    return runs.Run(case, 0, planted, OUTCOME, None, [], [], 1.0, 0.1)


DEAD = run_of("dead-relu@digits-mlp", Planted(10, ("2", "3")))
HEALTHY = run_of("digits-mlp", None)


def test_a_right_alarm_cause_and_layer():
    said = Said((Alarm("dead-relu-units", ("units",), 12),), "dead-units", ("3",))
    verdict = score.judge(DEAD, said)
    assert (verdict.found, verdict.delay, verdict.cause_right, verdict.layer_right) == (True, 2, True, True)
    assert verdict.false_alarms == ()


def test_an_alarm_before_the_fault_is_a_false_one_and_finds_nothing():
    verdict = score.judge(DEAD, Said((Alarm("dead-relu-units", ("units",), 9),)))
    assert (verdict.found, verdict.alarmed, verdict.delay) == (False, False, None)
    assert verdict.false_alarms == ("dead-relu-units",)


def test_an_alarm_of_another_family_is_not_the_fault():
    verdict = score.judge(DEAD, Said((Alarm("overfitting", ("loss",), 12),), "overfitting", ("20.weight",)))
    assert (verdict.found, verdict.alarmed, verdict.cause_right, verdict.layer_right) == (False, True, False, False)


def test_a_layer_is_right_by_whole_parts_of_its_name():
    right = [score.judge(DEAD, Said((), None, (name,))).layer_right for name in ("2", "2.weight", "3", "20", "1.2")]
    assert right == [True, True, True, False, False]


def test_anything_said_of_a_healthy_run_is_a_false_alarm():
    verdict = score.judge(HEALTHY, Said((Alarm("norm-spike", ("explosion",), 0),), "bad-batch"))
    assert verdict.false_alarms == ("norm-spike",) and verdict.cause_right is None


def test_a_healthy_run_that_ends_badly_is_none():
    assert HEALTHY.is_proven
    for worse in ({"val_losses": [(0, 1.0), (1, 1.5)]}, {"num_ruined": 1}, {"stopped": "why"}):
        assert not dataclasses.replace(HEALTHY, outcome=dataclasses.replace(OUTCOME, **worse)).is_proven


@pytest.mark.parametrize("found", [True, False])
def test_the_terminal_has_the_fault_and_says_what_was_missed(found):
    said = Said((Alarm("dead-relu-units", ("units",), 12),) if found else (), "dead-units", ("2",))
    verdicts = [score.judge(DEAD, said), score.judge(HEALTHY, Said(()))]
    half = {"seeds": [7], "unproven": [], "alarmed_healthy": [], "false_alarms": {}}
    half |= {"summary": score.summary(verdicts), "faults": score.by_fault(verdicts)}
    results = {"faults": {"dead-relu": "biases of one layer minus 30"}, "halves": {"report": half}}
    lines = table.text(results, "report").splitlines()
    assert any(line.startswith("dead-relu") and line.endswith("dead-units 1") for line in lines)
    (line,) = (line for line in lines if line.startswith("faults found"))
    assert line.endswith("≥ 0.95        1" if found else "≥ 0.95        0 MISSED")
