"""The activation monitor on a real device: nothing waits, and the records are those of the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpu_helpers import backward, batches, make_model

import fastguard
from fastguard import ActivationMonitor

pytestmark = pytest.mark.gpu


def test_watching_does_not_wait(device: Any, no_sync: Any) -> None:
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


def test_a_graph_can_be_captured_while_hooks_are_set(device: Any) -> None:
    model, x = make_model(device), batches(device, 1)[0]
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        monitor = ActivationMonitor(model, modules="all")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(x)
        graph.replay()
        assert monitor.skipped["0"] == "inside a CUDA graph, whose replays call no hooks"
        assert torch.equal(output, model(x))
    assert monitor.cost.num_samples == 1


def test_records_are_those_of_the_cpu(device: Any) -> None:
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
