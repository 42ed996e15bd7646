"""Policies of the whole model on sequences of norms, and what limits do to norms, in C++ and in Python alike."""

import math
import random
import statistics
import struct
from array import array

import numpy as np
import pytest
import torch
from guard_helpers import needs_extension

from fastguard import Percentile, SkipSpikes, Spikes, ZClip
from fastguard.clip.limits import Limits, factor_of, row_norms
from fastguard.clip.policy import SortedWindow
from fastguard.kernels import cpu
from fastguard.records.slot import FLAGS, HAS_TRIGGER, SKIPPED, TRIGGER


def act(policy, norms):
    """The norm that each update has: what the policy lets through; 0.0 of a skipped step."""
    left = []
    for norm in norms:
        trigger, target = policy.limits()
        left.append(target if norm > trigger else norm)
        policy.observe(norm)
    return left


def lognormal(seed, count, sigma=0.1):
    generator = random.Random(seed)
    return [math.exp(generator.gauss(0.0, sigma)) for _ in range(count)]


def num_changed(norms, left):
    return sum(a != b for a, b in zip(norms, left, strict=True))


class TestSpikes:
    @pytest.mark.parametrize("sigma", [0.1, 0.3])
    def test_healthy_norms_are_left_alone(self, sigma):
        norms = [x for seed in range(4) for x in lognormal(seed, 1000, sigma)]
        assert num_changed(norms, act(Spikes(), norms)) <= 4

    @pytest.mark.parametrize("factor", [3, 6, 20, 1e6, 1e200])
    def test_a_spike_is_brought_back_to_the_median(self, factor):
        for seed in range(5):
            norms = lognormal(seed, 300)
            norms[250] *= factor
            left = act(Spikes(), norms)
            assert left[250] == pytest.approx(statistics.median(norms[233:250]))
            assert num_changed(norms, left) == 1

    def test_a_burst_is_brought_back_as_a_whole(self):
        for seed in range(5):
            norms = lognormal(seed, 300)
            norms[200:208] = [10 * x for x in norms[200:208]]
            assert max(act(Spikes(), norms)[200:]) < 2.0

    def test_it_is_wary_across_a_resume_and_not_for_ever(self):
        one, other = Spikes(), Spikes()
        act(one, lognormal(3, 200, 0.25))
        usual = one.limits()[0]
        act(one, [20.0])
        assert one.limits()[0] < 0.9 * usual
        other.load_state_dict(one.state_dict())
        assert one.limits() == other.limits()
        for policy in (one, other):
            act(policy, lognormal(4, 7, 0.25))
        assert one.limits() == other.limits() and one.limits()[0] > 0.9 * usual
        with pytest.raises(ValueError, match="must have 2 entries"):
            other.load_state_dict({**one.state_dict(), "wary": [1.0]})

    @pytest.mark.parametrize("factor", [3, 30])
    def test_another_level_is_let_through_after_a_while(self, factor):
        for seed in range(5):
            norms = lognormal(seed, 400)
            norms[200:] = [factor * x for x in norms[200:]]
            left = act(Spikes(), norms)
            damped = [i for i, (a, b) in enumerate(zip(norms, left, strict=True)) if b < 0.9 * a]
            assert 8 <= len(damped) <= 16 and damped[-1] < 216
            norms[350] *= 6  # and a spike on that level is one
            assert act(Spikes(), norms)[350] < 2 * factor

    def test_norms_that_rise_or_fall_slowly_are_no_spikes(self):
        generator = random.Random(1)
        noise = [math.exp(generator.gauss(0.0, 0.1)) for _ in range(800)]
        rising = [1.01**i * x for i, x in enumerate(noise)]
        falling = [(1 + 9 * math.exp(-i / 5)) * x for i, x in enumerate(noise)]
        warming_up = [min(1.0, 0.02 + i / 50) * x for i, x in enumerate(noise)]
        for norms in (rising, falling, warming_up):
            assert num_changed(norms, act(Spikes(), norms)) == 0

    def test_equal_norms_and_none(self):
        norms = [1.0] * 100 + [0.0] * 20 + [1.5] * 10 + [3.0] + [1.0] * 20
        left = act(Spikes(), norms)
        assert num_changed(norms, left) == 1 and left[130] == pytest.approx(1.5)
        assert act(Spikes(), [0.0, 0.0, 1.0]) == [0.0, 0.0, 1.0]
        assert act(Spikes(), [5e-324, 1e308, 5e-324])[0] == 5e-324

    def test_a_largest_norm_beside_it(self):
        norms = [*lognormal(0, 200), 50.0]
        left = act(Spikes(max_norm=1.1), norms)
        assert max(left) <= 1.1 and left[200] <= 1.1 and act(Spikes(max_norm=1e9), norms)[200] < 2.0
        assert Spikes(max_norm=2.0).limits() == (2.0, 2.0)


class TestPercentile:
    def test_it_is_that_of_numpy(self):
        norms, policy = lognormal(3, 100, 1.0), Percentile(70, 40)
        for i, norm in enumerate(norms):
            expected = np.quantile(norms[max(0, i - 40) : i], 0.7) if i >= 10 else math.inf
            assert policy.limits()[0] == pytest.approx(expected, rel=1e-12)
            policy.observe(norm)


class TestZClip:
    def test_against_its_definition(self):
        norms = lognormal(5, 200, 0.3)
        norms[100] = norms[150] = 9.0
        policy, mean, var = ZClip(), 0.0, 0.0
        for i, norm in enumerate(norms):
            trigger, target = policy.limits()
            if i >= 25:
                assert (trigger, target) == pytest.approx((mean + 2.5 * math.sqrt(var), mean))
                norm = min(norm, target) if norm > trigger else norm
                mean = 0.97 * mean + 0.03 * norm
                var = 0.97 * var + 0.03 * (norm - mean) ** 2
            policy.observe(norms[i])
            if i == 24:
                mean, var = statistics.fmean(norms[:25]), statistics.pvariance(norms[:25])


class TestSkipSpikes:
    def test_against_its_definition(self):
        norms = lognormal(7, 300)
        norms[200] = 4.0
        policy = SkipSpikes(loss=False)
        for i, norm in enumerate(norms):
            past = norms[max(0, i - 128) : i]
            trigger, target = policy.limits()
            if i < 64:
                assert trigger == math.inf
            else:
                assert trigger == pytest.approx(statistics.fmean(past) + 6 * statistics.stdev(past)) and target == 0.0
            policy.observe(norm)
        assert act(SkipSpikes(loss=False), norms)[200] == 0.0

    def test_a_loss_has_the_next_step_skipped(self):
        policy = SkipSpikes(min_steps=8)
        for step in range(20):
            policy.observe(1.0 + 0.01 * (step % 3), 2.0 + 0.01 * (step % 5))
        assert policy.limits()[0] > 1.0
        policy.observe(1.0, 90.0)
        assert policy.limits() == (0.0, 0.0)
        policy.observe(1.0, 2.0)
        assert policy.limits()[0] > 1.0


def test_the_window_is_what_lists_would_be():
    generator = random.Random(0)
    for size in (1, 2, 5, 32):
        window, newest = SortedWindow(size), []
        for _ in range(3 * size + 3):
            value = generator.choice([generator.gauss(0, 1), 0.0, 1.0])
            window.add(value)
            newest = [*newest, value][-size:]
            centre = window.quantile(0.5)
            assert [*window.values] == newest and window.ordered == sorted(newest)
            assert centre == pytest.approx(statistics.median(newest), abs=1e-15)
            deviations = sorted(abs(x - centre) for x in newest)
            assert window.median_deviation(centre) == pytest.approx(deviations[len(newest) // 2], abs=1e-12)
            share = generator.random()
            assert window.quantile(share) == pytest.approx(float(np.quantile(newest, share)), abs=1e-12)


def test_the_formula():
    assert factor_of(4.0, -1.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert factor_of(4.0, 2.0, 1.0) == 0.25 and factor_of(2.0, 2.0, 1.0) == 1.0
    assert factor_of(4.0, 2.0, 9.0) == 1.0 and factor_of(4.0, math.inf, math.inf) == 1.0


def _take(params, limits):
    headers, found = bytearray(128), [bytearray(), None, None, None, None, None]
    outcome = cpu.take_step([{"params": params}], headers, 0, found, 0, 1, limits, True, True)
    return outcome, headers, found


def _limits(generator, count, norms):
    total = math.hypot(*norms)
    kind = generator.randrange(4)
    if kind == 0:
        return Limits(generator.choice([math.inf, total, 0.5 * total]), generator.choice([0.0, 0.3 * total]))
    groups = None if kind == 1 else array("i", [generator.randrange(-1, 2) for _ in range(count)])
    size = count if groups is None else 2
    own = array("d", [-1.0]) * size
    if generator.random() < 0.2:
        return Limits(0.5 * total, 0.25 * total, groups, norms=own)
    triggers = array("d", [generator.choice([0.5, 2.0, math.inf, 0.0]) for _ in range(size)])
    targets = array("d", [generator.choice([0.25, 0.0]) if kind == 3 else 0.25 for _ in range(size)])
    return Limits(math.inf, math.inf, groups, triggers, targets, own)


@needs_extension
def test_both_ways_rule_alike():
    generator, num_over, num_dropped = random.Random(0), 0, 0
    for seed in range(300):
        torch.manual_seed(seed)
        count = generator.randrange(1, 8)
        params = [torch.nn.Parameter(torch.zeros(generator.randrange(1, 5))) for _ in range(count)]
        for p in params:
            p.grad = torch.randn(p.shape) * 10.0 ** generator.randrange(-1, 2)
        if count > 2:
            params[generator.randrange(count)].grad = None
        before = [None if p.grad is None else p.grad.clone() for p in params]
        rows = [float(cpu.CpuBackend().tensor_stats([g])[1][-1]) for g in before if g is not None]
        limits = _limits(generator, count, rows)
        own = limits.norms
        outcome, headers, found = _take(params, limits)
        written = None if own is None else list(own)
        words = struct.unpack("16d", headers)
        ruling = limits.apply(words[1], row_norms(found[0]), found[1])
        assert words[2] == ruling.coefficient
        assert written == (None if own is None else list(own))
        assert tuple(found[4] or ()) == ruling.over and bool(outcome & 64) is bool(ruling.over)
        assert bool(outcome & 32) is ruling.is_dropped is bool(int(words[FLAGS]) & SKIPPED)
        trigger = limits.trigger
        assert bool(int(words[FLAGS]) & HAS_TRIGGER) is (trigger < math.inf)
        assert words[TRIGGER] == (trigger if trigger < math.inf else 0.0)
        factors = ruling.factors or [ruling.coefficient] * len(rows)
        there = [(g, p.grad) for g, p in zip(before, params, strict=True) if g is not None]
        for (g, now), factor in zip(there, factors, strict=True):
            expected = g if factor == 1.0 else g * factor
            assert now is not None and torch.equal(now, expected)
        versions = [now._version for _, now in there]
        assert len(found[3] or []) == (sum(f != 1.0 for f in factors) if outcome & 8 else 0), versions
        num_over += bool(ruling.over)
        num_dropped += ruling.is_dropped
    assert num_over > 50 and num_dropped > 20


@needs_extension
def test_limits_of_other_parameters_are_not_applied():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    own = array("d", [0.0, 0.0])
    outcome, headers, _ = _take([p], Limits(math.inf, math.inf, None, own, own, own))
    assert outcome == 128 and bytes(headers) == bytes(128)


@needs_extension
@pytest.mark.parametrize(
    "limits",
    ["x", (1.0,), (1.0, "x"), (1.0, 1.0), Limits("x"), Limits(1.0, "x"), Limits(1.0, 1.0, norms=3),
     Limits(1.0, 1.0, array("i", [3]), norms=array("d", [0.0])),
     Limits(1.0, 1.0, triggers=array("d", [0.0]), norms=array("d", [0.0])),
     Limits(1.0, 1.0, norms=b"12345678"),
     Limits(1.0, 1.0, array("b", [0]), norms=array("d", [0.0]))],
    ids=repr,
)  # fmt: skip
def test_what_is_no_limits_is_refused(limits):
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    with pytest.raises((TypeError, ValueError, BufferError)):
        _take([p], limits)
    assert p.grad.item() == 1.0
