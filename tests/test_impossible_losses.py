"""Losses that cannot be what they are, outputs that cannot be meant: what the graph and the first batches prove."""

from __future__ import annotations

import json
import math

import pytest
from test_input_output_rules import LINEAR, severity

from fastguard.diagnosis import RULES, diagnose, find_causes

from faulty_runs import BAD
from made_runs import batch, batches_run, falling_losses, flat_losses, noisy_norms, passed, run
from records import make_bad_record

POISSON = ("MeanBackward0", "SubBackward0", "ExpBackward0", "ExpBackward0", LINEAR)
DENSE = ("NllLoss2DBackward0", "ViewBackward0", "LogSoftmaxBackward0")


def told(history):
    causes = find_causes(diagnose(history), history)
    return causes[0].rule if causes else None


class TestOutputs:
    @pytest.mark.parametrize(
        ("later", "notes", "expected"),
        [
            ({"output_spread": 1e-4}, {}, "warning"),
            ({"output_spread": 1e-2}, {}, None),
            ({"output_spread": 1e-4, "num_samples": 8}, {}, None),  # a few may be alike
            ({"output_spread": 1e-4, "input_constant_share": 1.0}, {}, None),
            ({"output_spread": 2e-3, "output_abs_max": 2000.0}, {"target_std": 5.0}, "warning"),
            ({"output_spread": 0.5, "output_abs_max": 2000.0}, {"target_std": 5.0}, None),  # years, far from zero
        ],
    )
    def test_one_answer_in_eval_mode(self, later, notes, expected):
        proved = {"loss_kind": "squared error", "squared_losses": [2.0]} if notes else {}
        history = batches_run(
            [2.0, *falling_losses(220)], batch(), passed(**{"num_samples": 100, **later}), **proved, **notes
        )
        assert severity("same-output-for-all", history) == expected
        if expected:
            assert RULES["same-output-for-all"](history).evidence["in_eval_mode"]


class TestFloors:
    RUNAWAY = tuple(0.7 - 0.02 * s**2 for s in range(80))

    def history(self, losses=RUNAWAY, rate=1.05, cosine=0.98, **notes):
        norms = [rate**s for s in range(len(losses))]
        return run(losses, norms, change=lambda s: {"grad_cosine": cosine if s else None}, **notes)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, "warning"),
            ({"rate": 1.0}, None),
            ({"cosine": 0.5}, None),
            ({"losses": tuple(3.0 - 0.1 * s for s in range(80))}, None),  # no faster than before
            ({"losses": tuple(900.0 - 0.02 * s**2 for s in range(80))}, None),  # above zero
            ({"objective": "reward"}, None),
            ({"num_foreign_parameters": 4}, None),
        ],
    )
    def test_a_fall_that_gets_faster(self, changes, expected):
        assert severity("loss-without-floor", self.history(**changes)) == expected

    def test_what_it_ends_in_is_explained(self):
        history = self.history(is_smooth=False)
        for step in range(80, 90):
            history.add(make_bad_record(step, ["a"], loss=-50.0))
        assert severity("loss-without-floor", history) == "critical"
        assert told(history) == "wrong-loss"

    def test_minus_inf_is_no_loss(self):
        history = run(falling_losses(30), noisy_norms(30))
        history.add(make_bad_record(30, ["a"], loss=-math.inf))
        assert severity("loss-without-floor", history) == "critical"
        assert told(history) == "wrong-loss"
        assert json.dumps(RULES["loss-without-floor"](history).to_dict(), allow_nan=False)


class TestBeginnings:
    @pytest.mark.parametrize(
        ("losses", "fields", "notes", "expected"),
        [
            ([90.0, *flat_losses(120, level=4.0)], {"output_std": 40.0}, {}, "warning"),
            ([90.0, *flat_losses(50, level=4.0)], {"output_std": 40.0}, {}, "info"),
            ([90.0, *falling_losses(120, pace=20.0)], {"output_std": 40.0}, {}, "info"),
            ([90.0, *flat_losses(120, level=4.0)], {"output_std": 2.0}, {}, None),  # a sum over samples
            ([2.0, *flat_losses(120, level=4.0)], {"output_std": 40.0}, {}, None),
            ([90.0, *flat_losses(120, level=4.0)], {"output_std": 40.0}, {"loss_kind": ""}, None),
            ([90.0, *flat_losses(120, level=4.0)], {"output_std": 0.5}, {"target_std": 1.0, "target_mean": 9.0}, None),
        ],
    )
    def test_it_begins_high(self, losses, fields, notes, expected):
        if "target_std" in notes:
            notes = {"loss_kind": "squared error", "squared_losses": [90.0], "target_mean": 0.0, **notes}
        history = batches_run(losses, batch(**fields), **{"loss_kind": "cross-entropy", **notes})
        assert severity("loss-begins-high", history) == expected

    @pytest.mark.parametrize(
        ("size", "notes", "expected"),
        [
            (1.0, {"initialization": {"a": (0.1, 0.1)}}, "unknown"),  # what lies between makes them large
            (100.0, {"initialization": {"a": (0.5, 0.1)}}, "unknown"),
        ],
    )
    def test_whether_weights_are_to_blame(self, size, notes, expected):
        made = batch(output_std=40.0, input_std=size)
        history = batches_run([90.0, *flat_losses(120, level=4.0)], made, loss_kind="cross-entropy", **notes)
        found = [f for f in diagnose(history) if f.rule == "loss-begins-high"]
        assert find_causes(found, history)[0].rule == expected


class TestTargets:
    @pytest.mark.parametrize(
        ("ops", "first", "level", "expected"),
        [
            (("SmoothL1LossBackward0", LINEAR), 230.0, 40.0, "warning"),
            (("MeanBackward0", "L1LossBackward0", LINEAR), 230.0, 2.0, "info"),
            (("SmoothL1LossBackward0", LINEAR), 9.0, 9.0, None),
            (("NegBackward0", LINEAR), 230.0, 40.0, None),
        ],
    )
    def test_an_absolute_error_says_how_far_off_they_are(self, ops, first, level, expected):
        history = batches_run([first, *flat_losses(120, level=level)], batch(), loss_ops=ops)
        assert severity("target-scale", history) == expected

    @pytest.mark.parametrize(
        ("level", "output", "expected"),
        [
            (24.0, {"output_max": 6.0}, None),  # some have come near
            (24.0, {"output_max": 1.0, "output_mean": 0.0}, None),  # none has come nearer: units have died
            (32.0, {"output_max": 1.0}, None),  # not moved: the steps are too small, or clipped
            (9.0, {"output_max": 1.0}, None),
        ],
    )
    def test_targets_that_no_output_comes_near(self, level, output, expected):
        notes = {"target_mean": 5.0, "target_std": 3.0, "squared_losses": [33.0], "loss_kind": "squared error"}
        losses = [33.0] * 20 + flat_losses(200, level=level)

        def made(step):
            usual = {"output_min": 0.0, "output_std": 0.1, "output_mean": 0.99 if step else 0.0}
            return batch(**{**usual, **output})(step)

        assert severity("target-scale", batches_run(losses, made, **notes)) == expected
        assert severity("target-scale", batches_run(losses, made, last_modules=["Sigmoid"], **notes)) is None


def test_finite_outputs_of_ordinary_size_have_not_exploded():
    history = batches_run([], batch())
    for step in range(30):
        history.add(make_bad_record(step, ["a"], loss=math.inf, batches=(batch()(step),)))
    assert told(history) != "exploding-gradients"
    assert "output-loss-mismatch" not in {finding.rule for finding in diagnose(BAD["loss-begins-high"])}
