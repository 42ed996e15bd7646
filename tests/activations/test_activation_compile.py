"""Monitors of compiled models: one graph, the same records, and a graph without hooks between samples."""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fastguard import ActivationMonitor

from activation_models import GatedMlp, relu_net, taken


@pytest.fixture(autouse=True)
def _fresh_compiler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it imports its compiler
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def counted(model, backend="aot_eager"):
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


def test_a_model_compiled_before_it_was_watched_says_so(caplog):
    net = relu_net()
    model, _ = counted(net)
    model(torch.ones(2, 6))
    monitor = ActivationMonitor(model)
    monitor._follow_guard()
    for step in range(4):
        model(torch.ones(2, 6))
        assert taken(monitor, step) == ()
    assert "before the first call of a compiled model" in caplog.text


def test_an_exported_model_holds_no_operator_of_ours():
    net = relu_net()
    monitor = ActivationMonitor(net)
    program = torch.export.export(net, (torch.ones(2, 6),))
    assert "fastguard" not in str(program)
    assert monitor.activities == ()


def test_the_operators_are_right():
    from torch.library import opcheck

    monitor = ActivationMonitor(relu_net())
    x, token = torch.ones(2, 3, requires_grad=True), torch.zeros(1)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    (hook,) = [hook for hook in monitor._hooks if hook.target.name == "1"]
    opcheck(torch.ops.fastguard.see.default, ([x], [x], token, hook.number, [""]), test_utils=tests)
    opcheck(torch.ops.fastguard.see.default, ([], [], token, monitor._pass_hooks[0].number, []), test_utils=tests)
