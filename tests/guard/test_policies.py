"""Every clip policy through the same tests."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_helpers import make_model, take_step

import fastguard
from fastguard.guard import policies
from fastguard.guard.policies import ClipPolicy, GlobalNorm, as_policy

# How to make it, and what it makes of a norm.
POLICIES: dict[str, tuple[Callable[[], ClipPolicy], dict[float, float]]] = {
    "GlobalNorm": (lambda: GlobalNorm(1.0), {0.5: 1.0, 4.0: 1.0 / (4.0 + 1e-6)}),
}
every_policy = pytest.mark.parametrize(("make", "expected"), POLICIES.values(), ids=POLICIES)


def test_every_policy_is_tried() -> None:
    exported = {name for name in policies.__all__ if inspect.isclass(getattr(policies, name))}
    assert exported - {"ClipPolicy", "GivenPolicy"} == set(POLICIES)


@every_policy
def test_what_it_makes_of_norms(make: Any, expected: dict[float, float]) -> None:
    policy = make()
    for norm, coefficient in expected.items():
        assert policy.coefficient(norm) == coefficient
        if policy.limit is not None:
            assert min(1.0, policy.limit / (norm + 1e-6)) == coefficient


@every_policy
def test_it_goes_on_from_its_state(make: Any, expected: dict[float, float]) -> None:
    policy, other = make(), make()
    for norm in expected:
        policy.coefficient(norm)
    other.load_state_dict(copy.deepcopy(policy.state_dict()))
    assert other.state_dict() == policy.state_dict()
    assert other.coefficient(7.0) == policy.coefficient(7.0)


@every_policy
def test_in_a_guard(make: Any, expected: dict[float, float], backend: str) -> None:
    model = make_model()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, clip=make(), backend=backend)
    for step in range(4):
        take_step(model, optimizer, step, bad=math.nan if step == 2 else None)
        optimizer.guard.flush()
        last = optimizer.guard.last
        assert last.clip_coef == (1.0 if last.skipped else pytest.approx(make().coefficient(last.norm), rel=1e-12))
    assert optimizer.guard.history.num_skipped == 1
    assert repr(optimizer.guard.clip) == repr(make())


def test_a_formula_of_ones_own_is_not_taken_for_the_parents() -> None:
    class Half(GlobalNorm):
        def coefficient(self, norm: float) -> float:
            return 0.5

    assert GlobalNorm(2.0).limit == 2.0 and Half(2.0).limit is None


def test_a_policy_without_a_formula_says_so() -> None:
    class Empty(ClipPolicy):
        pass

    with pytest.raises(NotImplementedError, match=r"`Empty` must have a method coefficient\(norm\)"):
        Empty().coefficient(1.0)


@pytest.mark.parametrize("clip", [GlobalNorm, 1.0, "norm", object()])
def test_what_is_no_policy_is_refused(clip: Any) -> None:
    with pytest.raises(TypeError, match="`clip` must be a clip policy such as"):
        as_policy(clip)
