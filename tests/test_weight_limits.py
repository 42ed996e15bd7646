"""Where the rules of weights, updates and the beginning of both stop."""

from __future__ import annotations

import pytest

from fastguard.diagnosis import RULES
from fastguard.records.samples import WeightStats

from made_runs import activity, ask, falling_losses, flat_losses, run, weights_run


class TestWeights:
    def test_the_first_sample_of_a_hot_start_that_is_over_is_silent(self):
        history = weights_run(lambda step, name: 0.9 if step == 0 else 0.01, lrs=[1e-2] * 10 + [1e-3] * 130)
        assert ask("update-ratio-high", history) is None
        assert ask("update-ratio-high", weights_run(lambda step, name: 0.9 if step == 0 else 0.01)) is not None

    @pytest.mark.parametrize(
        ("first", "tenth", "lrs", "step"),
        [
            (0.02, 0.05, None, None),
            (0.05, 0.09, None, None),  # not twice the first
            (0.3, 0.09, None, None),  # Adam's first steps, which shrink
            (0.02, 0.07, [1e-3 * min(s + 1, 20) for s in range(140)], None),  # a warm-up
            (0.02, 0.07, [1e-3] * 20 + [1e-4] * 120, None),  # a hot start that is over
        ],
    )
    def test_steps_that_grow_at_the_same_learning_rate(self, first, tenth, lrs, step):
        history = weights_run(lambda step, name: {0: first, 10: tenth}.get(step, 0.02), every=10, lrs=lrs)
        again = type(history)()
        again.load_state_dict(history.state_dict())
        for known in (history, again):
            finding = ask("update-ratio-high", known)
            assert (finding and finding.first_step) == step
        if step is not None:
            assert finding.evidence["update_ratio"] > finding.evidence["threshold"] == 0.06

    def test_early_steps_of_adam_are_large(self):
        assert ask("update-ratio-high", weights_run(lambda step, name: 0.3 if step == 0 else 0.03)) is None

    def test_weights_that_began_too_small_are_not_judged(self):
        history = weights_run(lambda step, name: 5.0, initialization={"a.weight": (1e-5, 0.1), "b.weight": (1e-5, 0.1)})
        assert ask("update-ratio-high", history) is None

    def test_what_is_remembered_outlasts_the_window(self):
        history = weights_run(lambda step, name: 0.2 if step == 40 else 0.01, num_steps=900)
        assert ask("update-ratio-high", history).first_step == 40

    def test_small_updates_of_a_loss_that_falls_are_silent(self):
        assert ask("update-ratio-low", weights_run(lambda step, name: 3e-5)) is None

    def test_small_updates_in_a_warm_up_are_silent(self):
        lrs = [1e-5 * (s + 1) for s in range(140)]
        assert ask("update-ratio-low", weights_run(lambda s, n: 3e-5, flat_losses(140), lrs=lrs)) is None

    @pytest.mark.parametrize(("num", "severity"), [(1, "warning"), (3, "warning"), (4, "info")])
    def test_most_of_a_model_is_left_out_on_purpose(self, num, severity):
        names = list("abcde")
        history = run(falling_losses(20), names=names, names_not_in_optimizer=names[:num])
        assert ask("parameters-not-in-optimizer", history).severity == severity

    @pytest.mark.parametrize(("names", "severity"), [("ab", "critical"), ("abcde", "critical"), ("a", "info")])
    def test_an_optimizer_that_has_none_of_the_model(self, names, severity):
        history = run(flat_losses(20), names=list(names), names_not_in_optimizer=list(names))
        finding = ask("parameters-not-in-optimizer", history)
        assert finding.severity == severity

    @pytest.mark.parametrize(
        ("frozen", "losses", "severity"),
        [
            ("efghij", flat_losses(99), "info"),
            ("efghij", falling_losses(200, pace=20.0), "info"),
            ("cdefgh", flat_losses(100), "info"),
            ("abcdefghij", flat_losses(100), "info"),
        ],
    )
    def test_a_frozen_last_layer_where_little_is_learnt(self, frozen, losses, severity):
        history = run(losses, names=list("abcdefghij"), names_without_gradient=list(frozen))
        assert ask("frozen-parameters", history).severity == severity

    @pytest.mark.parametrize(
        ("frozen", "severity"),
        [
            ("e", "warning"),
            ("a", "warning"),
            ("ab", "warning"),
            ("abc", "warning"),
            ("ac", "warning"),
            ("abcd", "info"),
            ("abcde", "info"),
            ("fghij", "warning"),
            ("efghij", "info"),
        ],
    )
    def test_a_backbone_is_frozen_on_purpose(self, frozen, severity):
        history = run(falling_losses(100), names=list("abcdefghij"), names_without_gradient=list(frozen))
        assert ask("frozen-parameters", history).severity == severity

    @pytest.mark.parametrize("is_held", [True, False])
    def test_what_the_optimizer_does_not_have_is_not_to_be_taken_out_of_it(self, is_held):
        history = run(falling_losses(100), names=list("abcdefghij"), names_without_gradient=["b"])
        held = int(history.last.tensors.total_row()[0]) + 16 * is_held
        history.note_model(optimizer_settings=[{"kind": "Adam", "num_parameters": held}])
        told = ask("frozen-parameters", history)
        assert ("remove them" in told.recommendation) == is_held
        assert is_held or told.severity == "info"

    @pytest.mark.parametrize(
        ("losses", "severity"), [(falling_losses(99), "info"), (falling_losses(300, pace=20.0), "info")]
    )
    def test_what_is_frozen_in_turns_or_while_all_is_learnt_is_a_remark(self, losses, severity):
        history = run(losses, names=list("abcdefghij"), names_without_gradient=["b"])
        assert ask("frozen-parameters", history).severity == severity

    @pytest.mark.parametrize(
        ("ratios", "fires"),
        [
            ((0.4, 0.4, 0.4), False),
            ((1.5, 1.5, 1.5), False),
            ((2.5, 2.5, 1.0), True),
            ((9.0, 1.0, 1.0), True),
            ((0.05, 1.0, 1.0), False),  # the end of a residual branch
            ((0.01, 1.0, 1.0), True),
            ((0.05, 0.05, 1.0), True),
            ((0.0, 1.0, 1.0), False),
        ],
    )
    def test_initialisation(self, ratios, fires):
        told = {f"{i}.weight": (0.1 * ratio, 0.1) for i, ratio in enumerate(ratios)}
        assert (ask("poor-initialisation", run(falling_losses(20), initialization=told)) is not None) == fires

    @pytest.mark.parametrize(
        ("small", "losses", "notes", "severity"),
        [
            ("body.2.weight", flat_losses(60), {}, "warning"),
            ("body.2.weight", falling_losses(60, pace=10.0), {}, "info"),  # it grows, and the model learns
            ("body.2.weight", flat_losses(40), {}, "info"),
            ("head.weight", flat_losses(60), {}, None),  # small first outputs are what it is for
        ],
    )
    def test_one_layer_that_began_small(self, small, losses, notes, severity):
        told = {
            name: (1e-3 if name == small else 0.1, 0.1) for name in ("body.0.weight", "body.2.weight", "head.weight")
        }
        finding = ask("poor-initialisation", run(losses, initialization=told, names=list(told), **notes))
        assert (finding and finding.severity) == severity

    @pytest.mark.parametrize(
        ("stds", "losses", "fires"),
        [
            ((0.0, 0.0, 0.1), flat_losses(60), True),
            ((0.0, 0.0, 0.1, 0.1), flat_losses(60), False),  # half of them: the ends of residual branches
            ((0.0, 0.0, 0.0), flat_losses(60), True),
            ((0.0, 0.0, 0.0), falling_losses(200, pace=10.0), False),  # a linear model may begin so
        ],
    )
    def test_layers_of_equal_weights(self, stds, losses, fires):
        told = {f"{i}.weight": (std, 0.1) for i, std in enumerate(stds)}
        finding = ask("poor-initialisation", run(losses, initialization=told))
        assert (finding is not None) == fires
        assert finding is None or finding.evidence["num_layers"] == stds.count(0.0)

    @pytest.mark.parametrize(
        ("norm", "residual", "fires"),
        [("LayerNorm", 0.02 / 8**0.5, False), ("ReLU", 0.02 / 8**0.5, True), ("RMSNorm", 0.0005, True)],
    )
    def test_spreads_of_gpt2_are_no_poor_initialisation_where_it_normalises(self, norm, residual, fires):
        """Of width 64, where He's spread is 0.18 and ten times 0.02 does not reach it at the ends of branches."""
        told = {f"{i}.in": (0.0199, 0.177) for i in range(8)} | {f"{i}.out": (residual, 0.177) for i in range(8)}
        history = run(falling_losses(20), initialization=told, module_kinds={"Linear": 16, norm: 9})
        finding = ask("poor-initialisation", history)
        assert (finding is not None) == fires
        assert finding is None or (finding.first_step, finding.last_step) == (0, 0)

    def test_recurrent_weights_explode_earlier(self):
        for name, fires in (("rnn.weight_hh_l0", True), ("rnn.weight_ih_l0", False)):
            history = run(falling_losses(20), initialization={name: (0.16, 0.1), "head.weight": (0.04, 0.1)})
            assert (ask("poor-initialisation", history) is not None) == fires

    def test_spoilt_weights_that_were_repaired_are_silent(self):
        def sampled(step):
            return {"weights": (WeightStats("w", 8, 1.0, 0.1, 0.2, num_nonfinite=int(step == 20)),)}

        history = run(falling_losses(60), change=lambda step: {} if step % 20 else sampled(step))
        assert ask("non-finite-weights", history) is None


@pytest.mark.parametrize(("dead", "severity"), [(0.6, "warning"), (0.4, "info")])
def test_large_updates_matter_where_units_have_died(dead, severity):
    weights = (WeightStats("layer.weight", 64, 4.0, 0.5, 2.0, 1.0, 8.0),)

    def sampled(step):
        return {"weights": weights, "activations": (activity("act", dead=dead),)} if step % 20 == 0 else {}

    history = run(falling_losses(120), change=sampled, lrs=[0.1] * 120)
    assert RULES["update-ratio-high"](history).severity == severity
