"""Weights and updates sampled on a real device: as the exact differences, and no other step waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_helpers import FUSED, OTHERS, backward, batches, make_model

import fastguard

pytestmark = pytest.mark.gpu
MAKERS = {
    **FUSED,
    **OTHERS,
    "SGD-plain": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1, fused=True),
    "Adam-capturable": lambda params: torch.optim.Adam(
        params, lr=torch.tensor(0.05, device="cuda"), capturable=True, weight_decay=0.1
    ),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.05),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("clip_through", ["scale", "grad_scale"])
def test_updates_are_the_exact_differences(make: Any, clip_through: str, device: Any, backend: str) -> None:
    model, memory = make_model(device), fastguard.MemorySink()
    optimizer = fastguard.wrap(
        make(model.parameters()),
        model,
        max_norm=0.05,
        clip_through=clip_through,
        backend=backend,
        sinks=[memory],
        weights=3,
    )
    truth = []
    for step, x in enumerate(batches(device, 9)):
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        backward(model, x, bad=math.nan if step == 3 else None)
        optimizer.step()
        truth.append({n: float((p.detach().double() - before[n]).norm()) for n, p in model.named_parameters()})
    optimizer.guard.flush()
    assert [r.step for r in memory.records if r.weights] == [0, 3, 4, 6]
    for record in memory.records:
        for w in record.weights:
            expected = None if record.skipped else pytest.approx(truth[record.step][w.name], rel=1e-4, abs=1e-6)
            assert w.update_norm == expected


def test_only_sampled_steps_wait(device: Any, no_sync: Any) -> None:
    model, memory = make_model(device), fastguard.MemorySink()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fastguard.wrap(optimizer, model, sinks=[memory], weights=8)
    data = batches(device, 8)
    for step, x in enumerate(data):
        backward(model, x)
        if step == 0:
            optimizer.step()
        else:
            with no_sync():
                optimizer.step()
    optimizer.guard.flush()
    assert [len(record.weights) for record in memory.records] == [4, *[0] * 7]
