"""Figures that arrive late, as from a GPU: the same as those at once, in the same order, and never waited for."""

from __future__ import annotations

import pytest
import torch
from choosing_models import Block, Experts, Heads, Language
from torch import nn

from fastguard import ActivationMonitor
from fastguard.observers.activations import collector as collecting
from fastguard.observers.activations.families import RELU, TANH, UNKNOWN
from fastguard.observers.activations.readers import DeferredReader, ImmediateReader, reader_for

from activation_models import Transformer, relu_net

CPU = torch.device("cpu")


class Clock:
    """A device that has done its work when the test says so."""

    def __init__(self) -> None:
        self.now = 0
        self.num_waits = 0

    def make_event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.due = self.clock.now + 1

    def query(self) -> bool:
        return self.clock.now >= self.due

    def synchronize(self) -> None:
        self.clock.num_waits += 1
        self.clock.now = max(self.clock.now, self.due)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """CPU tensors are read as a device's would be."""
    clock = Clock()
    monkeypatch.setattr(
        collecting, "reader_for", lambda device, backend: DeferredReader(device, backend, clock.make_event)
    )
    return clock


def test_tensors_on_the_cpu_are_read_at_once_and_others_later():
    assert reader_for(CPU, "auto").immediate
    assert not reader_for(torch.device("cuda"), "auto").immediate


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5), (0, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("judgement", [RELU, TANH, UNKNOWN])
def test_both_readers_read_the_same(shape, judgement):
    x = torch.randn(shape)
    if x.numel() > 6:
        x.view(-1)[[0, 3, 5]] = torch.tensor([torch.nan, torch.inf, 0.0])
    dim = None if len(shape) < 2 else 1
    clock = Clock()
    late, now = DeferredReader(CPU, "reference", clock.make_event), ImmediateReader("reference")
    measured = late.measure(x, judgement, dim)
    late.deliver().synchronize()
    expected = now.measure(x, judgement, dim)()
    assert measured() == expected


def test_a_device_buffer_that_is_full_is_followed_by_a_larger_one():
    clock = Clock()
    reader = DeferredReader(CPU, "reference", clock.make_event)
    tensors = [torch.full((2, 100), float(i)) for i in range(600)] + [torch.ones(1, 70_000)]
    measured = [reader.measure(x, UNKNOWN, 1) for x in tensors]
    reader.deliver().synchronize()
    readings = [one() for one in measured]
    assert [reading.row[1] for reading in readings] == [*map(float, range(600)), 1.0]
    assert [len(reading.units) for reading in readings] == [3200] * 600 + [70_000 * 32]


def test_records_come_when_they_have_arrived_and_nothing_waits(clock):
    net = relu_net()
    monitor = ActivationMonitor(net, every=1, overhead_budget=None)
    monitor.follow_guard()
    taken = []
    for step in range(6):
        net(torch.full((2, 6), float(step)))
        taken.append(monitor.take(step))
        clock.now += step % 2
        taken[-1] = [found for found, _ in monitor.arrived()] or taken[-1]
    assert clock.num_waits == 0
    assert taken == [(), [0, 1], (), [2, 3], (), [4, 5]]
    net(torch.ones(2, 6))
    assert monitor.take(6) == () and monitor.take(6, wait=True) != ()
    assert clock.num_waits == 1


def test_late_records_are_those_of_the_step_that_they_saw(clock):
    net = nn.Sequential(nn.ReLU())
    monitor = ActivationMonitor(net, every=1, overhead_budget=None, window=2)
    monitor.follow_guard()
    for step in range(4):
        net(torch.tensor([[float(step), -1.0]]))
        assert monitor.take(step) == ()
    monitor.flush()
    found = monitor.arrived()
    assert [(step, records[0].stats.max_val, records[0].num_batches) for step, records in found] == [
        (0, 0.0, 1),
        (1, 1.0, 2),
        (2, 2.0, 2),
        (3, 3.0, 2),
    ]
    assert [records[0].dead_units for _, records in found] == [(0, 1), (1,), (1,), (1,)]
    assert monitor.arrived() == []


def test_the_origin_is_found_without_looking_at_values_in_the_hooks(clock, monkeypatch):
    net = Transformer(num_blocks=2)
    with torch.no_grad():
        net.blocks[1].attn.v.weight[0, 0] = torch.nan
    monitor = ActivationMonitor(net, modules="all")
    looked = []
    for name in ("item", "__bool__", "__float__", "tolist"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda x, *rest, method=method, name=name: looked.append(name) or method(x, *rest)
        )
    net(torch.randint(0, 11, (2, 5)))
    assert looked == []  # on a GPU each would be a sync
    monkeypatch.undo()
    clock.now += 1
    assert monitor.origin.activity.name == "blocks.1.attn.v"
    assert [record.name for record in monitor.activities if record.is_origin] == ["blocks.1.attn.v"]


def test_a_mask_of_minus_infinity_is_no_bad_input(clock):
    class Masked(nn.Module):
        def forward(self, x, mask):
            return (x + mask).softmax(-1) / 0.0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Masked()

        def forward(self, x):
            return self.inner(x, torch.full((4, 4), -torch.inf).triu(1))

    net = Net()
    monitor = ActivationMonitor(net, modules="all")
    net(torch.randn(4, 4))
    monitor.flush()
    assert monitor.origin.activity.name == "inner" and monitor.origin.activity.is_origin


def test_late_and_immediate_records_agree(monkeypatch):
    tokens = torch.randint(0, 11, (2, 5))
    net = Transformer()
    found = []
    for late in (False, True):
        if late:
            monkeypatch.setattr(collecting, "reader_for", lambda d, b: DeferredReader(d, b, Clock().make_event))
        monitor = ActivationMonitor(net, modules="all", backend="reference")
        net(tokens)
        monitor.flush()
        found.append([(r.name, r.stats, r.num_units, r.num_dead_units) for r in monitor.activities])
        monitor.detach()
    assert found[0] == found[1]


def test_detach_waits_for_what_is_on_its_way(clock):
    net = relu_net()
    monitor = ActivationMonitor(net)
    net(torch.ones(2, 6))
    assert monitor.activities == ()
    monitor.detach()
    assert len(monitor.activities) == 3 and clock.num_waits == 1


def test_figures_stay_on_the_device_through_triton_too(interpreted):
    x = torch.randn(6, 40)
    x[0, :3] = torch.tensor([torch.nan, torch.inf, 0.0])
    readings = []
    for backend in ("triton", "reference"):
        reader = DeferredReader(CPU, backend, Clock().make_event)
        measured = [reader.measure(x, UNKNOWN, 1), reader.measure(x, TANH, None), reader.measure(x[:0], UNKNOWN, 1)]
        reader.deliver().synchronize()
        readings.append([one() for one in measured])
    for triton, reference in zip(*readings):
        assert triton.row == pytest.approx(reference.row, rel=1e-5)
        assert torch.equal(counts(triton.units), counts(reference.units))


def counts(units: bytes | None) -> torch.Tensor:
    """All columns but the sum."""
    return torch.frombuffer(bytearray(units), dtype=torch.float64).view(-1, 4)[:, :3] if units else torch.empty(0)


def test_attention_and_routers_are_read_later_as_at_once(clock):
    torch.manual_seed(0)
    net, found = Language(Block(Heads(), Experts())), []
    for is_late in (True, False):
        if not is_late:
            collecting.reader_for = reader_for  # put back by the fixture
        monitor = ActivationMonitor(net)
        net(torch.arange(16).remainder(11).view(2, 8))
        assert is_late == (not monitor.activities)
        clock.now += 100
        monitor.flush()
        found.append([one for one in monitor.activities if one.is_choice])
        monitor.detach()
    assert len(found[0]) == 2
    for late, now in zip(*found, strict=True):
        assert (late.name, late.max_logit, late.load, late.dead_units) == (
            now.name,
            now.max_logit,
            now.load,
            now.dead_units,
        )
        assert late.entropy == pytest.approx(now.entropy, rel=1e-6)
