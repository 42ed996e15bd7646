"""What rules have in common: the fall of a loss, sizes of steps, progress, and what the loss's graph tells."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis.needs import is_squared_error
from fastguard.diagnosis.rules.lr import estimated_update_ratio
from fastguard.diagnosis.rules.output import loss_and_activation
from fastguard.diagnosis.signals import fall_of, signals_of
from fastguard.records import TrainingHistory

from made_runs import batch, batches_run, flat_losses, run, settings


def test_the_fall_of_too_few_values_is_not_sure():
    assert [fall_of(values) for values in ([], [1.0], [2.0, 1.0])] == [(0.0, math.inf)] * 3
    assert fall_of([3.0, 2.0, 1.0]) == pytest.approx((2.0, 0.0))


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
            (("AddBackward0", *CROSS_ENTROPY, LINEAR), ("cross-entropy", "none")),  # and a penalty, say
            ((), ("", "")),
        ],
    )
    def test_names_of_losses(self, ops, expected):
        assert loss_and_activation(ops) == expected


class TestProgress:
    def test_a_cross_entropy_that_comes_down_to_chance_has_learnt_nothing(self):
        losses = [30.0 * 0.8**step + math.log(4) for step in range(150)]
        history = batches_run(losses, batch(output_width=4), loss_kind="cross-entropy")
        s = signals_of(history)
        assert s.fall > 0.8 and abs(s.progress) < 0.03

    def test_torchs_own_operation_outweighs_what_the_gradient_looks_like(self):
        notes = {"loss_kind": "binary cross-entropy with logits", "squared_losses": [1e6]}
        assert is_squared_error(run([1e6, *flat_losses(40)], loss_ops=["MseLossBackward0"], **notes))
        assert not is_squared_error(run([1e6, *flat_losses(40)], **notes))
        assert not is_squared_error(run([2.3, *flat_losses(40)], loss_ops=["MseLossBackward0"], **notes))
