"""One optimizer whose gradients are on several devices: one norm, one decision, one table in the order of the names."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from device_helpers import put, slow, watched
from guard_helpers import assert_close, assert_identical, loss_at, make_model, poison, snapshot, take_step, train
from torch import nn

import fastguard

pytestmark = pytest.mark.usefixtures("engine")
MAKE: dict[str, Any] = {
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "SGD-fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}
every_one = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def _spread(model: nn.Module) -> Any:
    """Says of every other tensor, by its shape, that it were on another device: rows come mixed."""
    homes = {p.shape: torch.device("cuda", i % 2) for i, p in enumerate(model.parameters())}
    return lambda tensor: homes[tensor.shape]


def _guarded(model: nn.Module, make: Any, **settings: Any) -> tuple[Any, list[Any]]:
    optimizer = fastguard.wrap(make(model.parameters()), model, **settings)
    return optimizer, slow(optimizer, device_of=_spread(model))


@pytest.mark.thinned(interpreted=3)
@every_one
@pytest.mark.parametrize("max_norm", [pytest.param(None, marks=pytest.mark.slow), 0.05])
def test_it_is_as_on_one(make: Any, max_norm: float | None) -> None:
    plain = make_model()
    model = copy.deepcopy(plain)
    one, memory_of_one = fastguard.wrap(make(plain.parameters()), plain, max_norm=max_norm), fastguard.MemorySink()
    put(one)
    other = fastguard.wrap(make(make_model().parameters()), sinks=[memory_of_one])
    one.guard._ledger.sinks += other.guard._ledger.sinks
    memory = fastguard.MemorySink()
    several, couriers = _guarded(model, make, max_norm=max_norm, sinks=[memory])
    for step in range(5):
        take_step(plain, one, step, bad=math.nan if step == 2 else None, bad_index=3)
        take_step(model, several, step, bad=math.nan if step == 2 else None, bad_index=3)
    one.guard.flush()
    several.guard.flush()
    assert len(couriers) == 2
    if max_norm is None:
        assert_identical(snapshot(model, several), snapshot(plain, one))
    else:  # the total is added up in another order
        assert_close(snapshot(model, several), snapshot(plain, one), rtol=1e-6, atol=1e-8)
    for got, expected in zip(memory.records, memory_of_one.records, strict=True):
        assert got.tensors.names == expected.tensors.names
        assert got.tensors.numel == expected.tensors.numel
        assert got.tensors.norm == pytest.approx(expected.tensors.norm, rel=1e-6, nan_ok=True)
        assert got.clip_coef == pytest.approx(expected.clip_coef, rel=1e-6)
        assert (got.skipped, got.nonfinite, got.lr) == (expected.skipped, expected.nonfinite, expected.lr)
    assert [r.nonfinite for r in memory.records][2] == ["2.bias"]


def test_nobody_waits() -> None:
    model = make_model()
    optimizer, _ = _guarded(model, MAKE["AdamW-fused"], max_norm=0.05)
    for step in range(3):
        loss_at(model, step).backward()
        with watched() as watch:
            optimizer.step()
            optimizer.guard.observe(loss=torch.ones(()))
        assert step == 0 or not watch.waits


@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_and_a_flag_reach_all_of_them(fused: bool) -> None:
    plain = make_model()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05, fused=fused)
    guarded, _ = _guarded(model, lambda p: torch.optim.AdamW(p, lr=0.05, fused=fused))
    for m, o in ((plain, optimizer), (model, guarded)):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(4):
            o.zero_grad()
            scaler.scale(loss_at(m, step)).backward()
            if step == 1:
                poison(m, math.inf, 3)
            scaler.step(o)
            scaler.update()
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    guarded.guard.flush()
    assert [e.loss_scale for e in guarded.guard.history.recent] == [16.0, 16.0, 8.0, 8.0]
    assert [e.skipped for e in guarded.guard.history.recent] == [False, True, False, False]


def test_gradients_on_one_device_only() -> None:
    model = make_model()
    optimizer, _ = _guarded(model, MAKE["RMSprop"], max_norm=0.05)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_at(model, 2).backward()
    for i, p in enumerate(model.parameters()):
        p.grad = None if i % 2 == 0 else p.grad
    expected = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.guard.flush()
    last = optimizer.guard.last
    assert last.tensors.names == ("0.bias", "2.bias")
    assert last.tensors.norm == pytest.approx(expected, rel=1e-6)
    assert last.norm == pytest.approx(math.hypot(*expected), rel=1e-6)


def test_two_optimizers_on_two_devices() -> None:
    plain = make_model()
    model = copy.deepcopy(plain)
    make = MAKE["AdamW-fused"]
    theirs = [make(plain[0].parameters()), make(plain[2].parameters())]
    ours = fastguard.wrap([make(model[0].parameters()), make(model[2].parameters())], model, max_norm=0.05)
    slow(ours[0], device_of=_spread(model))
    for step in range(3):
        for m, both in ((plain, theirs), (model, ours)):
            for o in both:
                o.zero_grad()
            loss_at(m, step).backward()
            if m is plain:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            for o in both:
                o.step()
    assert_close(snapshot(model, *ours), snapshot(plain, *theirs), rtol=2e-5, atol=1e-6)


def test_a_gradient_that_cannot_be_read_is_told_by_its_name() -> None:
    model = make_model()
    optimizer, _ = _guarded(model, MAKE["RMSprop"])
    train(model, optimizer, range(1))

    def plan(tensors: Any, *, writable: bool = False) -> Any:
        raise fastguard.UnsupportedTensorError(1, "must be something else")

    devices = list(optimizer.guard._judge.on_device.devices)
    devices[1].engine.plan = plan
    with pytest.raises(fastguard.UnsupportedTensorError, match=r"`2\.bias\.grad` must be something else"):
        optimizer.step()
