"""Records on their way from a slow device: in order, none lost unseen, each with what belongs to it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from device_helpers import on_the_host, slow
from guard_helpers import loss_at, make_model, take_step
from torch import nn

import fastguard
from fastguard.sinks import read_jsonl
from fastguard.step.device import NUM_PENDING as NUM_SLOTS

pytestmark = pytest.mark.usefixtures("engine")


def _guarded(model: nn.Module, sinks: Any = (), **settings: Any) -> Any:
    return fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), model, sinks=sinks, **settings)


def _norms(num_steps: int) -> list[float]:
    """The norms of a training on the host."""
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), model, sinks=[memory])
    on_the_host(optimizer)
    for step in range(num_steps):
        take_step(model, optimizer, step)
    optimizer.guard.flush()
    return memory.series("grad/norm")


@pytest.mark.long_interpreted
def test_records_come_in_order_and_are_right() -> None:
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = _guarded(model, [memory])
    guard = optimizer.guard
    couriers = slow(optimizer)
    assert (guard.last, guard.lag) == (None, 0)
    for step in range(12):
        take_step(model, optimizer, step)
        guard.observe(loss=float(step))
        arrived = [] if step < 4 else list(range(step // 4 * 4 - 1))
        assert memory.series("step") == arrived
        assert guard.last is None or guard.last.step == arrived[-1]
        assert guard.lag == step - (arrived[-1] if arrived else -1)
        if step % 4 == 3:
            couriers[0].run()
    guard.flush()
    assert memory.series("step") == memory.series("loss") == list(range(12))
    assert memory.series("grad/norm") == pytest.approx(_norms(12), rel=1e-6)
    assert (guard.last.step, guard.lag) == (11, 0)
    assert couriers[0].num_waits == 1  # of flush


def test_every_step_has_a_line_in_a_log(tmp_path: Any) -> None:
    model = make_model()
    optimizer = _guarded(model, [fastguard.JsonlSink(tmp_path / "run.jsonl")])
    slow(optimizer)
    for step in range(20):
        take_step(model, optimizer, step)
    optimizer.guard.flush()
    records = list(read_jsonl(str(tmp_path / "run.jsonl")))
    assert [record["step"] for record in records] == list(range(20))
    assert [record["grad/norm"] for record in records] == pytest.approx(_norms(20), rel=1e-6)


def test_a_device_that_keeps_up_lags_by_one_step() -> None:
    model = make_model()
    optimizer = _guarded(model)
    for step in range(4):
        take_step(model, optimizer, step)
        assert optimizer.guard.lag == 1
        assert getattr(optimizer.guard.last, "step", None) == (step - 1 if step else None)


@pytest.mark.long_interpreted
def test_a_host_that_runs_ahead_waits_for_the_oldest() -> None:
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = _guarded(model, [memory])
    couriers = slow(optimizer)
    for step in range(NUM_SLOTS):
        take_step(model, optimizer, step)
    assert couriers[0].num_waits == 0
    for step in range(NUM_SLOTS, NUM_SLOTS + 5):
        take_step(model, optimizer, step)
    assert couriers[0].num_waits == 5
    assert memory.series("step") == list(range(5))
    optimizer.guard.close()
    assert memory.series("grad/norm") == pytest.approx(_norms(NUM_SLOTS + 5), rel=1e-6)
    assert "lost-records" not in {f.rule for f in optimizer.guard.report().findings}


def test_losses_travel_with_their_step() -> None:
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = _guarded(model, [memory])
    slow(optimizer)
    losses = []
    for step in range(6):
        loss = loss_at(model, step)
        take_step(model, optimizer, step)
        optimizer.guard.observe(loss=loss)
        if step % 2:
            optimizer.guard.observe(val_loss=loss.detach().double().reshape(1) * 2)
        losses.append(float(loss.detach()))
    optimizer.guard.observe(loss=7.0)  # the mean counts, wherever they are
    optimizer.guard.flush()
    assert memory.series("loss") == [*losses[:5], pytest.approx((losses[5] + 7.0) / 2)]
    assert memory.series("val_loss")[1::2] == [2 * loss for loss in losses[1::2]]


def test_a_report_waits_and_leaves_the_step_open() -> None:
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = _guarded(model, [memory])
    couriers = slow(optimizer)
    for step in range(3):
        take_step(model, optimizer, step)
    assert optimizer.guard.report().numbers["num_steps"] == 3
    assert (couriers[0].num_waits, optimizer.guard.lag) == (3, 0)
    assert memory.series("step") == [0, 1]
    optimizer.guard.observe(loss=torch.tensor(2.5))
    take_step(model, optimizer, 3)
    assert memory.series("step") == [0, 1, 2]
    assert memory.series("loss") == [None, None, 2.5]


def test_rates_that_are_tensors_are_copied() -> None:
    model, memory = make_model(), fastguard.MemorySink()
    rate = torch.tensor(0.5)
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=rate, fused=True), model, sinks=[memory])
    slow(optimizer)
    for step in range(3):
        take_step(model, optimizer, step)
        rate.mul_(0.5)
    optimizer.guard.flush()
    assert memory.series("lr") == [0.5, 0.25, 0.125]


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("ending", ["drop", "detach", "close"])
def test_nothing_on_its_way_is_lost_at_the_end(ending: str) -> None:
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = _guarded(model, [memory])
    slow(optimizer)
    for step in range(5):
        take_step(model, optimizer, step)
    if ending == "drop":
        del optimizer
        gc.collect()
    else:
        getattr(optimizer.guard, ending)()
    assert memory.series("step") == [0, 1, 2, 3, 4]
