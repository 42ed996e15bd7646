"""Records on their way from a slow device: in order, none lost unseen, each with what belongs to it."""

import gc

import pytest
import torch
from device_helpers import on_the_host, slow
from guard_helpers import guarded_model, loss_at, make_model, take_step

import fastguard
from fastguard.observers.activations import collector
from fastguard.observers.activations.arrivals import DeferredReader
from fastguard.sinks import read_jsonl
from fastguard.step.device import NUM_PENDING as NUM_SLOTS

pytestmark = pytest.mark.usefixtures("engine")


def _guarded(model, sinks=(), **settings):
    return fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), model, sinks=sinks, **settings)


def _norms(num_steps):
    """The norms of a training on the host."""
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), model, sinks=[memory])
    on_the_host(optimizer)
    for step in range(num_steps):
        take_step(model, optimizer, step)
    optimizer.guard.flush()
    return memory.series("grad/norm")


@pytest.mark.long_interpreted
def test_records_come_in_order_and_are_right():
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


def test_every_step_has_a_line_in_a_log(tmp_path):
    model = make_model()
    optimizer = _guarded(model, [fastguard.JsonlSink(tmp_path / "run.jsonl")])
    slow(optimizer)
    for step in range(20):
        take_step(model, optimizer, step)
    optimizer.guard.flush()
    records = list(read_jsonl(str(tmp_path / "run.jsonl")))
    assert [record["step"] for record in records] == list(range(20))
    assert [record["grad/norm"] for record in records] == pytest.approx(_norms(20), rel=1e-6)


def test_a_device_that_keeps_up_lags_by_one_step():
    model = make_model()
    optimizer = _guarded(model)
    for step in range(4):
        take_step(model, optimizer, step)
        assert optimizer.guard.lag == 1
        assert getattr(optimizer.guard.last, "step", None) == (step - 1 if step else None)


@pytest.mark.long_interpreted
def test_a_host_that_runs_ahead_waits_for_the_oldest():
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


def test_losses_travel_with_their_step():
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


def test_a_report_waits_and_leaves_the_step_open():
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


def test_rates_that_are_tensors_are_copied():
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
def test_nothing_on_its_way_is_lost_at_the_end(ending):
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


MAKERS = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
}


@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_each_record_gets_the_sample_of_its_step(make):
    model, memory = make_model(), fastguard.MemorySink()
    optimizer = fastguard.wrap(make(model.parameters()), model, max_norm=0.1, sinks=[memory], weights=4)
    slow(optimizer)
    truth = []
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


def test_only_sampled_steps_wait():
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

    def __init__(self):
        self.couriers = []
        self.num_waits = 0

    def make_event(self):
        return Event(self)


class Event:
    """Has fired when the device has done all that was sent to it before, and something after that."""

    def __init__(self, device):
        self.device = device

    def _sent(self):
        return sum(courier.num_sent for courier in self.device.couriers)

    def record(self):
        self.at = self._sent()

    def query(self):
        return self._sent() - sum(len(courier.queue) for courier in self.device.couriers) > self.at

    def synchronize(self):
        self.device.num_waits += 1


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize("behind", [0, 1, 5])
def test_each_record_gets_the_activations_of_its_step(behind, monkeypatch):
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
