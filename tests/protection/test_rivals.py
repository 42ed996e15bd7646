"""Rules of others do what their definitions say, on norms worked out by hand."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
import torch

pytest.importorskip("benchmarks.protection", reason="the experiment is not beside these tests", exc_type=ImportError)

from benchmarks.protection import rivals


def after(rule, norms, loss=None):
    return [rule.factors([norm], loss)[0] * norm for norm in norms]


def noisy(count, seed=0, sigma=0.1):
    rng = random.Random(seed)
    return [math.exp(rng.gauss(0.0, sigma)) for _ in range(count)]


def test_the_base_lets_everything_through():
    assert rivals.Rule().factors([3.0, 1e30]) == [1.0, 1.0]


def test_fixed_norm_is_torchs():
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]
    found = rivals.FixedNorm(2.0).factors([float(g.norm()) for g in gradients])
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    for parameter, gradient, factor in zip(parameters, gradients, found):
        torch.testing.assert_close(parameter.grad, factor * gradient)


def test_zclip_lowers_a_spike_by_its_score_and_learns_what_is_left():
    first = noisy(25)
    rule = rivals.ZClip()
    assert after(rule, first) == first
    mean, std = statistics.fmean(first), statistics.pstdev(first)
    spike = mean + 10 * std
    assert after(rule, [spike]) == pytest.approx([mean + 2.5**2 / 10 * std], rel=1e-4)
    assert rule.mean == pytest.approx(0.97 * mean + 0.03 * (mean + 0.625 * std), rel=1e-4)


def test_zclip_never_leaves_a_level_that_it_has_learnt():
    rule = rivals.ZClip()
    after(rule, noisy(200))
    risen = [3.0 * norm for norm in noisy(1000, seed=1)]
    assert sum(a < 0.9 * b for a, b in zip(after(rule, risen), risen)) > 900


def test_autoclip_is_a_percentile_of_all_norms_with_this_one():
    norms = noisy(50)
    rule = rivals.AutoClip(30.0)
    for number, left in enumerate(after(rule, norms), 1):
        limit = float(np.percentile(norms[:number], 30.0))
        assert left == pytest.approx(min(limit, norms[number - 1]))


def test_adagc_begins_with_the_least_norm_of_its_warm_up_and_then_follows():
    rule = rivals.AdaGC(warm_up=3)
    for norms in ([0.3, 0.4], [3.0, 4.0], [0.6, 0.2]):
        rule.factors(norms)
    assert rule.averages == pytest.approx([0.3, 0.2])
    assert rule.factors([0.3, 2.0]) == pytest.approx([1.0, 1.05 * 0.2 / 2.0])
    assert rule.averages == pytest.approx([0.3, 0.98 * 0.2 + 0.02 * 0.21])


def test_adagc_freezes_a_tensor_that_had_one_gradient_of_zero_in_its_warm_up():
    rule = rivals.AdaGC(warm_up=2)
    rule.factors([1.0, 0.0])
    rule.factors([1.0, 1.0])
    assert rule.factors([0.5, 0.5])[1] == 0.0


def test_skip_step_is_blind_at_first_and_towards_the_end_of_a_burst():
    norms = noisy(128)
    assert after(rivals.SkipStep(), [*norms[:40], 50.0])[-1] == 50.0
    rule = rivals.SkipStep()
    after(rule, norms)
    left = after(rule, [10.0] * 8)
    assert left[0] == 0.0 and left[-1] == 10.0


def test_skip_step_looks_at_the_loss_too():
    rule = rivals.SkipStep()
    for number, norm in enumerate(noisy(100)):
        assert rule.factors([norm], loss=2.0 + 0.01 * (number % 7)) == [1.0]
    assert rule.factors([1.0], loss=9.0) == [0.0]
    assert rivals.SkipStep(max_norm=0.5).factors([1.0]) == pytest.approx([0.5], rel=1e-5)


def test_window_clip_is_three_deviations_of_unclipped_norms():
    norms = noisy(200)
    rule = rivals.WindowClip()
    assert after(rule, norms[:64]) == norms[:64]
    after(rule, norms[64:])
    last = norms[-128:]
    limit = statistics.fmean(last) + 3 * statistics.stdev(last)
    assert after(rule, [50.0]) == pytest.approx([limit])
    assert rule.norms[-1] == 50.0


def test_a_policy_is_asked_before_it_is_told():
    class TwiceTheLast:
        last = math.inf

        def limits(self):
            return 2.0 * self.last, self.last

        def observe(self, norm, loss=None):
            self.last, self.loss = norm, loss

    policy = TwiceTheLast()
    rule = rivals.Limits(policy)
    assert rule.factors([1.0], loss=5.0) == [1.0]
    assert rule.factors([8.0], loss=6.0) == [0.125]
    assert (policy.last, policy.loss) == (8.0, 5.0)


@pytest.mark.parametrize("name", [name for name in rivals.RULES if name != rivals.OURS])
def test_every_rule_gives_a_factor_for_each_tensor_and_never_lifts(name):
    rule = rivals.RULES[name]()
    for norm in [*noisy(150), 30.0, 0.0, 1.0]:
        found = rule.factors([norm, 0.5 * norm, 0.0], loss=1.0)
        assert len(found) == 3 and all(0.0 <= factor <= 1.0 for factor in found)
