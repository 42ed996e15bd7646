"""Every policy where nobody waits: the same steps as on the host, and no sync with a fused optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from device_helpers import watched
from guard_helpers import assert_close, loss_at, make_model, poison, snapshot
from test_policies import POLICIES

import fastguard
from fastguard.kernels.triton import Workspace
from fastguard.step import engines
from fastguard.step.engines import TorchEngine

STEPS, BAD = 8, 4


def _train(make: Callable[[], Any], fused: bool, scale: float | None) -> tuple[Any, list[Any], list[str]]:
    memory, model, waits = fastguard.MemorySink(), make_model(), []
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    fastguard.wrap(optimizer, model, clip=make(), check_every=0, sinks=[memory])
    guard = optimizer.guard
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_at(model, step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step == BAD:
            poison(model)
        with watched() as watch:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if step > 1 and fused and scaler is None:
            waits += watch.waits
        if scaler is not None:
            scaler.update()
        guard._judge.arrive_all()  # so that the policy knows as much as on the host
    guard.flush()
    assert not len(guard._run.failures)
    return snapshot(model, optimizer), list(memory.records), waits


@pytest.mark.thinned(n=5, interpreted=5)
@pytest.mark.parametrize(("fused", "scale"), [(True, None), (True, 1024.0), (False, None), (False, 1024.0)])
@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_as_on_the_host_and_without_waiting(make: Callable[[], Any], fused: bool, scale: float | None) -> None:
    _compare(make, TorchEngine, fused, scale)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_by_the_kernels(make: Callable[[], Any], interpreted: None) -> None:
    _compare(make, Workspace, True, None)


def _compare(make: Callable[[], Any], engine: Any, fused: bool, scale: float | None) -> None:
    expected, told, _ = _train(make, fused, scale)
    with mock.patch.object(engines, "engine_for", return_value=engine):
        found, records, waits = _train(make, fused, scale)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert waits == []
    for ours, theirs in zip(records, told, strict=True):
        assert ours.clip_coef == pytest.approx(theirs.clip_coef, rel=1e-4)
        assert (ours.skipped, ours.is_skipped_by_policy) == (theirs.skipped, theirs.is_skipped_by_policy)
        assert ours.trigger == (None if theirs.trigger is None else pytest.approx(theirs.trigger, rel=1e-4))
        assert [g.name for g in ours.groups] == [g.name for g in theirs.groups]
        if make().scope in ("model", "group", "tensor"):
            assert ours.over == theirs.over
    assert math.isnan(told[BAD].norm) and told[BAD].skipped
