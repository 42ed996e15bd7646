"""Alarms that are often false: no more than remarks while nothing is the worse for it."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import Finding, diagnose, make_rule
from fastguard.diagnosis.harm import is_harmed

from made_runs import bend, falling_losses, flat_losses, lost_losses, run
from records import make_bad_record


def doubtful(history):
    """Warns always."""
    return Finding("Something is odd.")


def severities(history, *others, needs_harm=True):
    rule = make_rule(doubtful, "doubtful", needs_harm=needs_harm)
    return {finding.rule: finding.severity for finding in diagnose(history, rules=[rule, *others])}


class TestIsHarmed:
    @pytest.mark.parametrize(
        ("losses", "expected"),
        [
            (falling_losses(200), False),
            (flat_losses(200), True),
            (lost_losses(200, 100), True),
            (lost_losses(200, 190, 0.1), False),  # not for two blocks yet
            (flat_losses(39), False),  # too early to tell
            (bend(falling_losses(200), (150,), lambda loss: 30.0), True),
            (bend(falling_losses(200), (150,), lambda loss: 12.0), False),
            ([None] * 200, None),
        ],
    )
    def test_by_losses(self, losses, expected):
        assert is_harmed(run(losses)) is expected

    def test_what_is_not_finite_does_harm(self):
        history = run(falling_losses(100))
        history.add(make_bad_record(100, ["a"]))
        assert is_harmed(history) is True
        assert is_harmed(run([*falling_losses(100), math.nan])) is True

    @pytest.mark.parametrize(("last", "expected"), [((1.4, 1.5), True), ((1.0, 1.5), False), ((1.2, 1.2), False)])
    def test_by_the_newest_two_validation_losses(self, last, expected):
        values = dict(zip(range(19, 200, 20), (*(2.0, 1.5, 1.2, 1.1, 1.0, 1.0, 1.0, 1.0), *last)))
        assert is_harmed(run(falling_losses(200), val_losses=values)) is expected


class TestDiagnose:
    def test_a_warning_is_a_remark_where_nothing_is_the_worse_for_it(self):
        assert severities(run(falling_losses(200))) == {"doubtful": "info"}

    @pytest.mark.parametrize("losses", [flat_losses(200), lost_losses(200, 100), [None] * 200])
    def test_it_warns_where_something_is_or_may_be(self, losses):
        assert severities(run(losses)) == {"doubtful": "warning"}
