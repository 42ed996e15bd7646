"""Activations and weights sampled on a real device: nothing waits, and the records are those of the CPU."""

import copy
import math

import pytest
import torch
from gpu_helpers import FUSED, OTHERS, backward, batches, make_model

import fastguard
from fastguard import ActivationMonitor

pytestmark = pytest.mark.gpu


def test_watching_does_not_wait(device, no_sync):
    model = make_model(device)
    optimizer = fastguard.wrap(
        torch.optim.AdamW(model.parameters(), fused=True),
        model,
        activations={"modules": "all", "every": 2, "overhead_budget": None},
    )
    data = batches(device, 12)
    for x in data[:3]:  # makes what the steady state needs
        backward(model, x)
        optimizer.step()
    for x in data[3:]:
        with no_sync():
            backward(model, x)
            optimizer.step()
    optimizer.guard.flush()
    cost = optimizer.guard.activations.cost
    assert (cost.num_samples, cost.num_steps) == (6, 12)
    assert {record.name for record in optimizer.guard.activations.activities} == {"0", "1", "2", "Sequential"}


def test_a_graph_can_be_captured_while_hooks_are_set(device):
    model, x = make_model(device), batches(device, 1)[0]
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        monitor = ActivationMonitor(model, modules="all")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(x)
        graph.replay()
        assert torch.equal(output, model(x))
    assert monitor.cost.num_samples == 1


def test_records_are_those_of_the_cpu(device):
    model = make_model(torch.device("cpu"))
    with torch.no_grad():
        model[0].bias[3] = torch.nan
    found = []
    for place in (torch.device("cpu"), device):
        watched = copy.deepcopy(model).to(place)
        monitor = ActivationMonitor(watched, modules="all")
        watched(batches(place, 1)[0])
        monitor.flush()
        found.append(monitor.activities)
    for a, b in zip(*found, strict=True):
        assert (a.name, a.order, a.num_units, a.is_origin) == (b.name, b.order, b.num_units, b.is_origin)
        assert (a.stats.num_nans, a.stats.total_elements) == (b.stats.num_nans, b.stats.total_elements)
        assert a.stats.mean == pytest.approx(b.stats.mean, rel=1e-3, abs=1e-5, nan_ok=True)
    assert [record.name for record in found[1] if record.is_origin] == ["0"]


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
def test_updates_are_the_exact_differences(make, clip_through, device, backend):
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


def test_only_sampled_steps_wait(device, no_sync):
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
