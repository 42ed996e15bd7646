"""What a cause cannot be beside: facts that speak against the usual suspect, and what is named then."""

from __future__ import annotations

import math

import pytest

from fastguard.diagnosis import RULES, diagnose, find_causes

from faulty_runs import BAD
from made_runs import bend, falling_losses, flat_losses, layered, noisy_norms, run, settings

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def severity(name, history):
    finding = RULES[name](history)
    return finding and finding.severity


def first_cause(history):
    history.has_ended = True
    told = find_causes(diagnose(history), history)
    return told[0].rule if told else None


def zeros_at(*names, losses=None):
    """A run in which these parameters get nothing but zeros from the first step on."""
    losses = flat_losses(150) if losses is None else losses
    return layered(150, lambda step, place: 0.0 if NAMES[place] in names else 1.0, losses, names=NAMES)


class TestZeroGradients:
    def test_units_whose_biases_have_a_gradient_are_not_dead(self):
        assert first_cause(zeros_at("0.weight", "2.weight")) == "parameters-cut-off"

    @pytest.mark.parametrize("names", [("0.weight", "0.bias", "2.weight"), ("0.weight", "0.bias")])
    def test_those_whose_biases_have_none_are(self, names):
        assert first_cause(zeros_at(*names)) == "dead-units"


class TestFrozen:
    @pytest.mark.parametrize(("held", "expected"), [(64, "info"), (96, "warning")])
    def test_what_the_optimizer_was_not_given_is_frozen_on_purpose(self, held, expected):
        history = layered(60, lambda step, place: 1.0, falling_losses(60), names=("b.weight",) * 4)
        names = [*NAMES[:2], "b.weight", "c.weight"]
        numbers = {"names": names, "names_without_gradient": NAMES[:2]}
        history.note_model(**numbers, optimizer_settings=[{"kind": "Adam", "lr": 1e-3, "num_parameters": held}])
        assert severity("frozen-parameters", history) == expected

    def test_what_has_a_gradient_now_is_frozen_no_longer(self):
        history = layered(60, lambda step, place: 1.0, falling_losses(60), names=NAMES)
        history.note_model(names=NAMES, names_without_gradient=NAMES[:2])
        assert severity("frozen-parameters", history) is None

    @pytest.mark.parametrize(("num_frozen", "is_named"), [(1, False), (8, True)])
    def test_one_parameter_of_many_does_not_hold_back_a_model(self, num_frozen, is_named):
        names = [f"{i}.weight" for i in range(20)]
        history = run(flat_losses(150), names=names, names_without_gradient=names[4 : 4 + num_frozen])
        assert (first_cause(history) == "frozen-parameters") == is_named


class TestOthers:
    @pytest.mark.parametrize(
        ("num_overwritten", "expected"), [(9, "weights-overwritten"), (2, "learning-rate-too-high")]
    )
    def test_a_rate_is_not_to_blame_for_what_others_write(self, num_overwritten, expected):
        losses = [2.3 * 1.05**step for step in range(150)]
        notes = {"names": NAMES, "overwritten": NAMES, "num_overwritten": num_overwritten, "num_compared": 10}
        assert first_cause(run(losses, [1.05**step for step in range(150)], **notes)) == expected

    @pytest.mark.parametrize(("is_smooth", "expected"), [(False, "singular-operation"), (None, "unknown")])
    def test_a_loss_that_is_nan_without_its_gradients_is_no_bad_batch(self, is_smooth, expected):
        losses = bend(falling_losses(100), [20, 21, 22, 50, 70], lambda loss: math.nan)
        assert first_cause(run(losses, is_smooth=is_smooth)) == expected

    def test_steps_that_are_too_large_beside_inputs_far_off_are_of_the_inputs(self):
        lrs = {"lrs": [0.1] * 100, "optimizer_settings": settings(lr=0.1), "initialization": {"a": (0.1, 0.1)}}
        assert first_cause(run(flat_losses(100), **lrs)) == "learning-rate-too-high"
        findings = [RULES["steps-too-large"](run(flat_losses(100), **lrs)), RULES["input-scale"](BAD["input-scale"])]
        assert find_causes(findings, BAD["input-scale"])[0].rule == "unnormalised-inputs"


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

    def test_one_that_stays_up_is(self):
        assert severity("loss-divergence", run([*self.AGAIN[:100], *flat_losses(40, level=4.0)])) == "critical"
