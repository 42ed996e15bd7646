"""The statistics of an experiment, against values computed by hand."""

from __future__ import annotations

import math

import pytest

from fastguard.experiments import compare, noise_between

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("base", "arm", "verdict"),
    [
        ([1.0] * 40, [1.0] * 40, "no difference"),
        ([100.0] * 40, [99.0, 98.9] * 20, "no difference"),  # sure, but one percent
        ([1.0, 2.0] * 20, [2.0, 1.0] * 20, "no difference"),  # large, but not sure
        ([1.0] * 7, [0.5] * 7, "not known"),
        ([], [], "not known"),
        ([1.0] * 40, [0.5] * 40, "helps"),  # a constant difference has no deviation
        ([1.0] * 40, [1.0] * 20 + [NAN] * 20, "harms"),
        ([1.0] * 5 + [INF], [1.0] * 40, "helps"),
        ([1.0] * 20 + [NAN], [1.0] * 20 + [NAN], "no difference"),  # both diverge at the same step
        ([NAN], [NAN], "not known"),
        ([1.0] * 40, [1.0] * 30, "no difference"),  # an arm that ended early has not diverged
    ],
)
def test_verdicts(base, arm, verdict):
    assert compare(base, arm).verdict == verdict


def test_a_difference_counts_from_twice_that_between_seeds_on():
    base, arm = [1.0, 1.1] * 20, [0.99, 1.08] * 20
    assert compare(base, arm).verdict == "no difference"  # 1.5 %
    assert compare(base, arm, noise=0.005).verdict == "helps" and compare(base, arm, noise=0.01).verdict != "helps"
    assert compare(base, arm, noise=0.005).error > 0.005
    other = [x + 0.2 * (-1) ** (i // 5) for i, x in enumerate(base)]  # no difference on the whole
    assert noise_between(base, other) == pytest.approx(0.2) and noise_between([], []) == 0.0


def test_a_small_harm_of_the_null_arm_is_one_too():
    base, arm = [100.0] * 400, [100.0 + 0.5 * (i % 5 - 1) for i in range(400)]  # t = -12.2, half a percent
    assert compare(base, arm).verdict == "no difference" and compare(base, arm, is_null=True).verdict == "harms"
    weak = [100.0 + 0.5 * (i % 5 - 1.5) for i in range(400)]  # t = -6.1, of 0.4 sqrt(300) = 6.9
    assert compare(base, weak, is_null=True).verdict == "no difference"


def test_text_says_effect_steps_and_t():
    text = compare([2.0, 2.1] * 20, [1.5, 1.7] * 20).text("the learning rate times 10")
    assert text == "Tried: with the learning rate times 10 the loss is 0.45 lower after 40 steps (t = 48.5)."
    assert compare([1.0, 1.1] * 20, [1.1, 1.0] * 20).text("x").endswith("(t = 0.0), no clear difference.")
    assert (
        compare([1.0] * 5 + [INF], [1.0] * 40).text("x").endswith("stays finite; without, it does not after 5 steps.")
    )
    assert compare([1.0] * 40, [1.0, NAN]).text("x") == "Tried: with x the loss becomes NaN or Inf after 1 steps."
    assert "only 3 steps" in compare([1.0] * 3, [1.0] * 3).text("x")
