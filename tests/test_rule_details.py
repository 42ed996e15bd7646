"""What findings of single rules say: steps, layers, texts, thresholds of your own, and when a loss counts."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import RULES, diagnose, find_causes
from fastguard.diagnosis.rules.units_experts import siblings
from fastguard.diagnosis.signals import signals_of
from fastguard.records import TrainingHistory

from faulty_runs import BAD
from made_runs import (
    EXPERTS,
    activity,
    ask,
    batch,
    batches_run,
    bend,
    falling_losses,
    flat_losses,
    flipped,
    game,
    layered,
    noisy_norms,
    routed,
    run,
    settings,
    severity,
    with_activities,
)
from records import make_bad_record, make_history


class TestLearningRate:
    def lrs(self, *parts):
        return run(falling_losses(sum(n for _, n in parts)), lrs=[lr for lr, n in parts for _ in range(n)])

    def test_jump_names_the_step(self):
        finding = ask("learning-rate-jump", self.lrs((1e-3, 100), (1e-1, 20)))
        assert (finding.first_step, finding.evidence["largest_before"]) == (100, 1e-3)


class TestLayers:
    def test_the_layer_before_a_dead_input_is_to_blame(self):
        names = [f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
        dead_output_of_1 = {0, 1, 2, 3, 4}  # 2.weight has no input, 2.bias still has a gradient
        history = layered(120, lambda s, p: 0.0 if s > 30 and p in dead_output_of_1 else 1.0, names=names)
        assert ask("zero-gradient-tensors", history).layers[:3] == ("1.weight", "1.bias", "2.weight")


class TestUnits:
    def test_the_origin_of_nan_is_told_from_a_bad_input(self):
        bad_input = with_activities(activity("first", nans=1, inputs_finite=False), since=60)
        finding = ask("non-finite-activations", bad_input)
        assert "whose input was bad already" in finding.summary and finding.layers == ("first",)
        assert finding.evidence["is_origin"] is False


class TestLosses:
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

    def test_a_smaller_spike_needs_the_norm_to_agree(self):
        losses = bend(falling_losses(200, noise=0.01), [150], lambda v: v + 0.5)
        norms = noisy_norms(200)
        assert ask("loss-spike", run(losses, norms)) is None
        assert ask("loss-spike", run(losses, bend(norms, [150], lambda v: 40 * v))) is not None

    def test_two_spikes_an_epoch_apart_are_enough_where_epochs_are_known(self):
        history = run(bend(falling_losses(200), [40, 90], lambda v: v + 3.0), steps_per_epoch=50)
        assert "place 40 of each epoch of 50" in ask("periodic-loss-spikes", history).summary


def test_a_history_without_losses_is_no_reason_to_complain():
    assert diagnose(make_history(noisy_norms(400))) == []


class TestWeights:
    @pytest.mark.parametrize("is_held", [True, False])
    def test_what_the_optimizer_does_not_have_is_not_to_be_taken_out_of_it(self, is_held):
        history = run(falling_losses(100), names=list("abcdefghij"), without_gradient=["b"])
        held = int(history.last.tensors.total_row()[0]) + 16 * is_held
        history.note_model(optimizer_settings=[{"kind": "Adam", "num_parameters": held}])
        told = ask("frozen-parameters", history)
        assert ("remove them" in told.recommendation) == is_held
        assert is_held or told.severity == "info"


class TestSetUp:
    def test_a_ratio_of_ones_own(self):
        history = BAD["learning-rate-still-rising"]
        assert severity("learning-rate-still-rising", history, ratio=1.9) == "warning"
        assert severity("learning-rate-still-rising", history, ratio=2.1) is None

    def test_the_largest_weight_decay_of_all_groups(self):
        groups = [*settings("SGD", weight_decay=0.0), *settings("SGD", weight_decay=0.1)]
        finding = RULES["large-weight-decay"](run(flat_losses(60), optimizer_settings=groups))
        assert finding.evidence["weight_decay"] == 0.1


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


def first_cause(history):
    return next((one.rule for one in find_causes(diagnose(history), history)), None)


class TestIdleExperts:
    def test_what_is_frozen_is_no_expert(self):
        history = routed(["experts.1.", "experts.2."])
        history.note_model(without_gradient=[name for name in EXPERTS if name.startswith(("experts.1.", "experts.2."))])
        assert severity("idle-experts", history) is None

    def test_the_cause_wins_over_parameters_that_are_cut_off(self):
        history = routed(["experts.1.", "experts.2.", "experts.3."], absent=True)
        assert "idle-experts" in {one.rule for one in diagnose(history)}
        assert first_cause(history) == "dead-experts"

    def test_siblings_have_the_same_parameters(self):
        assert siblings(["a.0.w", "a.1.w", "a.1.b"]) == [] == siblings(["a.0.w", "b.w"])
        [layers, experts] = siblings(["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w", "l.1.e.1.w"])[:2]
        assert list(layers) == ["l.0", "l.1"] and list(experts) == ["l.0.e.0", "l.0.e.1"]


class TestGames:
    def test_who_wins(self):
        lost, won = (
            RULES["one-side-wins"](game([0.69] * 150 + flat_losses(150, level=level, noise=1e-4)))
            for level in (6, 0.01)
        )
        assert (lost.evidence["is_the_winner"], won.evidence["is_the_winner"]) == (False, True)


class TestLoneElement:
    def test_what_follows_is_explained_by_it(self):
        history = flipped(at=(100,), num_steps=101)
        for step in range(101, 110):
            history.add(
                make_bad_record(step, ["a.weight", "b.weight"], ["a.weight", "b.weight", "c.weight"], loss=math.nan)
            )
        assert first_cause(history) == "hardware-fault"
        history.note_model(dtypes=["float16"])
        assert first_cause(history) != "hardware-fault"

    def test_is_kept_by_a_state(self):
        history = TrainingHistory()
        history.load_state_dict(flipped().state_dict())
        [one] = history.lone_elements
        assert (one.step, one.name, one.value) == (100, "b.weight", 1e9) and one.usual == pytest.approx(1.0, rel=0.5)


class TestSquaredError:
    """A squared error that is written by hand ends at zero as torch's own does."""

    OPS = ("MeanBackward0", "PowBackward0", "SubBackward0", "AddmmBackward0")

    @pytest.mark.parametrize(
        ("squared", "dtypes", "expected"),
        [
            ((2.3,), ["float32"], "warning"),
            ((2.31,), ["float32"], None),  # another loss, by the gradient of the output
            ((2.31,), ["bfloat16"], "warning"),  # within its rounding
            ((), ["float32"], None),
        ],
    )
    def test_underfitting(self, squared, dtypes, expected):
        losses = [2.3, *falling_losses(40, pace=8.0, floor=1.9)[1:], *flat_losses(160, level=1.9)]
        notes = {"loss_ops": self.OPS, "loss_kind": "squared error", "squared_losses": squared, "dtypes": dtypes}
        assert severity("underfitting", run(losses, **notes)) == expected
