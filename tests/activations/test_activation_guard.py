"""wrap(..., activations=...): records of modules on the records of steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastguard
from fastguard import ActivationMonitor
from fastguard.records.samples import ModuleActivity
from fastguard.sinks import read_jsonl

from activation_models import Transformer, num_hooks, relu_net


def step(model, optimizer, x, micro_batches=1):
    optimizer.zero_grad()
    for _ in range(micro_batches):
        model(x).square().mean().backward()
    optimizer.step()


def guarded(model, activations, **settings):
    return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, activations=activations, **settings)


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("activations", "names"),
    [
        (True, {"Sequential", "1", "3"}),
        (r"^3$", {"3"}),
        ("all", {"Sequential", "0", "1", "2", "3", "4"}),
        ({"include": nn.Linear}, {"0", "2", "4"}),
    ],
)
def test_what_is_watched(activations, names):
    net = relu_net()
    optimizer = guarded(net, activations)
    step(net, optimizer, X)
    assert {record.name for record in optimizer.guard.last.activations} == names
    assert set(optimizer.guard.activations.names) == names


@pytest.mark.parametrize(
    ("activations", "model", "error", "message"),
    [
        (True, False, ValueError, "`activations` must come with a model"),
        (3, True, TypeError, "`activations` must be True, a pattern"),
        ({"often": 1}, True, TypeError, "often"),
        ("nothing", True, ValueError, "must leave at least one module"),
        (ActivationMonitor(), True, ValueError, "must be a monitor of a model"),
    ],
)
def test_bad_settings_leave_the_optimizer_unguarded(activations, model, error, message):
    net = relu_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(error, match=message):
        fastguard.wrap(optimizer, net if model else None, activations=activations)
    assert "_guard" not in optimizer.__dict__ and num_hooks(net) == 0
    assert not optimizer._optimizer_step_pre_hooks


def test_records_are_on_the_steps_whose_forward_passes_they_saw():
    net = relu_net()
    sink = fastguard.MemorySink()
    optimizer = guarded(net, {"every": 2, "overhead_budget": None}, sinks=[sink])
    for i in range(5):
        step(net, optimizer, X + i, micro_batches=2)
        optimizer.guard.observe(loss=1.0)
    optimizer.guard.flush()
    sampled = [record.step for record in sink.records if record.activations]
    assert sampled == [0, 2, 4]
    for record in sink.records:
        for activity in record.activations:
            assert activity.stats.total_elements == 2 * 4 * (2 if activity.name == "Sequential" else 12)
    assert num_hooks(net) == 1  # the next step is not to be sampled; the guard's own hook on the whole model stays
    optimizer.guard.detach()
    assert num_hooks(net) == 0


def test_every_evaluation_of_lbfgs_belongs_to_its_step():
    net = relu_net()
    optimizer = fastguard.wrap(torch.optim.LBFGS(net.parameters(), max_iter=3), net, activations={"every": 2})
    calls = [0]

    def closure():
        calls[0] += 1
        optimizer.zero_grad()
        loss = net(X).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls[0] > 1
    assert optimizer.guard.last.activations[0].stats.total_elements == 48 * calls[0]
    optimizer.step(closure)
    assert optimizer.guard.last.activations == ()


@pytest.mark.parametrize("activations", [None, {"every": 1, "overhead_budget": None, "include": "head"}])
def test_replay_after_a_skipped_step(activations):
    net = Transformer()
    optimizer = guarded(net, activations)
    tokens = torch.randint(0, 11, (2, 5))
    step(net, optimizer, tokens)
    with torch.no_grad():
        net.blocks[0].mlp[2].bias[0] = torch.inf
    step(net, optimizer, tokens)
    assert optimizer.guard.last.skipped
    found = optimizer.guard.replay(lambda: net(tokens))
    assert found.origin.name == "blocks.0.mlp.2"
    assert optimizer.guard.last.activations == found.activities
    with torch.no_grad():
        net.blocks[0].mlp[2].bias[0] = 0.0
    step(net, optimizer, tokens)
    records = optimizer.guard.last.activations
    assert (len(records) == 1) is (activations is not None)
    assert not records or records[0].stats.total_elements == 2 * 5 * 11  # not what the replay saw


def test_records_survive_a_log(tmp_path):
    net = relu_net(dead=(3,))
    optimizer = guarded(net, True, sinks=[fastguard.JsonlSink(tmp_path / "log.jsonl")])
    step(net, optimizer, X)
    records = optimizer.guard.last.activations
    optimizer.guard.close()
    log = read_jsonl(tmp_path / "log.jsonl")
    read = [ModuleActivity.from_dict({"name": n, **d}) for n, d in log[0]["activations"].items()]
    assert tuple(read) == records and 3 in read[1].dead_units
