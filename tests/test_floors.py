"""A loss that stands: where it is known to have come down, or may yet, that is no fault."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis.signals import fall_of

from made_runs import batch, batches_run, falling_losses, flat_losses, run, severity

CLASSES = {"loss_kind": "cross-entropy", "target_entropy": math.log(10), "num_targets": 512, "num_target_classes": 10}


def of_classes(losses, **notes):
    return batches_run(losses, batch(output_width=10), **{**CLASSES, **notes})


@pytest.mark.parametrize(
    ("level", "notes", "expected"),
    [
        (2.30, {}, "warning"),
        (2.22, {"target_entropy": 2.25}, "warning"),  # that is how uneven the classes are
        (2.60, {}, "warning"),  # worse than guessing
    ],
)
def test_a_loss_below_what_knowing_nothing_gives_has_been_learnt(level, notes, expected):
    assert severity("loss-not-decreasing", of_classes(flat_losses(250, level=level), **notes)) == expected


@pytest.mark.parametrize(
    ("start", "floor", "expected"),
    [(0.45, 0.4, "info"), (2.0, 1.9, "info"), (2.5, 2.2, "warning"), (2.5, 2.31, "warning")],  # 0.85 ln 10 is 1.96
)
def test_a_model_that_was_trained_before_is_no_underfitting(start, floor, expected):
    falling = falling_losses(40, start=start, pace=8.0, floor=floor, noise=0.002)
    losses = [*falling, *flat_losses(200, level=floor, noise=0.002)]
    assert severity("underfitting", of_classes(losses)) == expected


def test_what_is_learnt_by_heart_later_is_no_floor():
    losses = [*falling_losses(120, start=2.4, pace=5.0, floor=2.31, noise=0.002), *flat_losses(80, level=2.25)]
    assert severity("underfitting", of_classes(losses), flat=0.1) == "warning"


@pytest.mark.parametrize(("a_step", "expected"), [(1e-4, "info"), (0.0, "warning")])
def test_a_loss_that_surely_falls_if_slowly_is_decreasing(a_step, expected):
    losses = [loss - a_step * step for step, loss in enumerate(flat_losses(250))]
    assert severity("loss-not-decreasing", run(losses)) == expected


@pytest.mark.parametrize(("rule", "patience"), [("loss-not-decreasing", 200), ("underfitting", 150)])
def test_a_plateau_is_given_time_to_end_unless_the_run_does(rule, patience):
    history = run([2.4] * 10 + flat_losses(patience - 11, level=2.39))
    assert severity(rule, history) == "info"
    assert severity(rule, run([2.4] * 10 + flat_losses(patience - 10, level=2.39))) == "warning"
    history.has_ended = True
    assert severity(rule, history) == "warning"


@pytest.mark.parametrize(
    "losses", [[math.nan] * 300, [*flat_losses(150), *[math.nan] * 512, 1.0], [1e200, -1e200] * 100]
)
@pytest.mark.parametrize("rule", ["loss-not-decreasing", "underfitting", "loss-still-falling", "steps-too-small"])
def test_losses_of_which_there_is_hardly_one_or_none_that_can_be_squared(rule, losses):
    history = of_classes(losses)
    history.has_ended = True
    assert severity(rule, history) in (None, "info", "warning")


def test_the_fall_of_too_few_values_is_not_sure():
    assert [fall_of(values) for values in ([], [1.0], [2.0, 1.0])] == [(0.0, math.inf)] * 3
    assert fall_of([3.0, 2.0, 1.0]) == pytest.approx((2.0, 0.0))
