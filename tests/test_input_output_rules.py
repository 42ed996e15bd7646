"""Where the rules on outputs and inputs stop: sound runs that look like bad ones, and remarks."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import RULES
from fastguard.diagnosis.rules.output import loss_and_activation

from made_runs import (
    batch,
    batches_run,
    bend,
    chance_losses,
    falling_losses,
    flat_losses,
    passed,
    run,
    severity,
    validated,
)

LINEAR = "AddmmBackward0"
CROSS_ENTROPY = ("NllLossBackward0", "LogSoftmaxBackward0")


class TestOutput:
    @pytest.mark.parametrize(
        ("ops", "expected"),
        [
            ((*CROSS_ENTROPY, LINEAR), ("cross-entropy", "none")),
            ((*CROSS_ENTROPY, "ViewBackward0", "SoftmaxBackward0", LINEAR), ("cross-entropy", "softmax")),
            (("MeanBackward0", *CROSS_ENTROPY, "SigmoidBackward0"), ("cross-entropy", "sigmoid")),
            (CROSS_ENTROPY, ("cross-entropy", "")),
            (("NllLossBackward0", LINEAR), ("negative log-likelihood", "none")),
            (("NllLossBackward0", "SoftmaxBackward0"), ("negative log-likelihood", "softmax")),
            (("NllLossBackward0", "LogBackward0", "SoftmaxBackward0"), ("negative log-likelihood", "log")),
            (("BinaryCrossEntropyBackward0", "SigmoidBackward0", LINEAR), ("binary cross-entropy", "sigmoid")),
            (("MseLossBackward0", "TanhBackward0", LINEAR), ("squared error", "tanh")),
            (("NegBackward0", "MeanBackward0", LINEAR), ("", "")),
            (("AddBackward0", *CROSS_ENTROPY), ("", "")),  # a sum of two losses
            ((), ("", "")),
        ],
    )
    def test_names_of_losses(self, ops, expected):
        assert loss_and_activation(ops) == expected

    @pytest.mark.parametrize(
        ("ops", "activation"),
        [
            ((*CROSS_ENTROPY, LINEAR), None),
            ((*CROSS_ENTROPY, "ReluBackward0", LINEAR), "ReLU"),
            ((*CROSS_ENTROPY, "ClampBackward1", LINEAR), "clamp"),
            ((*CROSS_ENTROPY, "MeanBackward0", "ReluBackward0"), None),  # pooled, as SqueezeNet ends
            (("MulBackward0", *CROSS_ENTROPY, "ReluBackward0", LINEAR), "ReLU"),  # the loss is weighted
            ((*CROSS_ENTROPY, "MulBackward0", "TanhBackward0"), None),  # capped logits, times a temperature
            (("BinaryCrossEntropyWithLogitsBackward0", "SigmoidBackward0"), "sigmoid"),
            (("BinaryCrossEntropyWithLogitsBackward0", LINEAR), None),
            (("BinaryCrossEntropyBackward0", "SigmoidBackward0", LINEAR), None),
            (("BinaryCrossEntropyBackward0", "SoftmaxBackward0", LINEAR), None),
            (("BinaryCrossEntropyBackward0", LINEAR), "none"),
            (("BinaryCrossEntropyBackward0",), None),
            (("NllLossBackward0", "LogSoftmaxBackward0", LINEAR), None),
            (("NllLossBackward0", LINEAR), "none"),
            (("NllLossBackward0", "LogBackward0", "SoftmaxBackward0"), None),
            (("MseLossBackward0", "SigmoidBackward0", LINEAR), None),
            (("SubBackward0", "LogSigmoidBackward0"), None),
        ],
    )
    def test_output_against_loss(self, ops, activation):
        finding = RULES["output-against-loss"](run(falling_losses(20), loss_ops=ops))
        assert (finding and finding.evidence["activation"]) == activation

    @pytest.mark.parametrize(
        ("layer", "low", "high", "is_at_its_end"),
        [
            ("Sigmoid", 0.985, 1.0, True),
            ("Sigmoid", 0.0, 0.015, True),
            ("Sigmoid", 0.0, 1.0, False),
            ("Tanh", -1.0, -0.985, True),
            ("Tanh", -1.0, 1.0, False),
            ("ReLU", 0.0, 3.0, False),
            ("LeakyReLU", -0.1, 3.0, False),
        ],
    )
    def test_ends_of_the_range(self, layer, low, high, is_at_its_end):
        made = batch(output_min=low, output_max=high, output_abs_max=max(-low, high))
        finding = RULES["bounded-output"](batches_run(flat_losses(100), made, last_modules=[layer, "Linear"]))
        assert finding.evidence["is_at_its_end"] is is_at_its_end

    @pytest.mark.parametrize(
        ("losses", "notes"),
        [
            (flat_losses(100), {"last_modules": ["Linear", "ReLU"]}),
            (flat_losses(100), {"last_modules": ["LogSoftmax", "Linear"]}),  # for nll_loss
            (flat_losses(100), {"last_modules": ["Sigmoid"], "loss_ops": ["BinaryCrossEntropyBackward0"]}),
            (flat_losses(59), {"last_modules": ["ReLU"]}),
            (falling_losses(100, pace=20.0), {"last_modules": ["Sigmoid"]}),
            (flat_losses(100), {}),
        ],
    )
    def test_outputs_that_are_as_they_should_be(self, losses, notes):
        assert severity("bounded-output", run(losses, **notes)) is None

    @pytest.mark.parametrize(
        ("losses", "expected"),
        [
            (flat_losses(120), "warning"),
            (flat_losses(119), "info"),
            ([2.3] * 10 + [1.9] * 110, "warning"),
            ([2.3] * 10 + [1.8] * 110, "info"),
            ([2.3] * 10 + [1.2] * 110, "info"),
            ([2.3] * 10 + [1.1] * 110, None),
        ],
    )
    def test_a_bounded_output_within_its_range_is_a_remark_unless_little_is_learnt_for_long(self, losses, expected):
        assert severity("bounded-output", run(losses, last_modules=["Sigmoid", "Linear"])) == expected

    def test_a_bounded_output_at_its_end_is_no_remark(self):
        made = batch(output_min=0.0, output_max=0.015, output_abs_max=0.015)
        history = batches_run(flat_losses(60), made, last_modules=["Sigmoid", "Linear"])
        assert severity("bounded-output", history) == "warning"

    @pytest.mark.parametrize(
        ("floor", "start", "fields", "fires"),
        [
            (0.6, math.log(4), {}, False),  # below what is possible on probabilities
            (0.8, 2.3, {}, False),  # another loss
            (0.8, math.log(4), {"output_rows_sum_to_one": False}, False),
            (0.8, math.log(4), {"output_width": 1}, False),
        ],
    )
    def test_floor_of_a_softmax(self, floor, start, fields, fires):
        losses = falling_losses(200, start=start, floor=floor, noise=0.002)
        history = batches_run(losses, batch(**{"output_rows_sum_to_one": True, **fields}))
        assert (RULES["softmax-floor"](history) is not None) == fires

    @pytest.mark.parametrize(
        ("fields", "fires"),
        [
            ({"output_spread": 0.0}, True),
            ({"output_spread": 1e-3}, False),
            ({"output_spread": 0.0, "input_constant_share": 1.0}, False),  # one answer to one input
            ({"output_spread": 0.0, "num_samples": 1}, False),
            ({"output_spread": math.nan}, False),
        ],
    )
    def test_same_output(self, fields, fires):
        finding = RULES["same-output-for-all"](batches_run(flat_losses(60), batch(**fields)))
        assert (finding is not None) == fires
        if finding is not None:
            assert finding.evidence["began_so"] is True

    @pytest.mark.parametrize(
        ("losses", "notes", "fires"),
        [
            (chance_losses(100), {}, True),
            (chance_losses(99), {}, False),
            (chance_losses(150, 5), {}, False),
            (falling_losses(150, start=1.386, floor=1.2), {}, False),
            (chance_losses(150), {"loss_ops": [*CROSS_ENTROPY, LINEAR]}, True),
        ],
    )
    def test_chance(self, losses, notes, fires):
        assert (RULES["loss-at-chance"](batches_run(losses, batch(), **notes)) is not None) == fires

    @pytest.mark.parametrize(
        ("level", "notes", "width", "fires"),
        [
            (4.0, {}, 1, True),
            (3.65, {}, 1, True),
            (3.5, {}, 1, False),
            (4.75, {}, 1, True),
            (4.9, {}, 1, False),
            (4.0, {}, 2, True),
            (4.0, {"squared_losses": [9.0]}, 1, False),  # it never was a squared error
            (4.0, {"loss_kind": "absolute error"}, 1, False),
            (4.0, {"target_mean": 7.0}, 1, True),
            (4.0, {"target_std": 0.0}, 1, False),
            (4.0, {"target_std": 1.9}, 1, True),
            (4.0, {"target_std": 1.7}, 1, False),
        ],
    )
    def test_chance_of_a_squared_error(self, level, notes, width, fires):
        known = {"loss_kind": "squared error", "squared_losses": [level], "target_mean": 0.0, "target_std": 2.0}
        losses = [level, *flat_losses(119, level=level, noise=0.0)]
        history = batches_run(losses, batch(output_width=width), **{**known, **notes})
        finding = RULES["loss-at-chance"](history)
        assert (finding is not None) == fires
        assert finding is None or finding.evidence["chance"] == {**known, **notes}["target_std"] ** 2

    def test_a_squared_error_that_was_lower_once_is_not_at_chance(self):
        known = {"loss_kind": "squared error", "squared_losses": [4.0], "target_mean": 0.0, "target_std": 2.0}
        history = batches_run([*[4.0] * 40, *[2.0] * 60, *[4.0] * 100], batch(output_width=1), **known)
        assert severity("loss-at-chance", history) is None


class TestInputs:
    def test_nan_in_validation_counts_too(self):
        history = batches_run(falling_losses(60), batch(), passed(input_num_nonfinite=2))
        assert RULES["batch-not-finite"](history).summary == "6 sampled batches contained NaN or Inf in the inputs."

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"input_mean": 0.0, "input_std": 9.9}, None),
            ({"input_mean": 0.0, "input_std": 10.1}, "warning"),
            ({"input_mean": 200.0, "input_std": 0.0}, "warning"),
            ({"input_mean": 0.0, "input_std": 1.1e-3}, None),
            ({"input_mean": 0.0, "input_std": 1e-4}, "warning"),
            ({"input_mean": 0.0, "input_std": 0.0}, None),  # nothing but zeros, as of a padded batch
            ({"input_mean": 9e3, "input_std": 9e3, "input_is_integer": True}, None),  # tokens
            ({"input_std": math.nan, "input_num_nonfinite": 3}, None),
            ({"input_mean": math.nan, "input_std": math.nan}, None),  # an empty batch
        ],
    )
    def test_scale(self, fields, expected):
        assert severity("input-scale", batches_run(flat_losses(60), batch(**fields))) == expected

    def test_inputs_of_any_scale_that_are_learnt_are_a_remark(self):
        assert severity("input-scale", batches_run(falling_losses(200), batch(input_std=40.0))) == "info"

    @pytest.mark.parametrize(
        ("num_steps", "std", "kinds", "expected"),
        [
            (60, 51.0, {}, "warning"),
            (59, 51.0, {}, "info"),
            (60, 1e-4, {}, "warning"),
            (60, 1e3, {"Linear": 3, "BatchNorm1d": 1}, "info"),  # which brings them to a usual size
        ],
    )
    def test_inputs_far_off_are_a_warning_whatever_is_learnt(self, num_steps, std, kinds, expected):
        made = batches_run(falling_losses(num_steps), batch(input_std=std, input_mean=0.0), module_kinds=kinds)
        assert severity("input-scale", made) == expected

    def test_inputs_far_off_are_critical_where_the_loss_runs_away(self):
        made = batches_run([2.0] * 10 + [1e6] * 60, batch(input_std=1e4, input_mean=0.0))
        assert severity("input-scale", made) == "critical"

    @pytest.mark.parametrize(
        ("losses", "expected"),
        [
            (flat_losses(60), "warning"),
            (flat_losses(59), "info"),
            ([2.3] * 10 + [1.65] * 90, "warning"),
            ([2.3] * 10 + [1.55] * 90, "info"),
        ],
    )
    def test_inputs_of_any_scale_with_which_little_is_learnt_are_a_warning(self, losses, expected):
        assert severity("input-scale", batches_run(losses, batch(input_std=40.0, input_mean=0.0))) == expected

    @pytest.mark.parametrize(
        ("steps", "notes", "expected"),
        [
            (100, {}, "info"),  # perhaps the whole set
            (100, {"steps_per_epoch": 1}, "info"),
            (100, {"steps_per_epoch": 2}, "warning"),
            (50, {"steps_per_epoch": 2}, None),
            (100, {"val_losses": validated(100, level=30.0)}, "warning"),
            (100, {"val_losses": validated(100, level=1.0)}, "info"),
        ],
    )
    def test_the_same_batch(self, steps, notes, expected):
        assert severity("same-inputs", batches_run(falling_losses(steps), batch(input_digest=7), **notes)) == expected

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"input_constant_share": 1.0}, "warning"),
            ({"input_constant_share": 0.9}, None),  # as the border of most pictures
            ({"input_constant_share": 1.0, "num_samples": 1}, None),
        ],
    )
    def test_batches_of_one_sample_in_each_place(self, fields, expected):
        assert severity("same-inputs", batches_run(falling_losses(100), batch(**fields))) == expected

    @pytest.mark.parametrize(
        ("largest", "usual", "std", "fires"),
        [(74.0, 2.5, 3.0, False), (76.0, 2.5, 3.0, True), (40.0, 40.0, 1.0, True), (29.0, 29.0, 1.0, False)],
    )
    def test_outliers(self, largest, usual, std, fires):
        def made(step):
            return batch(input_abs_max=largest if step == 40 else usual, input_std=std)(step)

        assert (RULES["input-outliers"](batches_run(falling_losses(100), made)) is not None) == fires

    @pytest.mark.parametrize(
        ("at", "value", "expected"), [((), 0.0, "info"), ((40,), 20.0, "warning"), ((40,), math.nan, "warning")]
    )
    def test_outliers_that_do_no_harm_are_a_remark(self, at, value, expected):
        def made(step):
            return batch(input_abs_max=9999.0 if step == 40 else 2.5)(step)

        losses = bend(falling_losses(100), at, lambda v: value)
        assert severity("input-outliers", batches_run(losses, made)) == expected

    def test_tokens_have_no_outliers(self):
        def made(step):
            return batch(input_abs_max=9999.0 if step == 40 else 2.5, input_is_integer=True)(step)

        assert severity("input-outliers", batches_run(falling_losses(100), made)) is None

    @pytest.mark.parametrize(
        ("fields", "val_loss", "expected"),
        [
            ({"input_mean": 0.9}, 9.0, None),
            ({"input_mean": 1.1}, 9.0, "warning"),
            ({"input_mean": 1.1}, 0.3, "info"),
            ({"input_std": 2.4}, 9.0, None),
            ({"input_std": 2.6}, 9.0, "warning"),
            ({"input_std": 0.39}, 9.0, "warning"),
            ({"input_mean": 5.0, "input_is_integer": True}, 9.0, None),
            ({"input_std": 0.0}, 9.0, None),
        ],
    )
    def test_validation_inputs(self, fields, val_loss, expected):
        history = batches_run(falling_losses(100), batch(), passed(**fields), val_losses=validated(100, level=val_loss))
        assert severity("validation-inputs-differ", history) == expected
