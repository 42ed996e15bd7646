"""Weights, updates and activations on a device that is behind: each record gets the sample of its step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_helpers import slow
from guard_helpers import guarded_model, make_model, take_step

import fastguard
from fastguard.observers.activations import collector
from fastguard.observers.activations.readers import DeferredReader

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


CPU = torch.device("cpu")


class Device:
    """The slow device of the guard under test, and the events on it."""

    def __init__(self) -> None:
        self.couriers: list[Any] = []
        self.num_waits = 0

    def make_event(self) -> Event:
        return Event(self)


class Event:
    """Has fired when the device has done all that was sent to it before, and something after that."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def _sent(self) -> int:
        return sum(courier.num_sent for courier in self.device.couriers)

    def record(self) -> None:
        self.at = self._sent()

    def query(self) -> bool:
        return self._sent() - sum(len(courier.queue) for courier in self.device.couriers) > self.at

    def synchronize(self) -> None:
        self.device.num_waits += 1


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("behind", [0, 1, 5])
def test_each_record_gets_the_activations_of_its_step(behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(collector, "reader_for", lambda d, b: DeferredReader(CPU, "reference", device.make_event))
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = fastguard.wrap(
        torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
        model,
        sinks=[memory],
        activations={"every": 2, "modules": "all", "overhead_budget": None},
    )
    device.couriers = slow(optimizer)
    truth = []
    for step in range(12):
        handle = model.register_forward_hook(lambda module, args, output: truth.append(float(output.detach().mean())))
        take_step(model, optimizer, step)
        handle.remove()
        for courier in device.couriers:
            courier.run(max(0, len(courier.queue) - behind))
    assert device.num_waits == 0
    optimizer.guard.flush()
    assert [record.step for record in memory.records if record.activations] == [0, 2, 4, 6, 8, 10]
    for record in memory.records:
        for activity in record.activations:
            if activity.name == "Sequential":
                assert activity.stats.mean == pytest.approx(truth[record.step], rel=1e-5)
