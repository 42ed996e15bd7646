"""What the rules on set-up say, and of which runs nothing; and which rules ask for a loss that is to come down."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import RULES
from fastguard.records import TrainingHistory

from faulty_runs import BAD
from made_runs import (
    ask,
    batch,
    batches_run,
    ended,
    falling_losses,
    flat_losses,
    passed,
    run,
    settings,
    severity,
    validated,
    wild_losses,
)


class TestSetUp:
    @pytest.mark.parametrize(
        ("left", "watched", "fires"),
        [(4, 4, True), (3, 3, False), (18, 20, False), (19, 20, True), (0, 20, False), (None, None, False)],
    )
    def test_gradients_left_from_the_step_before(self, left, watched, fires):
        history = run(falling_losses(30), num_left_gradients=left, num_watched_backwards=watched)
        assert (RULES["gradients-not-cleared"](history) is not None) == fires

    @pytest.mark.parametrize(
        ("losses", "norms", "fires"),
        [
            (flat_losses(10), [0.0] * 10, True),
            (flat_losses(9), [0.0] * 9, False),
            (flat_losses(50), [0.0] * 49 + [1e-9], False),
            ([0.0] * 50, [0.0] * 50, False),  # a hinge loss with nothing left to gain
            (flat_losses(50), [*[0.0] * 20, math.nan, *[0.0] * 29], False),
        ],
    )
    def test_no_gradient(self, losses, norms, fires):
        assert (RULES["no-gradient"](run(losses, norms)) is not None) == fires

    @pytest.mark.parametrize(
        ("given", "odd"),
        [
            ({"eps": 1e-8, "betas": (0.9, 0.999)}, None),
            ({"eps": 9e-4}, None),
            ({"eps": 1e-3}, "eps=0.001"),
            ({"kind": "Adafactor", "eps": 1e-3}, None),  # its eps is of another kind
            ({"betas": (0.99, 0.999)}, "betas=(0.99, 0.999)"),
            ({"betas": (0.0, 0.99)}, None),  # as of a GAN
            ({"betas": (0.9, 0.3)}, "betas=(0.9, 0.3)"),
            ({"betas": (0.9, 0.999995)}, "betas=(0.9, 0.999995)"),
            ({"kind": "SGD", "momentum": 0.98}, None),
            ({"kind": "SGD", "momentum": 0.999}, "momentum=0.999"),
            ({"kind": "SGD", "momentum": 0.0, "dampening": 0.0}, None),
        ],
    )
    def test_settings(self, given, odd):
        finding = RULES["odd-optimizer-settings"](run(flat_losses(160), optimizer_settings=settings(**given)))
        assert (finding and finding.evidence["settings"]) == (odd and [odd])

    def test_odd_settings_of_a_run_that_learns_are_a_remark(self):
        odd = settings(eps=0.1)
        assert severity("odd-optimizer-settings", run(falling_losses(200), optimizer_settings=odd)) == "info"
        assert severity("odd-optimizer-settings", run(flat_losses(149), optimizer_settings=odd)) == "info"

    def test_odd_settings_of_a_run_that_has_lost_what_it_had_learnt(self):
        losses = [*falling_losses(100, floor=0.01), *flat_losses(100, level=4.0)]
        assert severity("odd-optimizer-settings", run(losses, optimizer_settings=settings(eps=0.1))) == "warning"
        losses, norms = falling_losses(200, floor=0.01), [1.0] * 200
        losses[150] = norms[150] = math.nan  # of a bad batch
        assert severity("odd-optimizer-settings", run(losses, norms, optimizer_settings=settings(eps=0.1))) == "info"

    @pytest.mark.parametrize(
        ("full", "gone", "lr", "fires"),
        [
            (50, 100, 9e-6, True),
            (50, 100, 1.1e-5, False),
            (50, 39, 1e-6, False),
            (200, 60, 1e-6, False),  # a decay near the end
            (0, 100, 1e-6, False),  # it never was higher
        ],
    )
    def test_learning_rate_that_is_gone(self, full, gone, lr, fires):
        history = run(flat_losses(full + gone), lrs=[1e-3] * full + [lr] * gone)
        assert (RULES["learning-rate-gone"](history) is not None) == fires

    def test_a_cosine_that_ends_at_zero_is_no_loss(self):
        lrs = [5e-4 * (1 + math.cos(math.pi * s / 200)) for s in range(200)]
        assert severity("learning-rate-gone", run(flat_losses(200), lrs=lrs)) is None

    def test_a_learning_rate_may_go_when_all_is_learnt(self):
        lrs = [1e-3 if s < 50 else 1e-6 for s in range(150)]
        assert severity("learning-rate-gone", run(falling_losses(150, pace=15.0), lrs=lrs)) is None
        for level, expected in ((1.25, "warning"), (1.05, None)):
            assert severity("learning-rate-gone", run([2.3] * 50 + [level] * 100, lrs=lrs)) == expected

    @pytest.mark.parametrize(
        ("full", "lr", "rates", "expected"),
        [
            (50, 1e-6, (1e-3,), None),
            (90, 0.0, (1e-3,), None),  # a schedule that ends a little before the run
            (50, 0.0, (1e-3, 1e-2), None),  # of the first group alone, perhaps
        ],
    )
    def test_a_learning_rate_of_zero_for_most_of_a_run_leaves_it_standing(self, full, lr, rates, expected):
        groups = [{"kind": "SGD", "lr": rate} for rate in rates]
        lrs = [1e-3 if s < full else lr for s in range(150)]
        history = run(falling_losses(150, pace=15.0), lrs=lrs, optimizer_settings=groups)
        assert severity("learning-rate-gone", history) == expected

    def test_clamped_weights_of_a_run_that_learns_are_a_remark(self):
        noted = {"overwritten": ["a"], "num_overwritten": 5, "num_compared": 5}
        assert severity("weights-overwritten", run(falling_losses(120), **noted)) == "info"
        assert severity("weights-overwritten", run(flat_losses(39), **noted)) == "info"
        assert severity("weights-overwritten", run(flat_losses(120), num_overwritten=0, num_compared=5)) is None

    @pytest.mark.parametrize(
        ("change", "notes", "fires"),
        [
            ({"training": True}, {"dropout": {"drop": 0.3}}, True),
            ({"training": True}, {"module_kinds": {"BatchNorm2d": 1}}, True),
            ({"training": True}, {"module_kinds": {"Linear": 1, "LayerNorm": 1}, "names": ["a"]}, False),
            ({"training": True}, {"dropout": {"drop": 0.0}}, False),
            ({"training": True}, {}, False),  # nobody knows what the model is made of
            ({"training": False}, {"dropout": {"drop": 0.3}}, False),
        ],
    )
    def test_validation_in_training_mode(self, change, notes, fires):
        history = batches_run(falling_losses(100), batch(), passed(**change), val_losses=validated(100), **notes)
        assert (RULES["validation-in-training-mode"](history) is not None) == fires

    def test_passes_without_gradients_are_validation_only_where_there_are_validation_losses(self):
        history = batches_run(falling_losses(100), batch(), passed(training=True), dropout={"drop": 0.3})
        assert severity("validation-in-training-mode", history) is None

    @pytest.mark.parametrize(
        ("losses", "num_samples", "expected"),
        [
            (wild_losses(200), 4, "warning"),
            (wild_losses(199), 4, "info"),
            (wild_losses(200), 5, None),
            (wild_losses(90), 2, None),
            (falling_losses(200), 1, None),  # calm all the same
            ([10.0] * 20 + wild_losses(200), 2, "info"),
        ],
    )
    def test_small_batches(self, losses, num_samples, expected):
        assert severity("tiny-batches", batches_run(losses, batch(num_samples=num_samples))) == expected

    @pytest.mark.parametrize(
        ("ops", "fires"),
        [
            (("MseLoss", "Addmm", "Addmm"), True),
            (("MseLoss", "Addmm", "View", "Addmm"), True),  # a change of shape is no activation
            (("MseLoss", "Addmm", "T", "Transpose", "Addmm"), True),
            (("MseLoss", "Addmm", "Relu", "Addmm"), False),
            (("MseLoss", "Addmm", "NativeLayerNorm", "Addmm"), False),
            (("MseLoss", "Addmm"), False),
            ((), False),
        ],
    )
    def test_layers_without_activation(self, ops, fires):
        history = run(flat_losses(60), loss_ops=[f"{op}Backward0" for op in ops])
        assert (RULES["layers-without-activation"](history) is not None) == fires

    @pytest.mark.parametrize(
        ("losses", "expected"),
        [
            (flat_losses(80), "warning"),
            (flat_losses(79), "info"),
            ([2.3] * 10 + [1.45] * 90, "warning"),
            ([2.3] * 10 + [1.3] * 90, "info"),
            (falling_losses(200, pace=15.0, floor=0.1), "info"),  # factors of a matrix that fits
        ],
    )
    def test_layers_without_activation_of_a_run_that_learns_are_a_remark(self, losses, expected):
        ops = ["MseLossBackward0", "AddmmBackward0", "AddmmBackward0"]
        assert severity("layers-without-activation", run(losses, loss_ops=ops)) == expected

    @pytest.mark.parametrize(
        ("lrs", "losses", "fires"),
        [
            ([1e-5 * (s + 1) for s in range(200)], flat_losses(200), True),
            ([1e-5 * (s + 1) for s in range(199)], flat_losses(199), False),
            ([1e-5 * min(s + 1, 190) for s in range(200)], flat_losses(200), True),
            ([1e-5 * min(s + 1, 180) for s in range(200)], flat_losses(200), False),  # a warm-up that has ended
            ([1e-5 * (s + 1 - 2 * (s == 50)) for s in range(200)], flat_losses(200), False),  # it fell once
            ([1e-5 * s for s in range(200)], flat_losses(200), False),
            ([1e-5 * (s + 1) for s in range(300)], falling_losses(300), False),  # and all goes well
            ([1e-3] * 200, flat_losses(200), False),
        ],
    )
    def test_a_rate_that_only_rises(self, lrs, losses, fires):
        assert (RULES["learning-rate-still-rising"](run(losses, lrs=lrs)) is not None) == fires

    def test_a_ratio_of_ones_own(self):
        history = BAD["learning-rate-still-rising"]
        assert severity("learning-rate-still-rising", history, ratio=1.9) == "warning"
        assert severity("learning-rate-still-rising", history, ratio=2.1) is None

    @pytest.mark.parametrize(
        ("kind", "decay", "fires"),
        [
            ("Adam", 0.05, True),
            ("Adam", 0.04, False),
            ("SGD", 0.05, True),
            ("AdamW", 0.9, False),
            ("AdamW", 1.0, True),
            ("Lion", 0.9, False),
            ("Adam", 0, False),
        ],
    )
    def test_weight_decay(self, kind, decay, fires):
        history = run(flat_losses(60), optimizer_settings=settings(kind, weight_decay=decay))
        assert (RULES["large-weight-decay"](history) is not None) == fires

    def test_the_largest_weight_decay_of_all_groups(self):
        groups = [*settings("SGD", weight_decay=0.0), *settings("SGD", weight_decay=0.1)]
        finding = RULES["large-weight-decay"](run(flat_losses(60), optimizer_settings=groups))
        assert finding.evidence["weight_decay"] == 0.1

    def test_weight_decay_of_a_run_that_learns_is_a_remark(self):
        given = settings(weight_decay=0.5)
        assert severity("large-weight-decay", run(falling_losses(200), optimizer_settings=given)) == "info"
        for num_steps, is_over, expected in ((99, False, "info"), (100, False, "warning"), (39, True, "info")):
            history = run(flat_losses(num_steps), optimizer_settings=given)
            history.has_ended = is_over
            assert severity("large-weight-decay", history) == expected
        assert severity("large-weight-decay", ended(run(flat_losses(40), optimizer_settings=given))) == "warning"
        adamw, small = settings("AdamW", weight_decay=1.0), settings(weight_decay=0.05)
        for to, level, expected in (
            (given, 0.95, "warning"),
            (given, 0.9, "info"),
            (adamw, 1.45, "warning"),
            (adamw, 1.3, "info"),
            (small, 2.15, "warning"),
            (small, 2.0, "info"),
        ):
            history = run([2.3] * 10 + [level] * 90, optimizer_settings=to)
            assert severity("large-weight-decay", history) == expected


DESCENT = sorted(sign.name for rule in RULES.values() for sign in rule.signs if sign.needs_descent)


class TestDescent:
    """Rules that take the loss for something that is to come down are silent where it is not."""

    def test_they_are_known(self):
        assert {"loss-not-decreasing", "overfitting", "bounded-output", "steps-too-large", "loss-gone"} <= set(DESCENT)
        assert not {"non-finite-loss", "no-gradient", "output-against-loss", "input-scale"} & set(DESCENT)

    @pytest.mark.thinned(n=4)
    @pytest.mark.parametrize("name", DESCENT)
    @pytest.mark.parametrize(
        ("notes", "fires"),
        [
            ({}, True),
            ({"objective": "minimise", "num_foreign_parameters": 9}, True),
            ({"objective": "game"}, False),
            ({"objective": "reward"}, False),
            ({"num_foreign_parameters": 3}, False),
            ({"num_foreign_parameters": 2}, True),
        ],
    )
    def test_objectives(self, name, notes, fires):
        history = TrainingHistory()
        history.load_state_dict(BAD[name].state_dict())
        history.has_ended = True
        history.note_model(**notes)
        assert (ask(name, history) is not None) == fires

    @pytest.mark.parametrize("name", DESCENT)
    def test_losses_below_zero(self, name):
        history = TrainingHistory()
        history.load_state_dict(BAD[name].state_dict())
        history.has_ended = True
        history.record(history.newest_step + 1, loss=-0.5, grad_norm=1.0, lr=history.clean[-1].lr or 0.0)
        assert ask(name, history) is None
