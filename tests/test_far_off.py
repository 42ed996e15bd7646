"""What is so far off, or so clear, that it is told whatever the loss does; and what speaks against a cause."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import RULES, Finding, diagnose, find_causes
from fastguard.records import StepStats, TrainingHistory

from made_runs import (
    batch,
    batches_run,
    ended,
    falling_losses,
    flat_losses,
    layered,
    run,
    settings,
    severity,
    validated,
)
from records import make_record, make_row, make_table

WEIGHTS = tuple(f"{place}.weight" for place in range(8))


def first_cause(history):
    return find_causes(diagnose(history), history)[0].rule


@pytest.mark.parametrize(
    ("factor", "num_weights", "losses", "expected"),
    [
        (0.5, 8, flat_losses(120), "warning"),  # to 1/64 over six layers
        (0.5, 6, flat_losses(120), None),  # to 1/16 over four
        (0.3, 6, flat_losses(120), "warning"),
        (0.3, 5, flat_losses(120), "warning"),  # to 1/123 from first to last
        (0.3, 4, flat_losses(120), None),  # to 1/37
        (0.2, 4, flat_losses(120), "warning"),
        (0.2, 4, falling_losses(120, pace=20.0), None),
        (0.01, 3, flat_losses(120), None),  # too few to tell
        (0.5, 8, flat_losses(99), None),
        (0.5, 8, falling_losses(120, pace=20.0), None),
    ],
)
def test_gradients_that_fall_off_evenly_from_layer_to_layer_where_nothing_is_learnt(
    factor, num_weights, losses, expected
):
    names = WEIGHTS[:num_weights]
    history = layered(len(losses), lambda step, place: factor ** (num_weights - 1 - place), losses, names)
    assert severity("vanishing-layers", history) == expected


def test_one_layer_of_small_gradients_is_no_fall_from_layer_to_layer():
    history = layered(120, lambda step, place: 0.005 if place < 2 else 1.0, flat_losses(120), WEIGHTS)
    assert severity("vanishing-layers", history) is None


def stood(num_steps, then=10.0, pace=20.0):
    """Losses that stand for so many steps, and then fall."""
    return [*flat_losses(num_steps, then), *falling_losses(300 - num_steps, start=then, floor=0.02 * then, pace=pace)]


@pytest.mark.parametrize(
    ("losses", "factor", "late", "notes", "expected"),
    [
        (stood(120), 0.3, 1.0, {}, "info"),  # all is learnt in the end
        (stood(120, pace=100.0), 0.7, 1.0, {}, None),  # to 1/12 over seven layers
        (stood(40, pace=60.0), 0.3, 1.0, {}, None),
    ],
)
def test_first_layers_that_got_hardly_any_gradient_while_the_loss_stood(losses, factor, late, notes, expected):
    def norm(step, place):
        return (factor if step < 100 else late) ** (7 - place)

    history = layered(len(losses), norm, losses, WEIGHTS)
    history.note_model(**notes)
    assert severity("vanishing-layers", history) == expected


@pytest.mark.parametrize(
    ("is_over", "num_stood", "expected"), [(True, 80, "info"), (False, 80, None), (False, 120, "info")]
)
def test_a_shorter_stand_is_told_at_the_end(is_over, num_stood, expected):
    losses = stood(num_stood, pace=100.0)
    history = layered(300, lambda step, place: (0.3 if step < 70 else 1.0) ** (7 - place), losses, WEIGHTS)
    history.has_ended = is_over
    assert severity("vanishing-layers", history) == expected


USUAL = {"initialization": {"0.weight": (0.1, 0.1), "2.weight": (0.1, 0.1)}}
LARGE = {"target_mean": 100.0, "target_std": 10.0, "loss_ops": ("HuberLossBackward0", "AddmmBackward0")}


@pytest.mark.parametrize(
    ("kind", "lr", "notes", "expected"),
    [
        ("Adam", 0.25, USUAL, "warning"),
        ("Adam", 0.15, USUAL, "info"),
        ("Adam", 0.25, {}, "info"),  # of weights that are not known
        ("Adam", 0.25, {"initialization": {"0.weight": (1.0, 0.1)}}, "info"),
        ("Adam", 5.0, {**USUAL, **LARGE}, "info"),  # as far as the targets are
        ("Adam", 25.0, {**USUAL, **LARGE}, "warning"),
    ],
)
def test_a_rate_far_above_all_usual_ones(kind, lr, notes, expected):
    history = run(falling_losses(100), lrs=[lr] * 100, optimizer_settings=settings(kind), **notes)
    assert severity("learning-rate-unusual", history) == expected


@pytest.mark.parametrize(("kind", "lr", "expected"), [("Adam", 0.25, "warning"), ("SGD", 15.0, "info")])
def test_where_steps_do_not_depend_on_gradients_the_loss_is_not_asked(kind, lr, expected):
    notes = {"optimizer_settings": settings(kind), "initialization": {"w": (0.1, 0.1)}}
    found = diagnose(run(falling_losses(100), lrs=[lr] * 100, **notes))
    assert {finding.rule: finding.severity for finding in found}["learning-rate-unusual"] == expected


@pytest.mark.parametrize("num_steps", [5, 16, 25, 40, 60])
@pytest.mark.parametrize("end", [2.3, 2.4, 4.1])
def test_a_loss_that_has_not_fallen_is_not_still_falling(num_steps, end):
    losses = [2.3 + (end - 2.3) * step / (num_steps - 1) for step in range(num_steps)]
    assert severity("loss-still-falling", ended(run(losses))) is None


def test_a_smoke_run_gets_no_warning_for_being_short():
    """Its loss falls as fast as ever, and the second half brings much."""
    losses = [2.3 - 0.06 * step for step in range(25)]
    history = ended(run(losses, loss_ops=("NllLossBackward0", "AddmmBackward0")))
    assert severity("loss-still-falling", history) == "info"
    history.add(make_record(25, loss=0.7))
    assert severity("loss-still-falling", ended(history)) == "warning"


@pytest.mark.parametrize(
    ("losses", "ops", "fires"),
    [
        ([2.3 - 0.01 * step for step in range(100)], "NllLossBackward0", True),
        ([2.3 - 0.01 * step for step in range(100)], "MeanBackward0", False),  # which may end above zero
        ([2.3 - 0.02 * step for step in range(100)], "NllLossBackward0", False),  # little is left
        ([2.3 - 0.005 * step for step in range(200)], "NllLossBackward0", False),
        (falling_losses(100, pace=30.0, floor=1.0), "NllLossBackward0", False),  # it slows down
        (flat_losses(100), "NllLossBackward0", False),
    ],
)
def test_a_run_that_ends_while_its_loss_falls_as_fast_as_ever(losses, ops, fires):
    history = run(losses, loss_ops=(ops, "AddmmBackward0"))
    assert severity("loss-still-falling", history) is None  # it may go on
    assert (severity("loss-still-falling", ended(history)) == "warning") == fires


@pytest.mark.parametrize(
    ("train", "level", "fires"),
    [(0.005, 0.9, True), (0.005, 0.5, False), (0.05, 0.9, False)],
)
def test_samples_learnt_by_heart_with_a_validation_loss_that_stands_high(train, level, fires):
    losses = falling_losses(400, floor=train, noise=0.0, pace=15.0)
    history = run(losses, val_losses=validated(400, level=level))
    assert (severity("overfitting", history) == "warning") == fires


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


@pytest.mark.parametrize(
    ("ops", "sizes", "expected"),
    [
        (CROSS, [(200, 20), (100, 5)], "warning"),  # 10 to 20 to 5
        (CROSS, [(30, 3), (30, 10)], "info"),  # 10 to 3 to 10: a code
        ((*CROSS[:4], "ReluBackward0", "AddmmBackward0"), [(200, 20), (400, 20), (100, 5)], "info"),
    ],
)
def test_nothing_but_linear_layers(ops, sizes, expected):
    assert severity("layers-without-activation", linear(ops, sizes)) == expected


CLASS = {"num_targets": 256, "num_target_classes": 1, "target_top_share": 1.0, "target_batch_top_share": 1.0,
         "loss_kind": "cross-entropy"}  # fmt: skip


def test_one_class_in_the_first_batches_and_others_later():
    losses = [max(0.4, 1.0 - 0.1 * step) for step in range(20)] + [3.0, 2.0, *flat_losses(80, level=1.2)]
    history = batches_run(losses, batch(output_width=4), **CLASS)
    assert severity("one-target", history) is None
    assert severity("sorted-targets", history) == "warning"
    constant = batches_run(falling_losses(100, pace=5.0, floor=1e-4, noise=0.0), batch(output_width=4), **CLASS)
    assert (severity("one-target", constant), severity("sorted-targets", constant)) == ("warning", None)


@pytest.mark.parametrize(
    ("share", "num_classes", "num_targets", "expected"),
    [(0.85, 9, 96, "warning"), (0.79, 9, 96, None), (0.85, 2, 96, None), (0.85, 9, 63, None), (0.92, 2, 128, "info")],
)
def test_one_class_of_many_is_most_of_the_targets(share, num_classes, num_targets, expected):
    facts = {"target_top_share": share, "num_target_classes": num_classes, "num_targets": num_targets}
    assert severity("uneven-targets", run(falling_losses(100), **facts)) == expected


def test_batches_of_two_and_a_loss_that_stays_at_chance():
    for level, expected in ((1.0, "warning"), (0.8, None)):
        losses = flat_losses(200, level=level * math.log(4))
        history = batches_run(losses, batch(num_samples=2, output_width=4), loss_kind="cross-entropy")
        assert severity("tiny-batches", history) == expected


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


@pytest.mark.parametrize(("gained", "expected"), [(0.7, "warning"), (0.85, "info")])
def test_a_beta2_of_a_tenth(gained, expected):
    losses = [2.0] * 10 + [2.0 * (1.0 - gained)] * 190
    assert severity("odd-optimizer-settings", run(losses, optimizer_settings=settings(betas=(0.999, 0.1)))) == expected


@pytest.mark.parametrize(("losses", "expected"), [(flat_losses(120), "warning"), (falling_losses(120), "info")])
def test_most_parameters_are_not_in_the_optimizer(losses, expected):
    names = [f"{place}.weight" for place in range(6)]
    history = run(losses, names=names, not_in_optimizer=names[:5])
    assert severity("parameters-not-in-optimizer", history) == expected


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


def test_a_penalty_is_a_remark_until_there_was_time():
    assert severity("large-weight-decay", penalised((0.5, 0.5, 0.5), num_steps=90)) == "info"


@pytest.mark.parametrize(
    ("spread", "is_over", "losses", "expected"),
    [
        (0.1, False, flat_losses(120), "info"),  # it may be thawed
        (0.1, True, falling_losses(120, pace=20.0), "info"),
        (0.15, True, flat_losses(120), "info"),  # trained before
    ],
)
def test_weights_that_nobody_trained_are_frozen_to_no_purpose(spread, is_over, losses, expected):
    names = [f"{place}.{kind}" for place in range(6) for kind in ("weight", "bias")]
    history = run(losses, names=names, names_without_gradient=names[:4])
    known = {name: (spread, 0.1) for name in names if name.endswith("weight")}
    history.note_model(initialization=known, optimizer_settings=settings())
    history.has_ended = is_over
    assert severity("frozen-parameters", history) == expected


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
