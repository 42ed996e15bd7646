"""Where rules wait for harm: what is odd and costs nothing is a remark, and a warning where the loss shows it."""

from __future__ import annotations

import math
import random

import pytest

from fastguard.diagnosis import RULES, find_causes
from fastguard.diagnosis.needs import descent, takes_turns
from fastguard.diagnosis.signals import noise, slow_noise

from made_runs import (
    batch,
    batches_run,
    bend,
    ended,
    falling_losses,
    flat_losses,
    layered,
    noisy_norms,
    run,
    settings,
    severity,
    weights_run,
)

JUMPED = [*noisy_norms(150), *noisy_norms(60, level=8.0)]
SPIKED = [norm * (50.0 if step == 200 else 1.0) for step, norm in enumerate(noisy_norms(300))]


def unbalanced(losses):
    return layered(240, lambda step, place: 1e-3 * 1.05**step if place == 3 else 1.0, losses)


def shifted(losses, by):
    return [loss - by for loss in losses]


@pytest.mark.parametrize(
    ("name", "make", "num_steps"),
    [
        ("norm-spike", lambda losses: run(losses, SPIKED), 300),
    ],
)
def test_odd_norms_are_a_remark_while_the_loss_keeps_what_it_gained(name, make, num_steps):
    assert severity(name, make(falling_losses(num_steps, pace=20.0))) == "info"
    assert severity(name, make(flat_losses(num_steps, noise=0.0))) == "info"  # nothing gained, and nothing lost
    lost = [*falling_losses(num_steps - 60, pace=20.0), *flat_losses(60, level=2.0)]
    assert severity(name, make(lost)) == "warning"
    assert severity(name, make([None] * num_steps)) == "warning"  # nothing says that it does no harm


def test_odd_norms_of_a_game_are_a_remark_whatever_its_loss_does():
    lost = shifted([*falling_losses(240), *flat_losses(60, level=2.0)], 1.0)
    assert severity("norm-spike", run(lost, SPIKED)) == "info"


def test_a_spike_that_the_loss_felt_is_a_warning():
    assert severity("norm-spike", run(bend(falling_losses(300), [200], lambda v: 9.0), SPIKED)) == "warning"


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.3, 2.4, 2.3, *[4.0] * 116], "info"),  # may come down yet
        ([2.3, 2.4, 2.3, *[4.0] * 117], "warning"),
        ([2.3, 2.4, 0.9, *[2.5] * 117], None),  # one easy batch, not the weights that a run begins with
        ([2.3, 2.4, 2.3, *[4.0] * 20, *falling_losses(80)], "info"),  # came down again
        ([0.7, 0.8, 0.9, *[1.1 + 0.5 * (-1) ** s for s in range(80)]], None),  # single samples differ by as much
    ],
)
def test_a_beginning_that_rises(losses, expected):
    assert severity("no-warm-up", run(losses)) == expected


def test_a_loss_that_was_gone_within_its_first_ten_has_not_exploded():
    assert severity("loss-explosion", run([0.4, 0.3, 0.3, 0.1, 0.1, *[0.0] * 60])) is None
    assert severity("loss-explosion", run([*[2.3] * 12, *[40.0] * 10])) == "critical"


def test_losses_that_follow_one_another_alike_have_the_noise_of_their_batches():
    rng = random.Random(3)
    levels = [rng.gauss(0.0, 1.0) for _ in range(16)]
    losses = [level + rng.gauss(0.0, 0.01) for level in levels for _ in range(4)]  # four steps on each batch
    assert noise(losses) < 0.1 < 0.5 < slow_noise(losses)
    assert slow_noise([-0.1 * step for step in range(64)]) == pytest.approx(0.0, abs=1e-9)
    assert math.isnan(slow_noise([1.0] * 7)) and slow_noise([1.0, 2.0] * 4) > 0.0


def test_a_margin_that_is_met_is_no_secret():
    gone = [2.3 if s < 7 else 1e-5 for s in range(100)]
    for op, expected in (("MultiMarginLossBackward0", "info"), ("NllLossBackward0", "warning")):
        assert severity("loss-gone", run(gone, loss_ops=[op, "AddmmBackward0"])) == expected


def test_losses_of_two_in_turns_need_not_fall():
    rng = random.Random(1)
    turns = [(1.38 if s % 2 else 0.68) + rng.gauss(0.0, 0.01) for s in range(200)]
    assert takes_turns(run(turns)) and descent(run(turns)) is False
    assert severity("loss-not-decreasing", run(turns)) is None
    assert descent(run(turns, objective="minimise")) is True
    assert not takes_turns(run(falling_losses(200))) and not takes_turns(run(turns[:9]))
    assert not takes_turns(run([1.0 + 0.3 * (-1) ** s * s for s in range(20)]))  # steps that overshoot ever further


class TestWeights:
    def test_what_nobody_uses_is_a_remark(self):
        names = ["v", "w", "x"]  # v and w have gradients
        assert severity("missing-gradients", run(falling_losses(100), names=[*names, "y"])) == "info"

    def test_a_way_that_is_cut_off_is_a_warning(self):
        notes = {"names": ["a", "w"], "initialization": {"a": (0.1, 0.1)}}  # w has a gradient
        assert severity("missing-gradients", run(falling_losses(100), **notes)) == "warning"

    def test_what_has_no_gradient_is_a_warning_where_nothing_is_learnt(self):
        assert severity("missing-gradients", run(flat_losses(39), names=["w", "b"])) in (None, "info")
        assert severity("missing-gradients", run(flat_losses(80), names=["w", "b"])) == "warning"

    def test_large_updates_of_a_run_that_learns_are_a_remark(self):
        assert severity("update-ratio-high", weights_run(lambda step, name: 0.6)) == "info"
        assert (
            severity("update-ratio-high", weights_run(lambda step, name: 0.6, flat_losses(60), num_steps=60)) == "info"
        )
        assert severity("update-ratio-high", weights_run(lambda step, name: 0.6, flat_losses(140))) == "warning"
        short = weights_run(lambda step, name: 0.6, flat_losses(60), num_steps=60)
        assert severity("update-ratio-high", ended(short)) == "warning"
        restless = falling_losses(140, noise=0.8)
        assert severity("update-ratio-high", weights_run(lambda step, name: 0.6, restless)) == "warning"


class TestZeros:
    NAMES = ("router.weight", *(f"experts.{i}.weight" for i in range(7)))

    def zeros(self, places, losses):
        return layered(len(losses), lambda s, p: 0.0 if s > 5 and p in places else 1.0, losses, names=self.NAMES)

    @pytest.mark.parametrize(
        ("places", "losses", "expected"),
        [
            ((3, 4), falling_losses(150), "info"),  # experts that are not chosen, and it learns
            ((3, 4), falling_losses(90), "info"),  # too early to say
            ((3, 4), flat_losses(150), "warning"),
            ((0, 1), falling_losses(150), "warning"),  # from the first layer on
        ],
    )
    def test_what_is_beside_the_way(self, places, losses, expected):
        assert severity("zero-gradient-tensors", self.zeros(places, losses)) == expected

    def test_many_zeros_in_a_run_that_learns(self):
        assert severity("zero-gradients", self.zeros((2, 3, 4, 5, 6), falling_losses(150))) == "info"
        assert severity("zero-gradients", self.zeros((2, 3, 4, 5, 6), flat_losses(150))) == "warning"


class TestRates:
    @pytest.mark.parametrize(("kind", "expected"), [("Adam", "warning"), ("AdamW", None), ("SignDescent", None)])
    def test_decay_of_a_kind_that_is_not_known_is_taken_for_decoupled(self, kind, expected):
        given = settings(kind, lr=1e-3, weight_decay=0.5)
        assert severity("large-weight-decay", run(flat_losses(120), optimizer_settings=given)) == expected


def test_small_batches_whose_loss_still_falls_are_a_remark():
    rng = random.Random(2)
    falling = [level * rng.lognormvariate(0.0, 1.0) for level in falling_losses(240, pace=400.0, noise=0.0)]
    falling = [1.2 * loss if step < 140 else 0.6 * loss for step, loss in enumerate(falling)]
    assert severity("tiny-batches", batches_run(falling, batch(num_samples=1))) == "info"


def test_spikes_that_keep_a_calendar_below_where_the_run_began_are_a_remark():
    low = bend(falling_losses(300, pace=15.0), range(60, 300, 44), lambda v: v + 1.0)
    assert severity("periodic-loss-spikes", run(low)) == "info"
    assert severity("periodic-loss-spikes", run(low, steps_per_epoch=44)) == "warning"


def test_a_remark_alone_makes_no_cause():
    history = weights_run(lambda step, name: 0.6)
    assert find_causes([RULES["update-ratio-high"](history)], history) == []


def test_a_squared_error_has_no_classes():
    notes = {"num_targets": 200, "num_target_classes": 1, "target_top_share": 1.0}
    assert severity("one-target", run(falling_losses(60), **notes)) == "warning"
    for op in ("HuberLossBackward0", "MseLossBackward0"):
        assert severity("one-target", run(falling_losses(60), loss_ops=[op, "AddmmBackward0"], **notes)) is None


@pytest.mark.parametrize(("place", "expected"), [(0, True), (3, False)])
def test_zeros_beside_the_way_are_no_sign_of_dead_units(place, expected):
    names = ("a.weight", *(f"experts.{i}.weight" for i in range(7)))
    history = layered(150, lambda s, p: 0.0 if s > 5 and p == place else 1.0, flat_losses(150), names=names)
    finding = RULES["zero-gradient-tensors"](history)
    assert finding.evidence["from_the_first"] == expected
    causes = [cause.rule for cause in find_causes([finding], history)]
    assert ("dead-units" in causes) == expected
