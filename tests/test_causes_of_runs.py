"""Which cause is named first: facts that speak against the usual suspect."""

from __future__ import annotations

import json
import math

import pytest

from fastguard.diagnosis import RULES, Finding, diagnose, find_causes
from fastguard.records import StepStats, TrainingHistory

from faulty_runs import BAD
from made_runs import (
    batch,
    batches_run,
    bend,
    chance_losses,
    falling_losses,
    flat_losses,
    layered,
    noisy_norms,
    run,
    settings,
    severity,
    with_bad_steps,
)
from records import make_bad_record, make_record, make_row, make_table

LINEAR = "AddmmBackward0"
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def first_cause(history):
    history.has_ended = True
    told = find_causes(diagnose(history), history)
    return told[0].rule if told else None


def zeros_at(*names, losses=None):
    """A run in which these parameters get nothing but zeros from the first step on."""
    losses = flat_losses(150) if losses is None else losses
    return layered(150, lambda step, place: 0.0 if NAMES[place] in names else 1.0, losses, names=NAMES)


class TestZeroGradients:
    @pytest.mark.parametrize("names", [("0.weight", "0.bias", "2.weight"), ("0.weight", "0.bias")])
    def test_those_whose_biases_have_none_are(self, names):
        assert first_cause(zeros_at(*names)) == "dead-units"


class TestFrozen:
    @pytest.mark.parametrize(("held", "expected"), [(64, "info"), (96, "warning")])
    def test_what_the_optimizer_was_not_given_is_frozen_on_purpose(self, held, expected):
        history = layered(120, lambda step, place: 1.0, falling_losses(120), names=("b.weight",) * 4)
        names = [*NAMES[:2], "b.weight", "c.weight"]
        numbers = {"names": names, "names_without_gradient": NAMES[:2]}
        history.note_model(**numbers, optimizer_settings=[{"kind": "Adam", "lr": 1e-3, "num_parameters": held}])
        assert severity("frozen-parameters", history) == expected

    @pytest.mark.parametrize(
        ("frozen", "spread", "held", "expected"),
        [
            ("b.weight", 0.57, 96, "info"),  # trained before
            ("b.weight", 0.4, 64, "info"),  # the optimizer was not given it
            ("a.weight", 0.4, 96, "info"),  # has had gradients: blocks in turns
        ],
    )
    def test_a_layer_that_was_forgotten_is_told_however_much_is_learnt(self, frozen, spread, held, expected):
        losses = falling_losses(300, pace=20.0)
        history = layered(300, lambda step, place: 1.0, losses, names=("0.weight", "a.weight", "c.weight", "d.weight"))
        if frozen == "a.weight":
            history.add(make_record(300, 1.0, loss=losses[-1]))
        names = ["0.weight", "a.weight", "b.weight", "c.weight", "d.weight"]
        history.note_model(
            names=names,
            names_without_gradient=[frozen],
            initialization={frozen: (spread, 1.0)},
            optimizer_settings=[{"kind": "Adam", "lr": 1e-3, "num_parameters": held}],
        )
        assert severity("frozen-parameters", history) == expected

    def test_what_has_a_gradient_now_is_frozen_no_longer(self):
        history = layered(60, lambda step, place: 1.0, falling_losses(60), names=NAMES)
        history.note_model(names=NAMES, names_without_gradient=NAMES[:2])
        assert severity("frozen-parameters", history) is None


class TestOthers:
    @pytest.mark.parametrize(("is_smooth", "expected"), [(False, "singular-operation"), (None, "unknown")])
    def test_a_loss_that_is_nan_without_its_gradients_is_no_bad_batch(self, is_smooth, expected):
        losses = bend(falling_losses(100), [20, 21, 22, 50, 70], lambda loss: math.nan)
        assert first_cause(run(losses, is_smooth=is_smooth)) == expected

    def test_steps_that_are_too_large_beside_inputs_far_off_are_of_the_inputs(self):
        lrs = {"lrs": [0.1] * 100, "optimizer_settings": settings(lr=0.1), "initialization": {"a": (0.1, 0.1)}}
        assert first_cause(run(flat_losses(100), **lrs)) == "learning-rate-too-high"
        findings = [RULES["steps-too-large"](run(flat_losses(100), **lrs)), RULES["input-scale"](BAD["input-scale"])]
        assert find_causes(findings, BAD["input-scale"])[0].rule == "unnormalised-inputs"


def skipping(num_clean, **notes):
    """A run whose gradients are NaN at every step from the `num_clean`th on."""
    history = with_bad_steps(num_clean + 30, {step: ["a"] for step in range(num_clean, num_clean + 30)})
    history.note_model(**notes)
    return history


class TestNothingFinite:
    @pytest.mark.parametrize(
        ("notes", "expected"),
        [
            ({}, "corrupted-weights"),
            ({"is_smooth": False}, "unknown"),  # an operation may have no finite value for what finite weights give
            ({"autocast": "float16"}, "half-precision-overflow"),
            ({"dtypes": ["float16"]}, "half-precision-overflow"),
            ({"autocast": "bfloat16"}, "corrupted-weights"),
        ],
    )
    def test_weights_are_corrupted_only_where_finite_ones_cannot_be(self, notes, expected):
        assert first_cause(skipping(40, **notes)) == expected

    def test_what_overflows_in_float16_at_once_does_not_explode(self):
        assert first_cause(skipping(1)) == "exploding-gradients"
        assert first_cause(skipping(1, dtypes=["float16"])) == "half-precision-overflow"


class TestNoGradient:
    @pytest.mark.parametrize(
        ("notes", "expected"),
        [
            ({"loss_kind": "zero"}, "no-gradient-arrives"),
            ({"loss_kind": "zero", "autocast": "float16"}, "no-gradient-arrives"),
        ],
    )
    def test_where_it_is_lost(self, notes, expected):
        history = zeros_at(*NAMES)
        history.note_model(**notes)
        assert first_cause(history) == expected

    @pytest.mark.parametrize(
        ("level", "fields", "expected"),
        [
            (2.3, {"output_width": 14, "output_abs_max": 99.0}, "no-gradient-arrives"),  # it may have reached its end
            (0.0, {"output_width": 14, "output_abs_max": 0.5}, "no-gradient-arrives"),  # all targets may be left out
        ],
    )
    def test_a_softmax_over_one_unit_that_the_loss_makes(self, level, fields, expected):
        findings = diagnose(zeros_at(*NAMES))
        ops = ["BinaryCrossEntropyBackward0", "SelectBackward0", "SoftmaxBackward0", "AddmmBackward0"]
        losses = flat_losses(60, level=level, noise=0.01 * (level > 0.0))
        history = batches_run(losses, batch(**fields), loss_ops=ops, loss_kind="zero")
        assert find_causes(findings, history)[0].rule == expected


class TestWhatSpeaksForIt:
    def test_functions_that_are_bounded_do_not_die(self):
        zeros = zeros_at(*NAMES[:2])
        assert first_cause(zeros) == "dead-units"
        zeros = zeros_at(*NAMES[:2])
        zeros.note_model(module_kinds={"Linear": 2}, loss_ops=["NllLossBackward0", "AddmmBackward0", "TanhBackward0"])
        assert first_cause(zeros) != "dead-units"

    @pytest.mark.parametrize(("lr", "is_named"), [(1e-3, True), (1e-7, False)])
    def test_targets_are_not_wrong_where_weights_hardly_move(self, lr, is_named):
        notes = {"loss_kind": "cross-entropy", "initialization": {"a": (0.1, 0.1)}, "lrs": [lr] * 150}
        notes["optimizer_settings"] = settings(lr=lr)
        history = batches_run(chance_losses(150), batch(output_width=4), **notes)
        assert (first_cause(history) == "wrong-targets") == is_named

    @pytest.mark.parametrize(
        ("lr", "begin", "expected"),
        [
            (1e-3, [2.3] * 3, "wrong-loss"),
            (0.1, [2.3] * 3, "learning-rate-too-high"),  # steps as large as the weights
            (1e-3, [2.3 - 0.02 * step for step in range(50)], "learning-rate-too-high"),  # it had come down
        ],
    )
    def test_a_loss_that_climbs_from_the_first_small_steps_on_has_the_wrong_sign(self, lr, begin, expected):
        losses = [*begin, *(2.3 * 1.05**step for step in range(150))]
        notes = {"initialization": {"w": (0.1, 0.1)}, "optimizer_settings": settings(lr=lr)}
        assert first_cause(run(losses, lrs=[lr] * len(losses), **notes)) == expected

    @pytest.mark.parametrize(("std", "expected"), [(0.1, "vanishing-gradients"), (2e-3, "learning-rate-too-high")])
    def test_gradients_do_not_vanish_by_themselves_where_steps_are_as_large_as_weights(self, std, expected):
        history = layered(220, lambda step, place: 1e-5 * 10.0 ** (place / 2), flat_losses(220))
        history.note_model(optimizer_settings=settings(), initialization={"layers.0.weight": (std, std)})
        assert first_cause(history) == expected

    @pytest.mark.parametrize(("is_smooth", "is_named"), [(True, True), (False, False)])
    def test_a_loss_that_is_nan_after_a_rise_is_not_surely_of_the_rate(self, is_smooth, is_named):
        losses = [2.0, 2.0, 2.0, *(2.0 * 1.05**step for step in range(60)), *[math.nan] * 30]
        norms = [*noisy_norms(63), *[math.nan] * 30]
        told = first_cause(run(losses, norms, is_smooth=is_smooth))
        assert (told == "learning-rate-too-high") == is_named


class TestJumps:
    """A loss that jumps to other data, and is learnt again, has not diverged."""

    AGAIN = (*falling_losses(100, noise=0.01), *falling_losses(60, start=4.6, pace=15.0, noise=0.01))

    @pytest.mark.parametrize("seen", [115, 120, 125, 130])
    def test_it_is_no_divergence(self, seen):
        norms = [norm * (1.0 if step < 100 else 5.0) for step, norm in enumerate(noisy_norms(160))]
        history = run(self.AGAIN[:seen], norms[:seen])
        assert severity("loss-divergence", history) is None
        assert severity("divergence-ahead", history) is None
        assert severity("loss-spike", history) is None

    FIRST = tuple(2.3 * math.exp(-step / 8) + 0.01 for step in range(50))
    TASKS = (*FIRST, *3 * [8.0 * math.exp(-step / 12) + 0.3 for step in range(45)])

    @pytest.mark.parametrize("seen", [53, 60, 90, 98, 140, 150, 185])
    def test_tasks_one_after_another_alarm_nobody(self, seen):
        norms = [2.0 * loss for loss in self.TASKS]
        found = diagnose(run(self.TASKS[:seen], norms[:seen], lrs=[0.01] * seen))
        assert [finding.rule for finding in found if finding.severity != "info"] == []

    @pytest.mark.parametrize(
        "change",
        [
            {"lrs": [0.01] * 48 + [0.1] * 137},  # the learning rate rose just before
            {"losses": (*FIRST[:47], 0.05, 0.5, 1.5, *TASKS[50:])},  # the loss rose before it
            {"losses": (*FIRST, *flat_losses(135, level=8.0))},  # nothing is learnt
        ],
    )
    def test_a_jump_that_is_of_the_steps_is_told(self, change):
        losses, lrs = change.get("losses", self.TASKS), change.get("lrs", [0.01] * 185)
        for seen in (62, 90):
            assert severity("loss-explosion", run(losses[:seen], lrs=lrs[:seen])) == "critical"

    def test_one_that_stays_up_is(self):
        assert severity("loss-divergence", run([*self.AGAIN[:100], *flat_losses(40, level=4.0)])) == "critical"


class TestWhetherInputsTellTheTargets:
    """What stands at chance: of targets that do not follow from the inputs, or of a model that cannot tell."""

    LINEAR = ("NllLossBackward0", "LogSoftmaxBackward0", "AddmmBackward0", "TBackward0")

    def first(self, **notes):
        return first_cause(batches_run(chance_losses(150), batch(), loss_kind="cross-entropy", **notes))

    def test_targets_are_blamed_where_that_is_not_known(self):
        assert self.first(loss_ops=self.LINEAR) == "wrong-targets"

    def test_a_linear_model_whose_steps_are_too_small(self):
        slow = {"optimizer_settings": settings(lr=1e-3), "initialization": {"a": (100.0, 100.0)}}
        assert self.first(loss_ops=self.LINEAR, target_dependence=9.0, **slow) == "learning-rate-too-low"


WEIGHTS = tuple(f"{place}.weight" for place in range(8))


def stood(num_steps, then=10.0, pace=20.0):
    """Losses that stand for so many steps, and then fall."""
    return [*flat_losses(num_steps, then), *falling_losses(300 - num_steps, start=then, floor=0.02 * then, pace=pace)]


USUAL = {"initialization": {"0.weight": (0.1, 0.1), "2.weight": (0.1, 0.1)}}
LARGE = {"target_mean": 100.0, "target_std": 10.0, "loss_ops": ("HuberLossBackward0", "AddmmBackward0")}


def test_what_is_learnt_and_false_of_others_is_of_wrong_targets():
    values = {step: 4.0 + step / 100 for step in range(20, 400, 20)}
    history = run(falling_losses(400), val_losses=values)
    assert RULES["label-noise"](history).confidence > 0.8
    assert first_cause(history) == "wrong-targets"


def linear(ops, sizes):
    """A run of layers with these numbers of weights and biases."""
    names = [f"{layer}.{part}" for layer in range(len(sizes)) for part in ("weight", "bias")]
    rows = [make_row(1.0, size) for pair in sizes for size in pair]
    history = TrainingHistory()
    history.note_model(loss_ops=ops, names=names)
    for step, loss in enumerate(falling_losses(100)):
        history.add(StepStats(step, make_table(rows, names), loss=loss, lr=1e-3))
    return history


CROSS = ("NllLossBackward0", "LogSoftmaxBackward0", "AddmmBackward0", "AddmmBackward0", "TBackward0")


CLASS = {"num_targets": 256, "num_target_classes": 1, "target_top_share": 1.0, "target_batch_top_share": 1.0,
         "loss_kind": "cross-entropy"}  # fmt: skip


LEFT = {"num_left_gradients": 20, "num_watched_backwards": 20}


def test_gradients_that_add_up_are_what_a_run_that_ran_away_is_told_with():
    losses = [1.0] * 100 + [10.0 * 1.05**step for step in range(100)]
    history = run(losses, [1.0] * 100 + [100.0 * 1.05**step for step in range(100)], **LEFT)
    assert severity("gradients-not-cleared", history) == "critical"
    assert severity("gradients-not-cleared", run([1.0] * 200, **LEFT)) == "warning"
    assert first_cause(history) == "missing-zero-grad"


def test_a_rate_that_only_rises_is_what_a_run_that_ran_away_is_told_with():
    losses = [1.0] * 100 + [10.0 * 1.05**step for step in range(150)]
    history = run(losses, lrs=[1e-3 * 1.03**step for step in range(250)])
    assert severity("learning-rate-still-rising", history) == "critical"
    assert first_cause(history) == "wrong-schedule"


@pytest.mark.parametrize(
    ("ops", "loss", "expected"),
    [
        (("MeanBackward0", "LogBackward0", "AddmmBackward0"), math.nan, "singular-operation"),
        (("MeanBackward0", "LogBackward0", "AddmmBackward0"), math.inf, "exploding-gradients"),
        (("NllLossBackward0", "LogSoftmaxBackward0", "AddmmBackward0"), math.nan, "exploding-gradients"),
    ],
)
def test_losses_that_are_nan_from_the_first_on(ops, loss, expected):
    facts = {"loss_ops": ops, "is_smooth": False}
    history = run([loss] * 25, [math.nan] * 25, change=lambda step: {"skipped": True}, **facts)
    assert first_cause(history) == expected


@pytest.mark.parametrize(("num_nonfinite", "expected"), [(0, "singular-operation"), (8, "exploding-gradients")])
def test_losses_that_are_nan_of_a_finite_output(num_nonfinite, expected):
    seen = {"skipped": True, "batches": (batch(output_num_nonfinite=num_nonfinite)(0),)}
    facts = {"loss_ops": ("MseLossBackward0", "AddmmBackward0"), "is_smooth": True}
    history = run([math.nan] * 25, [math.nan] * 25, change=lambda step: seen, **facts)
    assert first_cause(history) == expected


def penalised(sizes, spreads=(0.1, 0.2, 0.3), ops=("AddBackward0", "NllLossBackward0"), last=0.0, num_steps=120):
    """A run whose weights have gradients of these sizes, and whose output ends with a spread of `last`."""
    names = tuple(f"{place}.weight" for place in range(len(sizes)))
    history = TrainingHistory()
    history.note_model(loss_ops=ops, initialization={name: (spread, 0.1) for name, spread in zip(names, spreads)})
    for step, loss in enumerate(falling_losses(num_steps, start=40.0)):
        table = make_table([make_row(4.0 * size, 16, num_zeros=0) for size in sizes], names)
        passes = () if step % 10 else (batch(output_spread=0.5 if step < 50 else last)(step),)
        history.add(StepStats(step, table, loss=loss, lr=1e-3, batches=passes))
    return history


@pytest.mark.parametrize(
    ("given", "term"),
    [
        ({"sizes": (0.5, 0.5, 0.51)}, "|w|"),
        ({"sizes": (0.2, 0.4, 0.6)}, "w²"),
        ({"sizes": (0.2, 0.4, 1.6)}, "w²"),  # what the data add to the last layer
        ({"sizes": (0.5, 0.5, 0.5), "ops": ("NllLossBackward0", "AddBackward0")}, ""),  # within the model
    ],
)
def test_a_penalty_on_the_weights_that_outweighs_the_loss(given, term):
    history = penalised(**given)
    finding = RULES["large-weight-decay"](history)
    assert (finding.evidence["term"] if finding else "") == term
    assert (first_cause(history) == "weight-decay-too-high") == bool(term)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("SGD", "output-against-loss", "wrong-output-layer"),
        ("SGD", "vanishing-layers", "vanishing-gradients"),
        ("Adam", "output-against-loss", "learning-rate-too-low"),  # whose steps do not depend on the gradients' size
    ],
)
def test_what_makes_gradients_small_explains_small_steps_that_are_as_large_as_these(kind, name, expected):
    history = run(flat_losses(100), optimizer_settings=settings(kind))
    found = [Finding("", 0, 99, rule=rule) for rule in ("steps-too-small", "update-ratio-low", name)]
    assert find_causes(found, history)[0].rule == expected


POISSON = ("MeanBackward0", "SubBackward0", "ExpBackward0", "ExpBackward0", LINEAR)
DENSE = ("NllLoss2DBackward0", "ViewBackward0", "LogSoftmaxBackward0")


def told(history):
    causes = find_causes(diagnose(history), history)
    return causes[0].rule if causes else None


class TestFloors:
    RUNAWAY = tuple(0.7 - 0.02 * s**2 for s in range(80))

    def history(self, losses=RUNAWAY, rate=1.05, cosine=0.98, **notes):
        norms = [rate**s for s in range(len(losses))]
        return run(losses, norms, change=lambda s: {"grad_cosine": cosine if s else None}, **notes)

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


def test_finite_outputs_of_ordinary_size_have_not_exploded():
    history = batches_run([], batch())
    for step in range(30):
        history.add(make_bad_record(step, ["a"], loss=math.inf, batches=(batch()(step),)))
    assert told(history) != "exploding-gradients"
    assert "output-loss-mismatch" not in {finding.rule for finding in diagnose(BAD["loss-begins-high"])}


BINARY = {"target_range": [0.0, 1.0]}
ZEROS = {"target_mean": 0.0, "target_std": 0.0, "target_range": [0.0, 0.0]}


def squared(losses=None, *, first=1.0, **notes):
    """A run whose loss is a squared error: its first value is what that would have been."""
    losses = flat_losses(100, level=first) if losses is None else losses
    usual = {"target_mean": 0.0, "target_std": 1.0, "target_range": [-2.0, 2.0], "target_binary_share": 0.0}
    return run([first, *losses], loss_kind="squared error", squared_losses=[first], **{**usual, **notes})


@pytest.mark.parametrize("mean", [1e4, 0.0])
def test_large_targets_whose_loss_ended_at_its_third_step(mean):
    notes = {"target_mean": mean, "target_std": 1.0, "squared_losses": [1e8], "loss_kind": "squared error"}
    history = run([1e8, 4e7, 1e26, *[math.nan] * 25], [1e6, 1e7, 1e23, *[math.nan] * 25], **notes)
    assert severity("target-scale", history) == ("warning" if mean else None)
    told = [one.rule for one in find_causes(diagnose(history), history)]
    assert ("unnormalised-targets" in told) == bool(mean)
