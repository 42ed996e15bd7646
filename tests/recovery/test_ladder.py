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
