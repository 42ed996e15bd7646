"""What rules have in common: levels, noise, progress, jumps, and what the loss and its graph tell."""

from __future__ import annotations

import math
import random

import pytest

from fastguard.diagnosis import RULES, find_causes
from fastguard.diagnosis.needs import descent, is_squared_error, may_rise, rewarded, takes_turns
from fastguard.diagnosis.rules.lr import estimated_update_ratio
from fastguard.diagnosis.rules.output import loss_and_activation
from fastguard.diagnosis.signals import fall_of, signals_of
from fastguard.records import TrainingHistory

from made_runs import (
    batch,
    batches_run,
    falling_losses,
    flat_losses,
    layered,
    noisy_norms,
    passed,
    run,
    settings,
    severity,
    weights_run,
)

CLASSES = {"loss_kind": "cross-entropy", "target_entropy": math.log(10), "num_targets": 512, "num_target_classes": 10}


def of_classes(losses, **notes):
    return batches_run(losses, batch(output_width=10), **{**CLASSES, **notes})


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


ACTOR_CRITIC = ("SubBackward0", "AddBackward0", "NegBackward0", "MeanBackward0")


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (ACTOR_CRITIC, True),
        (("AddBackward0", "NegBackward0", "MeanBackward0"), True),
        (("AddBackward0", "SubBackward0", "MeanBackward0", "MaximumBackward0"), True),  # an entropy taken off within
        (("NegBackward0", "MeanBackward0", "LogSoftmaxBackward0"), False),  # a likelihood
        (("AddBackward0", "MseLossBackward0"), False),
        (("MeanBackward0", "PowBackward0", "SubBackward0"), False),
        ((), False),
    ],
)
def test_a_term_that_is_to_grow_is_seen_in_the_graph(ops, expected):
    history = run(falling_losses(20), loss_ops=ops)
    assert rewarded(history) is expected


VALUES = ("SmoothL1LossBackward0", "SelectBackward0", "GatherBackward0", "AddmmBackward0")


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (VALUES, True),
        (("MseLossBackward0", "GatherBackward0", "AddmmBackward0"), True),
        (("NegBackward0", "MeanBackward0", "GatherBackward0", "LogSoftmaxBackward0"), False),  # a likelihood
        (("MseLossBackward0", "AddmmBackward0", "ReluBackward0", "AddmmBackward0", "GatherBackward0"), False),
        (("MseLossBackward0", "SelectBackward0", "AddmmBackward0"), False),  # one output of several
    ],
)
def test_an_error_of_chosen_outputs_has_targets_that_grow(ops, expected):
    assert may_rise(run(falling_losses(20), loss_ops=ops)) is expected


@pytest.mark.parametrize(
    ("losses", "ops", "is_known"),
    [
        (flat_losses(100, level=2.4), ("NllLossBackward0", "LogSoftmaxBackward0"), True),
        (flat_losses(100, level=20.0), ("NllLossBackward0", "LogSoftmaxBackward0"), True),  # begins far off
        (flat_losses(100, level=74.0), ("NllLossBackward0", "LogSoftmaxBackward0"), False),  # a sum over 32
        (flat_losses(100, level=60.0), ("AddBackward0", "MulBackward0", "NllLossBackward0"), False),
    ],
)
def test_chance_is_that_of_a_mean_over_samples(losses, ops, is_known):
    sample = batch(output_width=10, num_samples=32)
    history = batches_run(losses, sample, loss_kind="cross-entropy", loss_ops=ops)
    assert (signals_of(history).chance > 0.0) is is_known


def sized(kind="Adam", lr=1e-3, std=0.1, losses=None, norms=None, num_steps=60, **values):
    """A run of one weight matrix `w` of four elements, with the settings of its optimizer."""
    losses = flat_losses(num_steps) if losses is None else losses
    notes = {"optimizer_settings": settings(kind, lr=lr, **values), "initialization": {"w": (std, 0.1)}}
    return run(losses, norms, lrs=[lr] * num_steps, **notes)


class TestSizeOfSteps:
    @pytest.mark.parametrize(
        ("history", "expected"),
        [
            (sized("Adam", 1e-3), 1e-2),
            (sized("Lion", 1e-4), 1e-3),
            (sized("Adagrad", 1e-2, num_steps=100), 1e-2),  # a tenth of the first step
            (sized("SGD", 0.1, norms=[2.0] * 60), 1.0),  # elements of 1
            (sized("SGD", 0.1, norms=[2.0] * 60, momentum=0.9), 10.0),
            (sized("Adadelta"), None),
            (sized("Adam", std=1e-4), None),  # begun so small that any step is large
            (TrainingHistory(), None),
        ],
    )
    def test_estimate(self, history, expected):
        assert estimated_update_ratio(history) == (expected and pytest.approx(expected, rel=1e-6))

    def test_two_optimizers_are_not_judged(self):
        history = run(flat_losses(60), initialization={"w": (0.1, 0.1)})
        history.note_model(optimizer_settings=[*settings("Adam"), *settings("SGD")])
        assert estimated_update_ratio(history) is None


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


class TestInputs:
    def test_nan_in_validation_counts_too(self):
        history = batches_run(falling_losses(60), batch(), passed(input_num_nonfinite=2))
        assert RULES["batch-not-finite"](history).summary == "6 sampled batches contained NaN or Inf in the inputs."


MINUS = ["NegBackward0", "NllLossBackward0", "LogSoftmaxBackward0"]


def regression(losses, *, first, mean, std, **notes):
    """A squared error of targets that are known."""
    known = {"target_mean": mean, "target_std": std, "target_range": [mean - 3 * std, mean + 3 * std]}
    return batches_run(
        [first, *losses], batch(output_width=1), loss_kind="squared error", squared_losses=[first], **known, **notes
    )


class TestProgress:
    def test_a_cross_entropy_that_comes_down_to_chance_has_learnt_nothing(self):
        losses = [30.0 * 0.8**step + math.log(4) for step in range(150)]
        history = batches_run(losses, batch(output_width=4), loss_kind="cross-entropy")
        s = signals_of(history)
        assert s.fall > 0.8 and abs(s.progress) < 0.03

    def test_nor_has_a_squared_error_that_comes_down_to_the_spread_of_its_targets(self):
        history = regression([25.0 * 0.8**s + 1.0 for s in range(150)], first=26.0, mean=5.0, std=1.0)
        s = signals_of(history)
        assert s.chance == pytest.approx(1.0) and s.fall > 0.8 and abs(s.progress) < 0.03

    def test_weights_that_began_alike_are_told_where_only_the_mean_was_learnt(self):
        flat = {"initialization": {"a": (0.0, 0.2), "b": (0.0, 0.2)}}
        history = regression([25.0 * 0.8**s + 1.0 for s in range(150)], first=26.0, mean=5.0, std=1.0, **flat)
        assert severity("poor-initialisation", history) == "warning"
        learns = regression([25.0 * 0.8**s + 0.1 for s in range(150)], first=26.0, mean=5.0, std=1.0, **flat)
        assert severity("poor-initialisation", learns) is None

    def test_torchs_own_operation_outweighs_what_the_gradient_looks_like(self):
        notes = {"loss_kind": "binary cross-entropy with logits", "squared_losses": [1e6]}
        assert is_squared_error(run([1e6, *flat_losses(40)], loss_ops=["MseLossBackward0"], **notes))
        assert not is_squared_error(run([1e6, *flat_losses(40)], **notes))
        assert not is_squared_error(run([2.3, *flat_losses(40)], loss_ops=["MseLossBackward0"], **notes))


class TestFloors:
    def test_nothing_is_ahead_of_an_explosion_that_has_come(self):
        rising = [*falling_losses(200, noise=0.02), *[0.3 * 1.06**s for s in range(80)]]
        norms = [n * 1.05 ** max(0, s - 200) for s, n in enumerate(noisy_norms(280))]
        assert severity("divergence-ahead", run(rising[:230], norms[:230])) == "warning"
        assert severity("loss-explosion", run(rising, norms)) == "critical"
        assert severity("divergence-ahead", run(rising, norms)) is None


JUMPED = [*noisy_norms(150), *noisy_norms(60, level=8.0)]
SPIKED = [norm * (50.0 if step == 200 else 1.0) for step, norm in enumerate(noisy_norms(300))]


def unbalanced(losses):
    return layered(240, lambda step, place: 1e-3 * 1.05**step if place == 3 else 1.0, losses)


def shifted(losses, by):
    return [loss - by for loss in losses]


def test_losses_of_two_in_turns_need_not_fall():
    rng = random.Random(1)
    turns = [(1.38 if s % 2 else 0.68) + rng.gauss(0.0, 0.01) for s in range(200)]
    assert takes_turns(run(turns)) and descent(run(turns)) is False
    assert severity("loss-not-decreasing", run(turns)) is None
    assert descent(run(turns, objective="minimise")) is True
    assert not takes_turns(run(falling_losses(200))) and not takes_turns(run(turns[:9]))
    assert not takes_turns(run([1.0 + 0.3 * (-1) ** s * s for s in range(20)]))  # steps that overshoot ever further


def test_a_remark_alone_makes_no_cause():
    history = weights_run(lambda step, name: 0.6)
    assert find_causes([RULES["update-ratio-high"](history)], history) == []


@pytest.mark.parametrize(("place", "expected"), [(0, True), (3, False)])
def test_zeros_beside_the_way_are_no_sign_of_dead_units(place, expected):
    names = ("a.weight", *(f"experts.{i}.weight" for i in range(7)))
    history = layered(150, lambda s, p: 0.0 if s > 5 and p == place else 1.0, flat_losses(150), names=names)
    finding = RULES["zero-gradient-tensors"](history)
    assert finding.evidence["from_the_first"] == expected
    causes = [cause.rule for cause in find_causes([finding], history)]
    assert ("dead-units" in causes) == expected
