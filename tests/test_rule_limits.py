"""Where rules stop: the neighbouring runs that must be silent, or a remark only."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import diagnose
from fastguard.diagnosis.signals import signals_of

from made_runs import (
    activity,
    ask,
    batch,
    batches_run,
    bend,
    falling_losses,
    flat_losses,
    layered,
    noisy_norms,
    run,
    settings,
    weights_run,
    with_activities,
)
from records import make_history


class TestLearningRate:
    def lrs(self, *parts):
        return run(falling_losses(sum(n for _, n in parts)), lrs=[lr for lr, n in parts for _ in range(n)])

    @pytest.mark.parametrize(
        ("parts", "fires"),
        [
            (((1e-3, 100), (4.9e-3, 20)), False),
            (((1e-3, 100), (5.1e-3, 20)), True),
            (((1e-3, 15), (1e-1, 100)), False),  # within the first twenty steps: part of the beginning
            (((1e-2, 50), (1e-4, 50), (1e-2, 50)), False),  # a warm restart
            (((0.0, 30), (1e-3, 50)), False),  # nothing to be a multiple of
        ],
    )
    def test_jump(self, parts, fires):
        assert (ask("learning-rate-jump", self.lrs(*parts)) is not None) == fires

    def test_a_warm_up_by_the_epoch_leaps_to_the_rate_that_was_set(self):
        history = self.lrs((1e-5, 40), (5e-4, 40), (1e-3, 40))
        history.note_model(initial_lr=1e-3)
        assert ask("learning-rate-jump", history) is None
        history.note_model(initial_lr=1e-4)
        assert ask("learning-rate-jump", history).first_step == 40

    def test_jump_from_a_level_that_has_left_the_window(self):
        history = run(falling_losses(700), lrs=[1e-2 if s < 100 else 1e-4 if s < 650 else 1e-2 for s in range(700)])
        assert ask("learning-rate-jump", history) is None

    def test_jump_names_the_step(self):
        finding = ask("learning-rate-jump", self.lrs((1e-3, 100), (1e-1, 20)))
        assert (finding.first_step, finding.evidence["largest_before"]) == (100, 1e-3)

    @pytest.mark.parametrize(
        ("steps", "lr", "initial", "severity"),
        [(49, 1e-5, 1e-3, None), (50, 1e-5, 1e-3, "warning"), (500, 1e-3, 1e-3, None), (1000, 1e-3, 1e-3, "info")],
    )
    def test_scheduler(self, steps, lr, initial, severity):
        history = run(falling_losses(steps), lrs=[lr] * steps, has_scheduler=True, initial_lr=initial)
        finding = ask("scheduler-not-stepping", history)
        assert (finding and finding.severity) == severity

    def test_no_scheduler_need_not_step(self):
        history = run(falling_losses(2000), lrs=[1e-5] * 2000, has_scheduler=False)
        assert ask("scheduler-not-stepping", history) is None

    def test_warm_up_that_is_there_is_not_missed(self):
        losses = [2.3, 2.4, 2.3, *[4.0] * 20, *falling_losses(80)]
        assert ask("no-warm-up", run(losses, lrs=[1e-3 * min(1, (s + 1) / 50) for s in range(103)])) is None


class TestNorms:
    def test_norms_that_grow_while_the_loss_falls_are_silent(self):
        norms = [n * 1.02**step for step, n in enumerate(noisy_norms(300))]
        assert ask("growing-norm", run(falling_losses(300, noise=0.01), norms)) is None
        assert ask("growing-norm", run([2 + s / 50 for s in range(300)], norms)) is not None

    def test_norms_that_fall_with_the_loss_are_convergence(self):
        norms = [n * 0.9**step for step, n in enumerate(noisy_norms(150))]
        assert ask("vanishing-norm", run(falling_losses(150, floor=0.01, pace=20), norms)) is None

    @pytest.mark.parametrize(
        ("coef", "losses", "kind", "severity"),
        [
            (0.5, flat_losses(100), "SGD", "info"),
            (0.1, flat_losses(100), "SGD", "warning"),
            (0.1, flat_losses(100), None, "warning"),
            (0.1, flat_losses(100), "Adam", "info"),  # which divides by the size of the gradient
            (0.1, falling_losses(100), "SGD", "info"),  # it learns all the same
            (1.1e-5, flat_losses(100), "Adam", "info"),
            (0.9e-5, flat_losses(100), "Adam", "warning"),  # whose eps outweighs what is left
            (0.9e-5, falling_losses(100), "Adam", "info"),
        ],
    )
    def test_clipping_is_a_warning_only_where_little_is_left_and_missed(self, coef, losses, kind, severity):
        notes = {} if kind is None else {"optimizer_settings": settings(kind)}
        history = run(losses, change=lambda step: {"clip_coef": coef}, **notes)
        assert ask("clip-rate-high", history).severity == severity

    @pytest.mark.parametrize(("passes", "coef", "fires"), [(8, 0.2, True), (8, 0.3, False), (2, 0.1, False)])
    def test_accumulation(self, passes, coef, fires):
        history = run(falling_losses(60), change=lambda step: {"clip_coef": coef}, backward_per_step=passes)
        assert (ask("unscaled-accumulation", history) is not None) == fires

    @pytest.mark.parametrize(("passes", "ratio", "fires"), [(8, 0.04, True), (8, 0.03, False), (1, 0.04, False)])
    def test_accumulation_without_clipping(self, passes, ratio, fires):
        history = weights_run(lambda step, name: ratio, backward_per_step=passes)
        assert (ask("unscaled-accumulation", history) is not None) == fires


class TestLayers:
    def test_biases_before_a_normalisation_have_no_say(self):
        names = [f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
        history = layered(100, lambda step, place: 1e-9 if place % 2 else 1.0, flat_losses(100), names=names)
        assert ask("vanishing-layers", history) is None

    def test_small_first_layers_of_a_run_that_learns_are_a_remark(self):
        def small(step, place):
            return 10.0 ** (0.7 * (place - 8))

        assert ask("vanishing-layers", layered(100, small, falling_losses(100, pace=20))).severity == "info"
        assert ask("vanishing-layers", layered(100, small, flat_losses(100))).severity == "warning"

    def test_a_hinge_loss_that_is_met_has_no_gradients(self):
        met = [max(0.0, 1.0 - step / 50) for step in range(120)]
        for losses, fires in ((met, False), (flat_losses(120), True)):
            history = layered(120, lambda step, place: 0.0 if step >= 50 else 1.0, losses)
            assert (ask("zero-gradient-tensors", history) is not None) == fires
            assert (ask("zero-gradients", history) is not None) == fires

    @pytest.mark.parametrize(("period", "fires"), [(10, False), (1, True)])
    def test_a_loss_that_many_batches_meet_leaves_all_gradients_zero_now_and_then(self, period, fires):
        history = layered(200, lambda s, p: 0.0 if s > 40 and s % period == 0 else 1.0, flat_losses(200))
        assert (ask("zero-gradient-tensors", history) is not None) == fires

    @pytest.mark.parametrize(
        ("dead", "layers"),
        [
            ({"0.bias"}, None),  # what pulls one way and the other adds up to nothing
            ({"0.weight"}, ("0.weight",)),
            ({"0.weight", "0.bias"}, ("0.weight", "0.bias")),
        ],
    )
    def test_a_bias_whose_weight_has_a_gradient_is_not_dead(self, dead, layers):
        names = ["0.weight", "0.bias", "1.weight", "1.bias"]
        history = layered(120, lambda s, p: 0.0 if s > 30 and names[p] in dead else 1.0, names=names)
        finding = ask("zero-gradient-tensors", history)
        assert (finding and tuple(sorted(finding.layers, reverse=True))) == layers

    def test_the_layer_before_a_dead_input_is_to_blame(self):
        names = [f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
        dead_output_of_1 = {0, 1, 2, 3, 4}  # 2.weight has no input, 2.bias still has a gradient
        history = layered(120, lambda s, p: 0.0 if s > 30 and p in dead_output_of_1 else 1.0, names=names)
        assert ask("zero-gradient-tensors", history).layers[:3] == ("1.weight", "1.bias", "2.weight")

    def test_a_zero_initialised_layer_that_wakes_up_is_no_imbalance(self):
        history = layered(240, lambda step, place: min(1e-6 * 1.1**step, 0.01) if place == 3 else 1.0)
        assert ask("layer-norm-imbalance", history) is None


class TestUnits:
    @pytest.mark.parametrize(
        ("dead", "losses", "severity"),
        [
            (0.4, None, None),
            (0.6, None, "info"),
            (0.8, None, "info"),  # the loss falls all the same
            (0.8, flat_losses(100), "warning"),
            (0.97, None, "warning"),
        ],
    )
    def test_severity_follows_the_harm(self, dead, losses, severity):
        modules = (activity(dead=dead),)
        history = run(
            falling_losses(100) if losses is None else losses,
            change=lambda step: {} if step % 20 else {"activations": modules},
        )
        finding = ask("dead-units", history)
        assert (finding and finding.severity) == severity

    def test_one_sample_is_not_enough(self):
        assert ask("dead-units", with_activities(activity(dead=1.0), since=80)) is None

    def test_without_units_only_a_module_of_zeros_is_dead(self):
        assert ask("dead-units", with_activities(activity(zero=0.95, units=0))) is None
        assert ask("dead-units", with_activities(activity(zero=1.0, units=0))) is not None

    def test_the_origin_of_nan_is_told_from_a_bad_input(self):
        bad_input = with_activities(activity("first", nans=1, inputs_finite=False), since=60)
        finding = ask("non-finite-activations", bad_input)
        assert "whose input was bad already" in finding.summary and finding.layers == ("first",)
        assert finding.evidence["is_origin"] is False


class TestLosses:
    def test_a_loss_near_its_best_is_no_oscillation(self):
        assert ask("loss-oscillation", run(falling_losses(400, noise=0.4))) is None

    def test_a_plateau_of_a_loss_that_has_learnt_is_no_underfitting(self):
        assert (
            ask("underfitting", run([*falling_losses(40, pace=8.0, floor=0.2), *flat_losses(160, level=0.2)])) is None
        )

    @pytest.mark.parametrize(("level", "fires"), [(1.9, True), (1.7, False)])
    def test_underfitting_has_learnt_less_than_a_seventh(self, level, fires):
        history = run([*falling_losses(40, pace=8.0, floor=level), *flat_losses(160, level=level)])
        assert (ask("underfitting", history) is not None) == fires

    @pytest.mark.parametrize(
        ("notes", "fires"),
        [
            ({"loss_kind": "cross-entropy"}, True),
            ({"loss_kind": "binary cross-entropy"}, True),
            ({"loss_kind": "negative log-likelihood"}, True),
            ({"loss_ops": ["MseLossBackward0", "AddmmBackward0"]}, True),
            ({"loss_ops": ["NegBackward0", "MeanBackward0", "AddmmBackward0"]}, False),  # a density
            ({}, True),  # nobody knows
        ],
    )
    def test_only_a_loss_that_ends_at_zero_can_stand_too_high(self, notes, fires):
        history = run([*falling_losses(40, pace=8.0, floor=1.9), *flat_losses(160, level=1.9)], **notes)
        assert (ask("underfitting", history) is not None) == fires

    @pytest.mark.parametrize(("level", "fires"), [(3.0, True), (3.5, False), (400.0, False)])
    def test_a_loss_that_rose_does_not_stand(self, level, fires):
        finding = ask("underfitting", run([*flat_losses(20), *flat_losses(180, level=level)]))
        assert (finding is not None) == fires
        assert (
            not fires or "not come down from about 3 in the last 134 steps, 131% of where it began" in finding.summary
        )

    def test_a_loss_that_still_falls_is_no_underfitting(self):
        losses = [3.2 - 0.001 * s + 0.05 * math.sin(7 * s) for s in range(300)]
        assert ask("underfitting", run([3.4] * 10 + losses)) is None

    @pytest.mark.parametrize(
        ("val_fall", "every", "fires"),
        [(0.02, 20, True), (0.05, 20, False), (0.02, 70, False), (None, 20, False)],
    )
    def test_targets_learnt_by_heart_fall_slowly_and_validation_stands(self, val_fall, every, fires):
        standing = [loss - s * 0.12 / 260 for s, loss in enumerate(flat_losses(260, level=3.2, noise=0.05))]
        losses = [*falling_losses(40, start=3.7, pace=8.0, floor=3.2), *standing]
        val = {s: 3.2 * (1 - (val_fall or 0.0) * (s - 100) / 200) for s in range(every - 1, 300, every)}
        finding = ask("underfitting", run(losses, val_losses=None if val_fall is None else val))
        assert (finding is not None) == fires
        if finding is not None:
            assert finding.evidence["threshold_flat"] == 0.06 and 0.02 < finding.evidence["fallen"] / 3.1 < 0.05

    @pytest.mark.parametrize(
        ("kind", "first", "start"),
        [
            ("cross-entropy", 0.82, math.log(4)),  # below 0.6 ln 4, as fine-tuning begins
            ("cross-entropy", 0.84, 0.84),
            ("squared error", 0.82, 0.82),
        ],
    )
    def test_progress_of_a_run_that_began_well_below_chance_counts_from_there(self, kind, first, start):
        history = batches_run([first] * 10 + [0.5] * 300, batch(output_width=4), loss_kind=kind)
        assert signals_of(history).progress == pytest.approx((start - 0.5) / start, rel=1e-3)

    @pytest.mark.parametrize("noise", [0.0, 1e-4, 0.05])
    def test_a_slow_fall_is_no_standstill_however_smooth(self, noise):
        losses = [loss - s / 400 for s, loss in enumerate(flat_losses(300, level=5.0, noise=noise))]
        assert ask("underfitting", run(losses, val_losses={s: losses[s] for s in range(19, 300, 20)})) is None

    def test_a_loss_that_has_just_begun_to_fall_is_silent(self):
        losses = [*flat_losses(110), *[1.9] * 20]
        assert ask("loss-not-decreasing", run(losses)) is None

    def test_divergence_needs_progress_to_lose(self):
        assert ask("loss-divergence", run(flat_losses(200, noise=0.2))) is None

    @pytest.mark.parametrize("length", [1, 4, 5, 30])
    def test_what_lasts_is_no_spike(self, length):
        history = run(bend(falling_losses(200), range(100, 100 + length), lambda v: 20.0))
        assert (ask("loss-spike", history) is not None) == (length <= 4)

    def test_a_smaller_spike_needs_the_norm_to_agree(self):
        losses = bend(falling_losses(200, noise=0.01), [150], lambda v: v + 0.5)
        norms = noisy_norms(200)
        assert ask("loss-spike", run(losses, norms)) is None
        assert ask("loss-spike", run(losses, bend(norms, [150], lambda v: 40 * v))) is not None

    @pytest.mark.parametrize(
        ("steps", "fires"),
        [((40, 62, 84), True), ((40, 62, 106), True), ((40, 62, 95), False), ((40, 43, 46), False), ((40, 62), False)],
    )
    def test_periods(self, steps, fires):
        history = run(bend(falling_losses(300), steps, lambda v: v + 3.0))
        assert (ask("periodic-loss-spikes", history) is not None) == fires

    def test_two_spikes_an_epoch_apart_are_enough_where_epochs_are_known(self):
        history = run(bend(falling_losses(200), [40, 90], lambda v: v + 3.0), steps_per_epoch=50)
        assert "place 40 of each epoch of 50" in ask("periodic-loss-spikes", history).summary

    @pytest.mark.parametrize(("rise", "fires"), [(1.1, False), (1.5, True)])
    def test_overfitting(self, rise, fires):
        val = {s: 1.0 if s < 200 else rise for s in range(19, 400, 20)}
        assert (ask("overfitting", run(falling_losses(400), val_losses=val)) is not None) == fires

    @pytest.mark.parametrize(
        ("share", "severity"), [(0.7, "warning"), (0.69, "info"), (0.0, "info"), (None, "warning")]
    )
    def test_training_above_validation_without_much_dropout_is_a_remark(self, share, severity):
        notes = {} if share is None else {"dropout": {"drop": share}}
        history = run(flat_losses(200), val_losses=dict.fromkeys(range(19, 200, 20), 1.5), **notes)
        assert ask("training-above-validation", history).severity == severity

    def test_a_training_loss_that_falls_quickly_lags_behind_validation(self):
        val = {s: 0.3 + 2.0 * math.exp(-s / 60) for s in range(19, 200, 20)}
        assert ask("training-above-validation", run(falling_losses(200), val_losses=val)) is None


def test_a_history_without_losses_is_no_reason_to_complain():
    assert diagnose(make_history(noisy_norms(400))) == []
