"""wrap(..., activations=...): records of modules on those of steps, and the module where something goes wrong."""

import pytest
import torch
from torch import nn

import fastguard
from fastguard import ActivationMonitor

from activation_models import GatedMlp, Transformer, by_name, num_hooks, origins, relu_net


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
        ({"modules": "[024]"}, {"0", "2", "4"}),
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
        ("nothing", True, ValueError, "must match at least one module"),
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


def _convolutions():
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    with torch.no_grad():
        net[0].bias[3] = -1e4
        net[3].bias.copy_(torch.tensor([0.0, -1e4, 0.0, -1e4]))
    return net, torch.randn(8, 3, 10, 9), {"1": (5, (3,)), "4": (4, (1, 3))}


def _one_dimensional():
    net = nn.Sequential(nn.Conv1d(3, 5, 3), nn.ReLU(), nn.Linear(8, 7), nn.ReLU())
    with torch.no_grad():
        net[0].bias[3] = -1e4
        net[2].bias.copy_(torch.tensor([5.0] * 6 + [-1e4]))
    # [8, 5, 8] after the convolution: only the layer before says which dimension has the units
    return net, torch.randn(8, 3, 10), {"1": (5, (3,)), "3": (7, (6,))}


def _gated():
    net = nn.Sequential(nn.Linear(6, 6), GatedMlp())
    with torch.no_grad():
        net[1].gate_proj.bias[5] = -1e3
    return net, torch.randn(20, 6), {"1[hidden]": (8, (5,))}


def _encoder():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    with torch.no_grad():
        net.layers[1].linear1.bias[3] = -1e3
    return net, torch.randn(2, 5, 8), {"layers.1[hidden]": (16, (3,))}


@pytest.mark.parametrize("make", [_convolutions, _one_dimensional, _gated, _encoder])
def test_dead_units_are_named(make):
    net, x, expected = make()
    monitor = ActivationMonitor(net)
    net(x)
    records = by_name(monitor)
    assert {name: (records[name].num_units, records[name].dead_units) for name in expected} == expected


def test_a_unit_is_dead_when_it_was_so_in_all_batches_of_the_window():
    net = nn.Sequential(nn.ReLU())
    monitor = ActivationMonitor(net, every=1, overhead_budget=None)
    always, sometimes = torch.tensor([-1.0, 1.0, -1.0]), torch.tensor([-1.0, 1.0, 1.0])
    seen = []
    for unit in (sometimes, *[always] * 10, sometimes):
        net(unit.expand(4, 3))
        record = by_name(monitor)["0"]
        seen.append((record.dead_units, record.num_batches))
    assert seen == [*(((0,), min(num, 10)) for num in range(1, 11)), ((0, 2), 10), ((0,), 10)]


@pytest.mark.parametrize("name", ["embed", "blocks.0.ln2", "blocks.1.attn.v", "blocks.1.mlp.2", "head"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_weight_is_traced_to_its_module(name, value):
    net = Transformer()
    with torch.no_grad():
        net.get_submodule(name).weight[..., 0] = value
    monitor = ActivationMonitor(net, modules="all")
    net(torch.randint(0, 11, (2, 5)))
    assert origins(monitor) == [name]


def test_masks_of_minus_infinity_are_no_bad_input():
    class Masked(nn.Module):
        def forward(self, x, mask, attn_mask=None):
            return (x + mask).softmax(-1) / 0.0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Masked()

        def forward(self, x):
            mask = torch.full((4, 4), -torch.inf).triu(1)
            return self.inner(x, mask, attn_mask=mask)

    net = Net()
    monitor = ActivationMonitor(net, modules="all")
    net(torch.randn(4, 4))
    assert origins(monitor) == ["inner"]
