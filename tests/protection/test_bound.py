"""What a threshold chosen with hindsight holds, on norms worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.protection import bound
from benchmarks.protection.norms import BURST, LATE

LENGTH = 2 * LATE


def test_where_norms_never_change_all_is_held_and_nothing_acted_on():
    assert bound.options_of([1.0] * LENGTH, 17) == [(0, 0.0, 0.0)]


def test_a_healthy_step_at_four_times_the_median_is_paid_for_or_lets_smaller_ones_through():
    norms = [1.0] * LENGTH
    norms[150] = 4.0
    first, second = bound.options_of(norms, 17)
    assert first == (1, 0.0, 0.0)
    num_steps = LENGTH - BURST - LATE
    # A threshold of 4 lets a spike of 3 through at every other step, and, being no lower, one of 1 x 4 at none.
    assert second.num_acted == 0 and second.spikes == pytest.approx((num_steps - 1) / num_steps / 4)
    assert second.bursts == pytest.approx((num_steps - 1) / num_steps / 3)  # a first step of 3; at 150 of 12


def test_steps_are_spent_where_most_is_held_for_them():
    cheap, dear = [(1, 0.0, 0.0), (0, 0.5, 0.5)], [(1, 0.0, 0.0), (0, 0.1, 0.1)]
    trainings = [[bound.Option(*one) for one in some] for some in (cheap, dear)]
    assert bound.best(trainings, 1000, 0.001) == pytest.approx((0.001, 0.95, 0.95))
    assert bound.best(trainings, 1000, 0.002) == pytest.approx((0.002, 1.0, 1.0))
