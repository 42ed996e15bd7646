"""`Spikes` and the other policies of the whole model on sequences of norms, as a run would give them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from fastguard import Percentile, SkipSpikes, Spikes, ZClip
from fastguard.clip.window import SortedWindow


def act(policy: Any, norms: Iterable[float]) -> list[float]:
    """The norm that each update has: what the policy lets through; 0.0 of a skipped step."""
    left = []
    for norm in norms:
        trigger, target = policy.limits()
        left.append(target if norm > trigger else norm)
        policy.observe(norm)
    return left


def lognormal(seed: int, count: int, sigma: float = 0.1) -> list[float]:
    generator = random.Random(seed)
    return [math.exp(generator.gauss(0.0, sigma)) for _ in range(count)]


def num_changed(norms: list[float], left: list[float]) -> int:
    return sum(a != b for a, b in zip(norms, left, strict=True))


class TestSpikes:
    @pytest.mark.parametrize("sigma", [0.1, 0.3])
    def test_healthy_norms_are_left_alone(self, sigma: float) -> None:
        norms = [x for seed in range(4) for x in lognormal(seed, 1000, sigma)]
        assert num_changed(norms, act(Spikes(), norms)) <= 4

    @pytest.mark.parametrize("factor", [3, 6, 20, 1e6, 1e200])
    def test_a_spike_is_brought_back_to_the_median(self, factor: float) -> None:
        for seed in range(5):
            norms = lognormal(seed, 300)
            norms[250] *= factor
            left = act(Spikes(), norms)
            assert left[250] == pytest.approx(statistics.median(norms[233:250]))
            assert num_changed(norms, left) == 1

    def test_a_burst_is_brought_back_as_a_whole(self) -> None:
        for seed in range(5):
            norms = lognormal(seed, 300)
            norms[200:208] = [10 * x for x in norms[200:208]]
            assert max(act(Spikes(), norms)[200:]) < 2.0

    def test_a_burst_of_threes_in_noise_is_held_too(self) -> None:
        """Alone, a norm of three times the median may be within the noise; after a spike it is one of a burst."""
        held = 0
        for seed in range(40):
            norms = lognormal(seed, 300, 0.25)
            norms[200:208] = [3 * x for x in norms[200:208]]
            held += max(act(Spikes(), norms)[200:208]) < 2.2
        assert held >= 20  # 4 with the one trigger

    def test_it_is_wary_across_a_resume_and_not_for_ever(self) -> None:
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
        with pytest.raises(ValueError, match="must have 2 numbers"):
            other.load_state_dict({**one.state_dict(), "wary": [1.0]})

    @pytest.mark.parametrize("factor", [3, 30])
    def test_another_level_is_let_through_after_a_while(self, factor: float) -> None:
        for seed in range(5):
            norms = lognormal(seed, 400)
            norms[200:] = [factor * x for x in norms[200:]]
            left = act(Spikes(), norms)
            damped = [i for i, (a, b) in enumerate(zip(norms, left, strict=True)) if b < 0.9 * a]
            assert 8 <= len(damped) <= 16 and damped[-1] < 216
            norms[350] *= 6  # and a spike on that level is one
            assert act(Spikes(), norms)[350] < 2 * factor

    def test_norms_that_fall_by_orders_of_magnitude_hide_no_spike(self) -> None:
        """The spread is that about the newest norms, not that of the fall."""
        generator = random.Random(2)
        norms = [math.exp(-step / 40 + generator.gauss(0.0, 0.1)) for step in range(400)]
        norms[300] *= 40
        left = act(Spikes(), norms)
        assert num_changed(norms, left) == 1 and left[300] < 2 * norms[290]

    def test_norms_that_rise_or_fall_slowly_are_no_spikes(self) -> None:
        generator = random.Random(1)
        noise = [math.exp(generator.gauss(0.0, 0.1)) for _ in range(800)]
        rising = [1.01**i * x for i, x in enumerate(noise)]
        falling = [(1 + 9 * math.exp(-i / 5)) * x for i, x in enumerate(noise)]
        warming_up = [min(1.0, 0.02 + i / 50) * x for i, x in enumerate(noise)]
        for norms in (rising, falling, warming_up):
            assert num_changed(norms, act(Spikes(), norms)) == 0

    def test_equal_norms_and_none(self) -> None:
        norms = [1.0] * 100 + [0.0] * 20 + [1.5] * 10 + [3.0] + [1.0] * 20
        left = act(Spikes(), norms)
        assert num_changed(norms, left) == 1 and left[130] == pytest.approx(1.5)
        assert act(Spikes(), [0.0, 0.0, 1.0]) == [0.0, 0.0, 1.0]
        assert act(Spikes(), [5e-324, 1e308, 5e-324])[0] == 5e-324

    def test_a_largest_norm_beside_it(self) -> None:
        norms = [*lognormal(0, 200), 50.0]
        left = act(Spikes(max_norm=1.1), norms)
        assert max(left) <= 1.1 and left[200] <= 1.1 and act(Spikes(max_norm=1e9), norms)[200] < 2.0
        assert Spikes(max_norm=2.0).limits() == (2.0, 2.0)


class TestPercentile:
    def test_it_is_that_of_numpy(self) -> None:
        norms, policy = lognormal(3, 100, 1.0), Percentile(70, 40)
        for i, norm in enumerate(norms):
            expected = np.quantile(norms[max(0, i - 40) : i], 0.7) if i >= 10 else math.inf
            assert policy.limits()[0] == pytest.approx(expected, rel=1e-12)
            policy.observe(norm)


class TestZClip:
    def test_against_its_definition(self) -> None:
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
    def test_against_its_definition(self) -> None:
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

    def test_a_loss_has_the_next_step_skipped(self) -> None:
        policy = SkipSpikes(min_steps=8)
        for step in range(20):
            policy.observe(1.0 + 0.01 * (step % 3), 2.0 + 0.01 * (step % 5))
        assert policy.limits()[0] > 1.0
        policy.observe(1.0, 90.0)
        assert policy.limits() == (0.0, 0.0)
        policy.observe(1.0, 2.0)
        assert policy.limits()[0] > 1.0


def test_the_window_is_what_lists_would_be() -> None:
    generator = random.Random(0)
    for size in (1, 2, 5, 32):
        window, newest = SortedWindow(size), []
        for _ in range(3 * size + 3):
            value = generator.choice([generator.gauss(0, 1), 0.0, 1.0])
            window.add(value)
            newest = [*newest, value][-size:]
            centre = window.quantile(0.5)
            assert window.state() == newest and window.ordered == sorted(newest)
            assert centre == pytest.approx(statistics.median(newest), abs=1e-15)
            deviations = sorted(abs(x - centre) for x in newest)
            assert window.median_deviation(centre) == pytest.approx(deviations[len(newest) // 2], abs=1e-12)
            share = generator.random()
            assert window.quantile(share) == pytest.approx(float(np.quantile(newest, share)), abs=1e-12)
