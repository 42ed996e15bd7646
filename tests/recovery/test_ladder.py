"""When a run has gone wrong: no noise is enough, and every lasting rise is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from fastguard.recovery import Recovery
from fastguard.recovery.ladder import Ladder

NOISE: dict[str, Callable[[random.Random], float]] = {
    "even": lambda rng: rng.lognormvariate(0.0, 0.005),
    "usual": lambda rng: rng.lognormvariate(0.0, 0.1),
    "small batches": lambda rng: rng.lognormvariate(0.0, 0.7),
    "heavy tails": lambda rng: 1.0 + abs(0.1 * math.tan(math.pi * (rng.random() - 0.5))),
}


def _level(step: int) -> float:
    return 0.3 + 2.0 * math.exp(-step / 300)


def _see(ladder: Ladder, losses: list[float]) -> int | None:
    for i, loss in enumerate(losses):
        ladder.see(loss, 1.0, skipped=False)
        if ladder.reason():
            return i
    return None


@pytest.mark.parametrize("noise", NOISE)
def test_noise_is_no_reason_and_a_rise_is(noise: str) -> None:
    rng = random.Random(noise)
    ladder = Ladder(Recovery())
    assert _see(ladder, [_level(step) * NOISE[noise](rng) for step in range(2000)]) is None
    assert ladder.norm_limit == math.inf and ladder.is_healthy
    found = _see(ladder, [20.0 * _level(2000) * NOISE[noise](rng) for _ in range(20)])
    assert found is not None and found < 12


def test_a_loss_near_zero_may_be_restless() -> None:
    rng, ladder = random.Random(0), Ladder(Recovery())
    losses = [math.exp(-step / 60) + 1e-5 * rng.lognormvariate(0.0, 0.1) for step in range(1500)]
    for start in range(800, 1500, 100):  # as Adam's leaps where gradients have become small, which go by themselves
        losses[start : start + 20] = [0.02 * math.exp(-i / 5) for i in range(20)]
    assert _see(ladder, losses) is None
    found = _see(ladder, [0.2] * 20)
    assert found is not None and found < 12


def test_harder_data_are_sat_out_once() -> None:
    rng, ladder = random.Random(0), Ladder(Recovery())
    started, step = 0, 0
    while step < 3000:
        factor = 1.6 if step % 200 >= 100 else 1.0
        ladder.see(factor * rng.lognormvariate(0.0, 0.02), 1.0, skipped=ladder.is_waiting)
        if ladder.is_waiting:
            ladder.sit_out()
        elif ladder.reason():
            started += 1
            ladder.went_back(step, ladder.baseline())
        step += 1
    assert started == 1


def test_a_blow_is_what_nothing_announced() -> None:
    for before, is_so in (([1.0] * 40, True), ([1.0] * 38 + [1.2, 1.25], False)):
        ladder = Ladder(Recovery())
        assert _see(ladder, before) is None and not ladder.is_blow
        ladder.see(9.0, 1.0, skipped=False)
        assert ladder.num_high == 1 and ladder.is_blow is is_so
        ladder.see(9.0, 1.0, skipped=False)
        assert not ladder.is_blow


def test_what_is_not_finite_enters_nothing() -> None:
    ladder = Ladder(Recovery())
    _see(ladder, [1.0 + 0.01 * (i % 3) for i in range(100)])
    before = ladder.baseline()
    for _ in range(3):
        ladder.see(math.nan, math.nan, skipped=True)
        ladder.see(math.inf, 1.0, skipped=False)
    assert ladder.baseline() == before


def test_the_learning_rate_comes_back_in_a_straight_line() -> None:
    ladder = Ladder(Recovery(ramp=10))
    ladder.went_back(5, ladder.baseline())
    assert ladder.lr_factor(5) == 1.0
    assert ladder.went_back(20, ladder.baseline()) == 0.5
    assert [ladder.lr_factor(step) for step in (20, 22, 25, 30, 31)] == [0.5, 0.6, 0.75, 1.0, 1.0]
    ladder = Ladder(Recovery(window=100))  # and attempts of long ago are over
    for step in (10, 60):
        ladder.went_back(step, ladder.baseline())
    assert ladder.attempts_before(109) == 2 and ladder.attempts_before(110) == 1


def test_a_learning_rate_that_has_ruined_the_run_is_waited_for() -> None:
    ladder = Ladder(Recovery(every=30))
    for _ in range(40):
        ladder.see(1.0, 1.0, skipped=False, lr=0.1)
    baseline = ladder.baseline()
    for factor, num_out in ((100.0, 4), (1.9, 0)):
        for _ in range(6):
            ladder.see(9.0, 1.0, skipped=False, lr=0.1 * factor)
        ladder.went_back(46, baseline)
        outs = []
        for i in range(8):
            ladder.see(1.0, 1.0, skipped=True, vetoed=True, lr=0.1 * factor if i < 4 else 0.1)
            outs.append(ladder.sit_out())
            if not outs[-1]:
                break
        assert outs == [True] * num_out + [False] and not ladder.is_waiting
    ladder.went_back(46, baseline)
    num_out = 0
    ladder.see(1.0, 1.0, skipped=True, vetoed=True, lr=10.0)
    while ladder.sit_out():
        num_out += 1
    assert num_out == 30  # one that stays is meant
