"""Skips that the host hears of later: counted, raised in a later step, and never taken."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from device_helpers import slow
from foreign_optimizers import WantsGradients
from guard_helpers import assert_close, assert_identical, guarded_model, make_model, snapshot, take_step, train, twins
from torch import nn

import fastguard

pytestmark = pytest.mark.usefixtures("engine")
FUSED: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, fused=True),
}
OTHERS: dict[str, Any] = {
    "SGD-foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.05),
    "foreign": WantsGradients,
}
every_one = pytest.mark.parametrize("make", [*FUSED.values(), *OTHERS.values()], ids=[*FUSED, *OTHERS])


def _guarded(model: nn.Module, **settings: Any) -> Any:
    return fastguard.wrap(FUSED["AdamW"](model.parameters()), model, **settings)


@pytest.mark.thinned(interpreted=6)
@every_one
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_skipped_step_changes_no_bit_although_nobody_has_heard_of_it(make: Any, max_norm: float | None) -> None:
    model, optimizer = guarded_model(make, max_norm=max_norm)
    slow(optimizer)
    train(model, optimizer, range(2))
    names = set(vars(optimizer))
    before = snapshot(model, optimizer)
    for step, bad in ((2, math.nan), (3, math.inf)):
        take_step(model, optimizer, step, bad=bad)
        assert_identical(snapshot(model, optimizer), before)
        assert set(vars(optimizer)) == names
    assert optimizer.guard.last is None
    optimizer.guard.flush()
    assert [e.skipped for e in optimizer.guard.history.recent] == [False, False, True, True]


@pytest.mark.thinned(interpreted=6)
@every_one
def test_training_goes_on_as_if_the_step_had_never_been(make: Any) -> None:
    plain, optimizer, model, guarded = twins(make)
    train(plain, optimizer, [1, 2, 4])
    for step in range(5):  # the very first one too
        take_step(model, guarded, step, bad=math.nan if step in (0, 3) else None)
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))


@pytest.mark.thinned(interpreted=6)
@every_one
@pytest.mark.parametrize("clip_through", ["scale", "grad_scale"])
def test_clipping_is_torchs_whichever_way(make: Any, clip_through: str) -> None:
    plain, optimizer, model, guarded = twins(make, max_norm=0.05, clip_through=clip_through)
    slow(guarded)
    for step in range(4):
        take_step(plain, optimizer, step, before_step=lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
        take_step(model, guarded, step)
        rtol, atol = (2e-6, 1e-8) if step == 0 else (2e-5, 1e-6)  # the models differ by some roundings from then on
        assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol, atol)
        assert "grad_scale" not in vars(guarded) and "found_inf" not in vars(guarded)
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=2e-5, atol=1e-6)
    guarded.guard.flush()
    assert guarded.guard.history.num_clipped == 4


def test_too_many_skips_raise_in_a_later_step() -> None:
    model = make_model()
    optimizer = _guarded(model, max_consecutive_skips=3)
    couriers = slow(optimizer)
    take_step(model, optimizer, 0)
    before = snapshot(model, optimizer)
    for step in range(1, 6):
        take_step(model, optimizer, step, bad=math.nan)
    couriers[0].run()
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        take_step(model, optimizer, 6)
    assert caught.value.steps == [1, 2, 3, 4]  # the fourth came in with the third; the fifth is not sent yet
    assert caught.value.tensors == ["0.weight"]
    assert_identical(snapshot(model, optimizer), before)
    take_step(model, optimizer, 6)  # who goes on may
    optimizer.guard.flush()
    assert [e.step for e in optimizer.guard.history.recent] == list(range(7))
    assert not optimizer.guard.last.skipped


def test_the_run_of_skips_goes_on_across_a_restart() -> None:
    model = make_model()
    optimizer = _guarded(model, max_consecutive_skips=3)
    for step in range(2):
        take_step(model, optimizer, step, bad=math.nan)
    state = optimizer.guard.state_dict()
    assert state["skipped_run"] == [0, 1]
    other = make_model()
    resumed = _guarded(other, max_consecutive_skips=3)
    resumed.guard.load_state_dict(state)
    take_step(other, resumed, 2, bad=math.nan)
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        take_step(other, resumed, 3)
    assert caught.value.steps == [0, 1, 2]


def test_a_step_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    optimizer = _guarded(model)
    monkeypatch.setattr("fastguard.step.device_judge.is_capturing", lambda device: True)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="cannot be captured in a graph"):
        take_step(model, optimizer, 0)
    assert_identical(snapshot(model, optimizer), before)
