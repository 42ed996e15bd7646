"""Monitors of compiled models: one graph, the same records, and a graph without hooks between samples."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fastguard import ActivationMonitor
from fastguard.observers.activations import replay

from activation_models import GatedMlp, Transformer, relu_net


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it imports its compiler
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def counted(model: nn.Module, backend: str = "aot_eager") -> tuple[nn.Module, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True), counter


@pytest.mark.thinned(n=2)
@pytest.mark.parametrize("make", [lambda: relu_net(dead=(3,)), lambda: nn.Sequential(GatedMlp())])
def test_records_are_those_of_the_model_uncompiled(make):
    net = make()
    x = torch.randn(5, 6)
    plain = ActivationMonitor(net, modules="all")
    net(x)
    expected = plain.activities
    plain.detach()
    model, counter = counted(net)
    monitor = ActivationMonitor(model, modules="all")
    model(x).sum().backward()
    assert counter.frame_count == 1
    assert [(r.name, r.family, r.order, r.num_units, r.dead_units) for r in monitor.activities] == [
        (r.name, r.family, r.order, r.num_units, r.dead_units) for r in expected
    ]
    for got, want in zip(monitor.activities, expected):
        assert got.stats.mean == pytest.approx(want.stats.mean, rel=1e-6, abs=1e-12)
        assert got.stats.num_zeros == want.stats.num_zeros


def test_two_graphs_whatever_the_number_of_steps():
    net = relu_net()
    model, counter = counted(net)
    monitor = ActivationMonitor(model, every=3, overhead_budget=None)
    samples = []
    for _ in range(10):
        model(torch.randn(5, 6)).sum().backward()
        samples.append(monitor.cost.num_samples)
    assert samples == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert counter.frame_count == 2  # with hooks, and without


@pytest.mark.slow
def test_following_a_guard_the_graph_between_samples_holds_no_operator_of_ours():
    net = relu_net()
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    model = torch.compile(net, backend=backend, fullgraph=True)
    monitor = ActivationMonitor(model, every=2, overhead_budget=None)
    monitor.follow_guard()
    for step in range(6):
        model(torch.randn(5, 6))
        assert bool(monitor.take(step)) is (step % 2 == 0)
    with_hooks, without = graphs
    assert sum("fastguard" in target for target in with_hooks) == len(monitor._hooks) + 2
    assert not any("fastguard" in target for target in without)


@pytest.mark.slow
def test_under_inductor():
    net = Transformer(num_blocks=1)
    with torch.no_grad():
        net.blocks[0].attn.v.weight[0, 0] = torch.nan
    model, counter = counted(net, "inductor")
    monitor = ActivationMonitor(model, every=2, modules="all", overhead_budget=None)
    tokens = torch.randint(0, 11, (2, 5))
    for _ in range(3):
        model(tokens).sum().backward()
    assert monitor.cost.num_samples == 2 and counter.frame_count == 2
    assert monitor.origin.step == 2 and monitor.origin.activity.name == "blocks.0.attn.v"
    assert monitor.skipped == {}


@pytest.mark.slow
def test_a_block_compiled_on_its_own():
    net = Transformer(num_blocks=2)
    net.blocks[1].compile(backend="aot_eager", fullgraph=True)
    monitor = ActivationMonitor(net, every=2, overhead_budget=None)
    for _ in range(3):
        net(torch.randint(0, 11, (2, 5)))
        names = [record.name for record in monitor.activities]
        assert {"blocks.0.attn", "blocks.1.attn", "blocks.1", "norm"} <= set(names)
    assert monitor.cost.num_samples == 2
    assert not net.blocks[0].attn._forward_hooks and net.blocks[1].attn._forward_hooks


@pytest.mark.slow
def test_in_place_activations_and_evaluation():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(-2.0)
    model, _ = counted(net)
    monitor = ActivationMonitor(model, modules="all", every=1, overhead_budget=None)
    model.eval()
    model(torch.ones(2, 3))
    assert monitor.cost.num_steps == 0
    model.train()
    model(torch.ones(2, 3)).sum().backward()
    assert [record.stats.mean for record in monitor.activities] == [-2.0, 0.0, 0.0]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.GELU())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.slow
def test_checkpointing_inside_a_graph_is_counted_once():
    net = Checkpointed()
    model, _ = counted(net)
    monitor = ActivationMonitor(model, modules="all", every=2, overhead_budget=None)
    monitor.follow_guard()
    for step in range(3):
        model(torch.randn(5, 6)).sum().backward()  # recomputes
        records = {record.name: record.stats.total_elements for record in monitor.take(step)}
        assert records == ({"inner.0": 30, "inner.1": 30, "inner": 30, "Checkpointed": 30} if step % 2 == 0 else {})


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    count: torch.Tensor


class Returns(nn.Module):
    def forward(self, x):
        return Output(x.exp(), x.long())


class Takes(nn.Module):
    def forward(self, output):
        return output.logits * 2


@pytest.mark.slow
def test_dataclasses_inside_a_graph():
    model, _ = counted(nn.Sequential(Returns(), Takes()))
    monitor = ActivationMonitor(model, modules="all")
    model(torch.zeros(2, 3))
    assert [(r.name, r.stats.mean) for r in monitor.activities] == [("0", 1.0), ("1", 2.0), ("Sequential", 2.0)]
    assert monitor.skipped == {"0.count": "int64 output"}


def test_a_model_compiled_before_it_was_watched_says_so(caplog):
    net = relu_net()
    model, _ = counted(net)
    model(torch.ones(2, 6))
    monitor = ActivationMonitor(model)
    monitor.follow_guard()
    for step in range(4):
        model(torch.ones(2, 6))
        assert monitor.take(step) == ()
    assert "before the first call of a compiled model" in caplog.text


@pytest.mark.slow
def test_replay_runs_compiled_code_as_it_was_written():
    net = relu_net()
    model, counter = counted(net)
    x = torch.ones(2, 6)
    model(x)
    with torch.no_grad():
        net[2].bias[0] = torch.nan
    assert replay(model, lambda: model(x)).origin.name == "2"
    assert counter.frame_count == 1


def test_an_exported_model_holds_no_operator_of_ours():
    net = relu_net()
    monitor = ActivationMonitor(net)
    program = torch.export.export(net, (torch.ones(2, 6),))
    assert "fastguard" not in str(program)
    assert monitor.activities == ()


def test_the_operators_are_right():
    from torch.library import opcheck

    monitor = ActivationMonitor(relu_net())
    number = monitor._hooks[0].number
    x, token = torch.ones(2, 3, requires_grad=True), torch.zeros(1)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(torch.ops.fastguard.see.default, (x, [x], token, number, ""), test_utils=tests)
    opcheck(torch.ops.fastguard.mark.default, (token, monitor._pass_hooks[0].number), test_utils=tests)
