"""Findings that are remarks where nothing is harmed: noise, rewards, turns, scales."""

from __future__ import annotations

import random

import pytest

from fastguard.diagnosis.needs import may_rise, rewarded
from fastguard.diagnosis.signals import signals_of

from made_runs import batch, batches_run, falling_losses, flat_losses, run, severity

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


@pytest.mark.parametrize(("ops", "expected"), [((), "warning"), (ACTOR_CRITIC, "info")])
def test_a_loss_with_a_reward_in_it_may_rise(ops, expected):
    history = run([1.0, 1.0, 1.0, *[4.0] * 120], loss_ops=ops)
    assert severity("no-warm-up", history) == expected


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


@pytest.mark.parametrize(("ops", "is_told"), [((), True), (ACTOR_CRITIC, False), (VALUES, False)])
def test_a_loss_that_rises_with_what_is_learnt_has_not_diverged(ops, is_told):
    losses = [*falling_losses(100, noise=0.01, pace=15.0), *(0.3 + 0.02 * step for step in range(90))]
    norms = [1.0] * 100 + [1.0 + 0.1 * step for step in range(90)]
    told = {name: severity(name, run(losses, norms, loss_ops=ops)) for name in ("loss-divergence", "divergence-ahead")}
    assert [one is not None for one in told.values()] == [is_told, is_told]
    flat = run(flat_losses(200), loss_ops=ops)
    assert severity("loss-not-decreasing", flat) == ("warning" if is_told else None if ops == VALUES else "info")
    assert severity("underfitting", flat) == ("warning" if is_told else None)


@pytest.mark.parametrize(("ops", "expected"), [((), "critical"), (VALUES, None), (ACTOR_CRITIC, "info")])
def test_a_loss_many_times_its_first_is_critical_unless_it_has_a_reward_in_it(ops, expected):
    assert severity("loss-explosion", run([*flat_losses(60), *flat_losses(60, level=9.0)], loss_ops=ops)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_noise_around_one_level_is_no_rise(seed):
    dice = random.Random(seed)
    assert severity("no-warm-up", run([abs(dice.gauss(0.0, 1.0)) for _ in range(80)])) is None


def test_a_run_too_short_to_warm_up_is_not_blamed_for_it():
    short, whole = (run([0.2, 0.8, 1.1, *[1.5] * more]) for more in (17, 57))
    short.has_ended = whole.has_ended = True
    assert [severity("no-warm-up", one) for one in (short, whole)] == ["info", "warning"]


def test_what_is_far_below_chance_has_not_risen():
    losses = [0.01, 0.01, 0.01, *[0.05] * 120]
    ops = ("NllLossBackward0", "LogSoftmaxBackward0")
    known = batches_run(losses, batch(output_width=10), loss_ops=ops)
    assert signals_of(known).chance > 2.3
    assert (severity("no-warm-up", known), severity("no-warm-up", run(losses))) == ("info", "warning")


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
