"""Gradients of a step that are still there when those of the next are added, in all ways to clear them or not to."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_helpers import loss_at, make_model
from torch import nn

import fastguard

Clearing = Callable[[Any], None]


def left_of(guard: Any) -> tuple[int | None, int | None]:
    guard.report()
    notes = guard.history.model
    return notes.num_left_gradients, notes.num_watched_backwards


def guarded(model: nn.Module, make: Any = torch.optim.SGD, **settings: Any) -> Any:
    return fastguard.wrap(make(model.parameters(), lr=1e-3), model, **settings)


def run(
    model: nn.Module, optimizer: Any, before: Clearing, after: Clearing, num_steps: int, num_passes: int = 1
) -> None:
    for number in range(num_steps):
        before(optimizer)
        for _ in range(num_passes):
            loss_at(model, number).backward()
        optimizer.step()
        after(optimizer)


def nothing(optimizer: Any) -> None:
    pass


def zero(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_hand(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = torch.zeros_like(p.grad)


set_to_none = torch.optim.Optimizer.zero_grad
CLEARINGS = [set_to_none, zero, by_hand]


@pytest.mark.parametrize("clear", CLEARINGS)
@pytest.mark.parametrize("where", ["before", "after", "within"])
@pytest.mark.parametrize("num_passes", [1, 3])
def test_cleared(clear: Clearing, where: str, num_passes: int) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if where == "within":
        optimizer.register_step_post_hook(lambda one, args, kwargs: clear(one))  # called ahead of the guard's own
    fastguard.wrap(optimizer, model)
    run(model, optimizer, *(clear if where == at else nothing for at in ("before", "after")), 25, num_passes)
    assert left_of(optimizer.guard) == (0, 20)


@pytest.mark.parametrize("settings", [{}, {"max_norm": 1e-3}, {"skip_nonfinite": False}])
@pytest.mark.parametrize(("every", "expected"), [(100, 20), (4, 15)])
def test_never_cleared_and_every_fourth_time(settings: Any, every: int, expected: int) -> None:
    model = make_model()
    optimizer = guarded(model, **settings)
    for number in range(21):
        run(model, optimizer, nothing, zero if number % every == every - 1 else nothing, 1)
    assert left_of(optimizer.guard) == (expected, 20)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("make", [torch.optim.SGD, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)])
def test_under_a_scaler(clears: bool, unscales: bool, make: Any) -> None:
    model = make_model()
    optimizer, scaler = guarded(model, make), torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(22):
        if clears:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        scaler.scale(loss_at(model, number)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert left_of(optimizer.guard) == ((0, 20) if clears else (20, 20))


def test_without_a_backward_pass_it_is_given_up() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1))
    for _ in range(70):
        p.grad = torch.ones(3)
        optimizer.step()
    assert left_of(optimizer.guard) == (None, None)
    assert not p._backward_hooks


def test_the_hooks_go_after_twenty_steps_and_with_the_guard() -> None:
    model = make_model()
    optimizer = guarded(model)
    params = list(model.parameters())
    assert params[0]._backward_hooks and params[-1]._backward_hooks and not params[1]._backward_hooks
    twin = copy.deepcopy(model)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in twin.parameters())
    run(model, optimizer, set_to_none, nothing, 21)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params)
    other = make_model()
    guarded(other)
    gc.collect()
    assert not any(p._backward_hooks for p in other.parameters())


def test_a_resumed_run_goes_on_counting() -> None:
    model = make_model()
    optimizer = guarded(model)
    run(model, optimizer, set_to_none, nothing, 9)
    state = optimizer.guard.state_dict()
    resumed = guarded(make_model())
    resumed.guard.load_state_dict(state)
    run(model, resumed, set_to_none, nothing, 1)  # of another model: nothing comes
    assert left_of(resumed.guard) == (0, 8)
    again = guarded(model)
    again.guard.load_state_dict(state)
    run(model, again, set_to_none, nothing, 30)
    assert left_of(again.guard) == (0, 20)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_ahead_of_the_step(set_to_none: bool) -> None:
    model = make_model()
    optimizer = guarded(model)
    for number in range(12):
        loss_at(model, number).backward()
        if number != 7:
            optimizer.zero_grad(set_to_none)
        optimizer.step()
    optimizer.guard.report()
    assert optimizer.guard.history.model.num_cleared_gradients == 11
