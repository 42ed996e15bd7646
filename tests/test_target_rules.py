"""Where the rules on targets stop: of which targets, losses and outputs they say nothing, or make a remark only."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fastguard.diagnosis import RULES, diagnose, find_causes

from faulty_runs import BAD
from made_runs import batch, batches_run, falling_losses, flat_losses, passed, run, severity

BINARY = {"target_range": [0.0, 1.0]}
ZEROS = {"target_mean": 0.0, "target_std": 0.0, "target_range": [0.0, 0.0]}


def squared(losses=None, *, first=1.0, **notes):
    """A run whose loss is a squared error: its first value is what that would have been."""
    losses = flat_losses(100, level=first) if losses is None else losses
    usual = {"target_mean": 0.0, "target_std": 1.0, "target_range": [-2.0, 2.0], "target_binary_share": 0.0}
    return run([first, *losses], loss_kind="squared error", squared_losses=[first], **{**usual, **notes})


@pytest.mark.parametrize(
    ("history", "fires"),
    [
        (run(falling_losses(20), num_targets=64, num_target_classes=1), True),
        (run(falling_losses(20), num_targets=63, num_target_classes=1), False),
        (run(falling_losses(20), num_targets=900, num_target_classes=2), False),
        (squared(target_mean=3.0, target_std=0.0, target_range=[3.0, 3.0]), True),
        (squared(target_mean=3.0, target_std=0.01, target_range=[2.9, 3.1]), False),
        (squared(**ZEROS, loss_ops=["MeanBackward0", "PowBackward0", "AddmmBackward0"]), False),  # there are none
        (run(falling_losses(20)), False),
    ],
)
def test_one_target(history, fires):
    assert (RULES["one-target"](history) is not None) == fires


@pytest.mark.parametrize(
    ("notes", "num_samples", "fires"),
    [
        ({}, 8, True),
        ({}, 4, True),
        ({}, 3, False),  # three of one class are no wonder
        ({"num_targets": 63}, 8, False),
        ({"target_batch_top_share": 0.81}, 8, True),
        ({"target_batch_top_share": 0.79}, 8, False),
        ({"target_top_share": 0.74}, 8, True),
        ({"target_top_share": 0.76}, 8, False),  # uneven-targets
        ({"num_target_classes": 1}, 8, False),  # one-target
        ({"target_batch_top_share": None}, 8, False),  # as of an old log
    ],
)
def test_sorted(notes, num_samples, fires):
    known = {"num_targets": 64, "num_target_classes": 3, "target_top_share": 0.4, "target_batch_top_share": 1.0}
    history = batches_run(falling_losses(60), batch(num_samples=num_samples), **{**known, **notes})
    assert (RULES["sorted-targets"](history) is not None) == fires


@pytest.mark.parametrize(
    ("fields", "notes", "losses", "expected"),
    [
        ({}, {}, flat_losses(60), "warning"),
        ({}, {"target_in_inputs": 0.999}, flat_losses(60), None),
        ({}, {"target_in_inputs": None}, flat_losses(60), None),  # as of an old log
        ({}, {"loss_kind": ""}, flat_losses(60), None),
        ({}, {"loss_kind": "squared error"}, flat_losses(60), None),  # not proved
        ({"input_is_integer": True}, {}, flat_losses(60), "info"),  # an autoencoder's
        ({"input_is_integer": True}, {}, [2.3] * 10 + [0.1] * 90, "warning"),
    ],
)
def test_answer_in_inputs(fields, notes, losses, expected):
    known = {"loss_kind": "cross-entropy", "target_in_inputs": 1.0, **notes}
    assert severity("answer-in-inputs", batches_run(losses, batch(**fields), **known)) == expected


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ({}, "warning"),
        ({"target_dependence": 1.6}, "warning"),
        ({"target_dependence": 1.7}, None),
        ({"target_dependence": None}, None),  # as of an old log
        ({"loss_kind": "squared error", "loss_ops": ["MeanBackward0", "GatherBackward0"]}, None),  # values of actions
        ({"loss_kind": "squared error", "loss_ops": ["L1LossBackward0"]}, "warning"),
        ({"objective": "reward"}, None),
        ({"objective": "game"}, None),
    ],
)
def test_unrelated_targets(notes, expected):
    known = {"loss_kind": "cross-entropy", "target_dependence": 0.0, **notes}
    assert severity("unrelated-targets", run(flat_losses(220), **known)) == expected


@pytest.mark.parametrize(
    ("losses", "expected"),
    [(flat_losses(199), "info"), (flat_losses(200), "warning"), (falling_losses(220), "info")],
)
def test_targets_are_not_called_unrelated_while_the_loss_may_show_that_they_are_not(losses, expected):
    assert severity("unrelated-targets", run(losses, target_dependence=0.0)) == expected


@pytest.mark.parametrize(("fields", "expected"), [({}, "warning"), ({"input_is_integer": True}, None)])
def test_sequences_of_tokens_are_not_held_against_their_targets(fields, expected):
    history = batches_run(flat_losses(220), batch(**fields), loss_kind="cross-entropy", target_dependence=0.0)
    assert severity("unrelated-targets", history) == expected


@pytest.mark.parametrize(("val_loss", "expected"), [(1.0, None), (2.2, "warning"), (9.0, "warning")])
def test_targets_that_validation_shows_to_follow_from_inputs(val_loss, expected):
    history = run(falling_losses(220), val_losses={59: 2.3, 119: val_loss}, target_dependence=0.0)
    assert severity("unrelated-targets", history) == expected


@pytest.mark.parametrize(
    ("losses", "notes", "expected"),
    [
        (flat_losses(60), {"target_top_share": 0.91}, "warning"),
        (falling_losses(200, pace=20.0), {"target_top_share": 0.91}, "info"),
        (flat_losses(50), {"target_top_share": 0.91}, "warning"),
        (flat_losses(49), {"target_top_share": 0.91}, "info"),
        ([2.3] * 10 + [1.65] * 90, {"target_top_share": 0.91}, "warning"),
        ([2.3] * 10 + [1.55] * 90, {"target_top_share": 0.91}, "info"),
        (falling_losses(200, pace=20.0), {"target_top_share": 0.94}, "info"),
        (flat_losses(60), {"target_top_share": 0.9}, None),
        (flat_losses(60), {"target_top_share": 1.0, "num_target_classes": 1}, None),  # one-target
        (flat_losses(60), {}, None),
    ],
)
def test_uneven(losses, notes, expected):
    history = run(losses, **{"num_targets": 128, "num_target_classes": 3, **notes})
    assert severity("uneven-targets", history) == expected


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (flat_losses(79, level=0.25), "warning"),
        (flat_losses(78, level=0.25), "info"),  # the first is one more
        ([0.25] * 10 + [0.18] * 90, "warning"),
        ([0.25] * 10 + [0.17] * 90, "info"),
    ],
)
def test_a_squared_error_of_classes_that_is_learnt_is_a_remark(losses, expected):
    classes = {"target_mean": 0.5, "target_std": 0.5, "target_range": [0.0, 1.0], "target_binary_share": 1.0}
    assert severity("loss-against-targets", squared(losses, first=0.25, **classes)) == expected


def test_targets_that_are_all_zero_are_no_classes():
    """A residual that is squared has them, as that of a differential equation; they are known to rounding only."""
    zeros = {"target_mean": 5e-9, "target_std": 8e-9, "target_range": [-1e-7, 1e-7], "target_binary_share": 1.0}
    assert severity("loss-against-targets", squared(flat_losses(200, level=0.25), first=0.25, **zeros)) is None


@pytest.mark.parametrize(
    ("mean", "std", "losses", "expected"),
    [
        (0.0, 9.9, None, None),
        (0.0, 10.1, None, "warning"),
        (-20.0, 0.1, None, "warning"),
        (0.0, 10.1, flat_losses(30), "info"),
        (0.0, 10.1, falling_losses(200, start=1.0, floor=0.01, pace=10.0), "info"),
    ],
)
def test_scale(mean, std, losses, expected):
    assert severity("target-scale", squared(losses, target_mean=mean, target_std=std)) == expected


@pytest.mark.parametrize(("level", "expected"), [(230.0, "warning"), (80.0, "info"), (150.0, "info")])
def test_scale_of_a_loss_that_stands_at_what_the_mean_alone_gives(level, expected):
    """It has learnt nine tenths, and what is left stands above the variance of the targets, 100, or below it."""
    losses = [*falling_losses(40, start=1e4, floor=level, pace=4.0, noise=0.0), *flat_losses(100, level=level)]
    history = squared(losses, first=1e4, target_mean=99.0, target_std=10.0)
    assert severity("target-scale", history) == expected


def test_a_loss_that_was_never_a_squared_error_has_no_scale():
    history = squared(target_mean=99.0)
    assert severity("target-scale", history) == "warning"
    history.note_model(squared_losses=[7.0])
    assert severity("target-scale", history) is None
    history.note_model(squared_losses=[1.0], loss_kind="absolute error")
    assert severity("target-scale", history) is None


@pytest.mark.parametrize(
    ("notes", "low", "high", "fires"),
    [
        ({"last_modules": ["Sigmoid"]}, 0.0, 1.0, False),
        ({"last_modules": ["Sigmoid"]}, 0.0, 1.03, True),
        ({"last_modules": ["Sigmoid"]}, -1.0, 1.0, True),
        ({"last_modules": ["Tanh"]}, -1.0, 1.0, False),
        ({"last_modules": ["Tanh"]}, -1.0, 2.0, True),
        ({"last_modules": ["ReLU"]}, 0.0, 1e6, False),
        ({"last_modules": ["ReLU"]}, -1.0, 1.0, True),
        ({"last_modules": ["Linear", "ReLU"]}, -9.0, 9.0, False),
        ({"last_modules": ["Linear"], "last_operations": ["Relu", "Addmm"]}, -1.0, 1.0, True),  # a function, no module
        ({}, -9.0, 9.0, False),
    ],
)
def test_reach(notes, low, high, fires):
    history = squared(target_range=[low, high], **notes)
    assert (RULES["targets-beyond-output"](history) is not None) == fires


@pytest.mark.parametrize(
    ("kind", "fields", "fires"),
    [
        ("cross-entropy", {"output_rows_sum_to_one": True}, True),
        ("cross-entropy", {}, False),
        ("binary cross-entropy with logits", {"output_is_unit": True}, True),
        ("binary cross-entropy with logits", {}, False),
        ("binary cross-entropy", {"output_is_unit": True}, False),
        ("negative log-likelihood", {"output_max": 1.5}, True),
        ("negative log-likelihood", {"output_max": -0.01}, False),
        ("squared error", {"output_is_unit": True, "output_rows_sum_to_one": True}, False),
        ("", {"output_is_unit": True, "output_rows_sum_to_one": True}, False),
    ],
)
def test_output_as_the_loss_asks(kind, fields, fires):
    history = batches_run(falling_losses(60), batch(**fields), loss_kind=kind)
    assert (RULES["output-not-as-the-loss-asks"](history) is not None) == fires


def test_outputs_of_validation_may_be_probabilities():
    history = batches_run(falling_losses(60), batch(), passed(output_rows_sum_to_one=True), loss_kind="cross-entropy")
    assert severity("output-not-as-the-loss-asks", history) is None


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (squared(**BINARY, target_binary_share=0.99), "warning"),
        (squared(**BINARY, target_binary_share=0.98), None),
        (squared(target_binary_share=1.0), None),  # of one batch: another's went from -2 to 2
        (squared(flat_losses(30), **BINARY, target_binary_share=1.0), "info"),
        (squared(falling_losses(200, start=1.0, floor=0.01, pace=10.0), **BINARY, target_binary_share=1.0), "info"),
        (squared(target_binary_share=1.0, target_std=0.0), None),  # one-target
        (run([1.0, -0.1], loss_kind="cross-entropy"), "warning"),
        (
            run([1.0, -0.1], loss_kind="cross-entropy", loss_ops=["SubBackward0", "NllLossBackward0"]),
            None,
        ),  # an entropy
        (run([1.0, -0.1], loss_kind="binary cross-entropy"), "warning"),
        (run([1.0, -1e-4], loss_kind="cross-entropy"), None),  # rounding
        (run([1.0, -0.1], loss_kind="cross-entropy", loss_ops=["MeanBackward0", "MulBackward0"]), None),  # an advantage
        (run([1.0, -5.0], loss_kind="negative log-likelihood"), None),
        (run([1.0, -5.0]), None),
        (run([1010.0] * 20, loss_ops=["MeanBackward0", "DivBackward0", "AbsBackward0", "SubBackward0"]), "warning"),
        (run([990.0] * 20, loss_ops=["MeanBackward0", "DivBackward0", "AbsBackward0", "SubBackward0"]), None),
        (run([1010.0] * 20, loss_ops=["MeanBackward0", "AbsBackward0", "SubBackward0"]), None),  # not relative
    ],
)
def test_loss_against_targets(history, expected):
    assert severity("loss-against-targets", history) == expected


@pytest.mark.parametrize(
    ("ops", "fires"),
    [
        (("MseLossBackward0", "ExpandBackward0", "AddmmBackward0"), True),
        (("MeanBackward0", "AbsBackward0", "SubBackward0", "ExpandBackward0"), True),
        (("MseLossBackward0", "AddmmBackward0"), False),
        (("MseLossBackward0", "ViewBackward0", "ExpandBackward0"), False),
        (("AddBackward0", "ExpandBackward0"), False),
        (("MseLossBackward0",), False),
        ((), False),
    ],
)
def test_broadcast(ops, fires):
    assert (RULES["broadcast-targets"](run(falling_losses(20), loss_ops=ops)) is not None) == fires


@pytest.mark.parametrize(
    ("loss", "std", "ops", "fires"),
    [
        (1.1, 0.0, (), True),  # all are pulled to one number, and the loss knows of a spread
        (1.04, 0.0, (), False),
        (1.1, 0.1, (), False),
        (1.1, 0.0, ("MseLossBackward0", "AddmmBackward0"), True),  # whatever else is known
    ],
)
def test_broadcast_that_the_gradient_tells_of(loss, std, ops, fires):
    notes = {"squared_losses": [1.0], "target_mean": 2.0, "target_std": std, "loss_ops": ops}
    history = run(flat_losses(20, level=loss, noise=0.0), loss_kind="squared error", **notes)
    finding = RULES["broadcast-targets"](history)
    assert (finding is not None) == fires
    if finding is not None:
        assert finding.evidence == {"loss": loss, "squared_distance": 1.0}


@pytest.mark.parametrize(
    ("entropy", "num_targets", "slope", "fires"),
    [(1.5, 600, 0.0, True), (1.5, 500, 0.0, False), (1.8, 600, 0.0, False), (1.5, 600, 0.001, False)],
)
def test_a_loss_at_the_entropy_of_the_targets(entropy, num_targets, slope, fires):
    """What is learnt is how frequent each class is, though guessing among all would be worse; not on the way down."""
    losses = flat_losses(200, level=1.5, noise=0.02)
    history = run([loss + slope * (170 - step) for step, loss in enumerate(losses)])
    pair = BAD["loss-at-chance"].batches[0]
    history.batches.add(0, [dataclasses.replace(pair.batch, output_width=10)])
    history.note_model(loss_kind="cross-entropy", target_entropy=entropy, num_targets=num_targets)
    assert (RULES["loss-at-chance"](history) is not None) == fires


@pytest.mark.parametrize("mean", [1e4, 0.0])
def test_large_targets_whose_loss_ended_at_its_third_step(mean):
    notes = {"target_mean": mean, "target_std": 1.0, "squared_losses": [1e8], "loss_kind": "squared error"}
    history = run([1e8, 4e7, 1e26, *[math.nan] * 25], [1e6, 1e7, 1e23, *[math.nan] * 25], **notes)
    assert severity("target-scale", history) == ("warning" if mean else None)
    told = [one.rule for one in find_causes(diagnose(history), history)]
    assert ("unnormalised-targets" in told) == bool(mean)


@pytest.mark.parametrize(("at", "num_bad", "expected"), [(5, 9, "info"), (5, 10, "warning"), (100, 20, "info")])
def test_large_targets_are_not_to_blame_for_a_bad_batch(at, num_bad, expected):
    losses = [400.0 * loss for loss in falling_losses(150, start=1.0, floor=0.0, pace=20.0)]
    notes = {"target_mean": 0.0, "target_std": 20.0, "squared_losses": [losses[0]], "loss_kind": "squared error"}
    losses[at : at + num_bad] = norms = [math.nan] * num_bad
    length = 60 if at == 5 else 150
    history = run(losses[:length], [*[1.0] * at, *norms, *[1.0] * (length - at - num_bad)], **notes)
    assert severity("target-scale", history) == expected
