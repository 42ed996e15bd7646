"""Weights and updates on a device that is behind: a sampled step waits for its record, and no other step does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_helpers import slow
from guard_helpers import guarded_model, make_model, take_step

import fastguard

pytestmark = pytest.mark.usefixtures("engine")

MAKERS = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
}


@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_each_record_gets_the_sample_of_its_step(make: Any) -> None:
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = fastguard.wrap(make(model.parameters()), model, max_norm=0.1, sinks=[memory], weights=4)
    slow(optimizer)
    truth: list[dict[str, float]] = []
    for step in range(10):
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        take_step(model, optimizer, step, bad=float("nan") if step == 4 else None)
        truth.append({n: float((p.detach().double() - before[n]).norm()) for n, p in model.named_parameters()})
    optimizer.guard.flush()
    assert [record.step for record in memory.records] == list(range(10))
    assert [record.step for record in memory.records if record.weights] == [0, 4, 5, 8]
    for record in memory.records:
        for w in record.weights:
            expected = None if record.skipped else pytest.approx(truth[record.step][w.name], rel=1e-4, abs=1e-7)
            assert w.update_norm == expected
            assert w.grad_norm == record.tensors[w.name].norm or record.skipped


def test_only_sampled_steps_wait() -> None:
    model, optimizer = guarded_model(lambda p: torch.optim.AdamW(p, fused=True), weights=4)
    couriers = slow(optimizer)
    waited = []
    for step in range(9):
        before = sum(c.num_waits for c in couriers)
        take_step(model, optimizer, step)
        waited.append(sum(c.num_waits for c in couriers) > before)
    assert waited == [step % 4 == 0 for step in range(9)]
