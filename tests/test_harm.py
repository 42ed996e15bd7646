"""Alarms that are often false: no more than remarks while nothing is the worse for it."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import RULES, Finding, diagnose, make_rule
from fastguard.diagnosis.harm import is_harmed

from made_runs import bend, ended, falling_losses, flat_losses, lost_losses, run, signs_in
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

    def test_a_short_run_is_judged_when_it_has_ended(self):
        assert is_harmed(ended(run(flat_losses(39)))) is True
        assert is_harmed(ended(run(falling_losses(39)))) is False

    def test_games_and_rewards_do_not_tell(self):
        assert is_harmed(run(flat_losses(200), objective="reward")) is False

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

    def test_it_warns_beside_another_that_does_not_need_harm(self):
        sure = make_rule(lambda history: Finding("Something is wrong."), "sure")
        assert severities(run(falling_losses(200)), sure) == {"doubtful": "warning", "sure": "warning"}

    def test_it_warns_of_what_is_certain(self):
        rule = make_rule(lambda history: Finding("It is so.", evidence={"is_certain": True}), "shown", needs_harm=True)
        found = diagnose(run(falling_losses(200)), rules=[rule])
        assert [finding.severity for finding in found] == ["warning"]

    @pytest.mark.parametrize(
        ("steps", "num_steps", "expected"),
        [
            ((150,), 200, "warning"),
            ((60, 150), 200, "warning"),
            ((60, 100, 150), 200, "info"),  # of the run, perhaps
            ((150, 151), 200, "info"),  # of the step before the second, perhaps
            ((150,), 152, "info"),  # what follows is not known yet
        ],
    )
    def test_one_batch_far_out_with_usual_ones_around_it_is_told_without_harm(self, steps, num_steps, expected):
        history = run(bend(falling_losses(num_steps), steps, lambda loss: 12.0))
        assert is_harmed(history) is False
        severities = {finding.rule: finding.severity for finding in diagnose(history)}
        assert severities["loss-spike"] == expected

    def test_a_remark_beside_it_does_not_make_it_warn(self):
        remark = make_rule(lambda history: Finding("By the way.", severity="info"), "remark")
        assert severities(run(falling_losses(200)), remark)["doubtful"] == "info"

    def test_rules_do_not_need_it_unless_they_say_so(self):
        assert severities(run(falling_losses(200)), needs_harm=False) == {"doubtful": "warning"}

    def test_spikes_that_come_back_are_told_louder_where_the_loss_is_lost_losses(self):
        spikes = range(27, 300, 44)

        def severity(losses):
            found = signs_in(run(bend(losses, spikes, lambda value: value + 2.0)))
            return found["periodic-loss-spikes"].severity

        assert RULES["periodic-loss-spikes"].needs_harm
        assert severity(falling_losses(300)) == "info"
        assert severity(lost_losses(300, 200)) == "warning"
