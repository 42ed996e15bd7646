"""What counts as success in the protection experiment: each criterion on figures made by hand."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("benchmarks.protection", reason="the experiment is not beside these tests", exc_type=ImportError)

from benchmarks.protection import criteria

INF, NAN = math.inf, math.nan


def test_a_rule_acts_where_the_norm_is_smaller_afterwards():
    before, after = [1.0, 1.0, 2.0, 2.0], [1.0, 1.0 - 1e-12, 1.9, 0.0]
    assert criteria.num_acted(before, after) == 2
    assert criteria.num_damped(before, after, range(4)) == 1
    assert criteria.num_damped(before, after, range(3)) == 0


def test_the_largest_update_is_of_the_planted_steps():
    after = [9.0, 1.0, 3.0, 9.0]
    assert criteria.largest_update(after, range(1, 3), usual=1.5) == 2.0
    assert criteria.largest_update(after, range(1, 3), usual=0.0) == INF


def test_shares_are_of_all_steps_and_of_the_kinds_asked_for():
    assert criteria.share_acted([{"num_acted": 1, "num_steps": 10}, {"num_acted": 0, "num_steps": 90}]) == 0.01
    planted = [{"kind": "spike", "largest": 2.0}, {"kind": "spike", "largest": 2.01}, {"kind": "burst", "largest": 9.0}]
    assert criteria.share_held(planted, "spike") == 0.5
    assert criteria.share_held(planted, "spike", "burst") == pytest.approx(1 / 3)
    assert math.isnan(criteria.share_held(planted, "early spike"))


def test_steps_damped_is_what_a_share_of_the_runs_keeps_to():
    runs = [None, *({"num_damped": n} for n in range(1, 21))]
    assert criteria.steps_damped(runs) == 19
    assert criteria.steps_damped(runs, 0.5) == 10
    assert criteria.steps_damped(runs, 1.0) == 20
    assert math.isnan(criteria.steps_damped([None]))


@pytest.mark.parametrize(
    ("losses", "final", "exploded"),
    [
        ([5.0, 3.0], 2.0, False),
        ([5.0, 3.0], 5.0, True),
        ([5.0, INF, 3.0], 2.0, True),
        ([5.0, NAN], 2.0, True),
        ([5.0, 3.0], NAN, True),
        ([5.0, 90.0, 3.0], 4.9, False),
    ],
)
def test_an_explosion(losses, final, exploded):
    assert criteria.is_exploded(losses, final) is exploded


@pytest.mark.parametrize(
    ("error", "final", "ending"),
    [
        (None, 1.0, "brought through"),
        (None, 1.02, "brought through"),
        (None, 0.5, "brought through"),
        (None, 1.021, "silent"),
        (None, INF, "silent"),
        (None, NAN, "silent"),
        ("RecoveryFailedError", 1.0, "gave up"),
        ("NonFiniteGradientsError", 1.0, "stopped"),
    ],
)
def test_how_a_run_ends(error, final, ending):
    assert criteria.ending({"error": error, "final": final}, clean=1.0) == ending


def test_only_what_harms_a_run_without_measures_is_trouble():
    assert criteria.diverges({"error": None, "final": 1.03}, clean=1.0)
    assert criteria.diverges({"error": None, "final": NAN}, clean=1.0)
    assert criteria.diverges({"error": "AnError", "final": 1.0}, clean=1.0)
    assert not criteria.diverges({"error": None, "final": 1.01}, clean=1.0)


def test_measures_of_a_protection():
    found = criteria.diverging_measures(["brought through"] * 7 + ["gave up", "silent", "stopped"])
    assert found == {"through": 0.7, "gave-up": 0.1, "stopped": 0.1, "silent": 1.0, "num_runs": 10}


def test_a_bit_is_a_difference():
    runs = [
        {"digest": "a", "digest_without": "a", "num_rollbacks": 0},
        {"digest": "a", "digest_without": "b", "num_rollbacks": 2},
    ]
    assert criteria.num_different(runs) == 1
    assert criteria.num_rollbacks(runs) == 2


def test_costs():
    assert criteria.snapshot_share(snapshot_us=5_000.0, step_us=10_000.0) == 0.01
    assert criteria.rollback_steps(rollback_us=30.0, optimizer_us=20.0) == 1.5


@pytest.mark.parametrize("measure", criteria.MEASURES, ids=lambda measure: measure.key)
def test_a_measure_is_reached_at_its_limit_and_missed_beyond_it(measure):
    worse = -1e-6 if measure.is_more_better else 1e-6
    assert measure.is_reached(measure.limit) is True
    assert measure.is_reached(measure.limit + worse) is False
    assert measure.is_reached(None) is measure.is_reached(NAN) is None
