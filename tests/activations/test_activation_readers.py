"""Figures that arrive late, as from a GPU: the same as those at once, in the same order, and never waited for."""

import pytest
import torch

from fastguard import ActivationMonitor
from fastguard.observers.activations import collector as collecting
from fastguard.observers.activations.arrivals import DeferredReader, ImmediateReader
from fastguard.observers.activations.selection import RELU, TANH, UNKNOWN

from activation_models import Transformer, origins, relu_net

CPU = torch.device("cpu")


class Clock:
    """A device that has done its work when the test says so."""

    def __init__(self):
        self.now = 0
        self.num_waits = 0

    def make_event(self):
        return Event(self)


class Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.due = self.clock.now + 1

    def query(self):
        return self.clock.now >= self.due

    def synchronize(self):
        self.clock.num_waits += 1
        self.clock.now = max(self.clock.now, self.due)


@pytest.fixture
def clock(monkeypatch):
    """CPU tensors are read as a device's would be."""
    clock = Clock()
    monkeypatch.setattr(
        collecting, "reader_for", lambda device, backend: DeferredReader(device, backend, clock.make_event)
    )
    return clock


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


def test_records_come_when_they_have_arrived_and_nothing_waits(clock):
    net = relu_net()
    monitor = ActivationMonitor(net, every=1, overhead_budget=None)
    monitor._follow_guard()
    taken = []
    for step in range(6):
        net(torch.full((2, 6), float(step)))
        monitor.end_step(step)
        clock.now += step % 2
        taken.append([found for found, _ in monitor.arrived()])
    assert clock.num_waits == 0
    assert taken == [[], [0, 1], [], [2, 3], [], [4, 5]]
    net(torch.ones(2, 6))
    monitor.end_step(6)
    assert monitor.arrived() == []
    monitor.flush()
    assert [found for found, _ in monitor.arrived()] == [6]
    assert clock.num_waits == 1


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
    assert origins(monitor) == ["blocks.1.attn.v"]
