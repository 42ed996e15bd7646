"""ActivationMonitor: what modules may return, and how often they may be called."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastguard import ActivationMonitor

from activation_models import by_name, relu_net


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    count: torch.Tensor | None = None


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class TestOutputs:
    @pytest.mark.parametrize(
        ("make", "keys"),
        [
            (lambda x: (x, x + 1), ["0", "0[1]"]),
            (lambda x: [x, (x + 1, "text", None)], ["0", "0[1][0]"]),
            (lambda x: {"a": x, "b": x + 1}, ["0", "0['b']"]),
            (lambda x: OrderedDict(a=x, b={"c": x + 1}), ["0", "0['b']['c']"]),
            (lambda x: Output(x), ["0"]),
            (lambda x: Pair(x, x + 1), ["0", "0[1]"]),
            (lambda x: (torch.ones(2).long(), x), ["0"]),
            (lambda x: None, []),
        ],
    )
    def test_tensors_are_found(self, make, keys):
        net = nn.Sequential(Returns(make))
        monitor = ActivationMonitor(net, modules="^0$")
        net(torch.ones(2, 3))
        assert [record.name for record in monitor.activities] == keys
        assert [record.stats.mean for record in monitor.activities] == [1.0, 2.0][: len(keys)]

    def test_integers_and_bools_are_skipped_visibly(self):
        net = nn.Sequential(Returns(lambda x: (x, x.long(), x > 0)))
        monitor = ActivationMonitor(net, modules="^0$")
        net(torch.ones(2, 3))
        assert monitor.skipped == {"0[1]": "int64 output", "0[2]": "bool output"}
        assert "not read: 0[1] (int64 output), 0[2] (bool output)" in monitor.table()

    def test_nan_in_a_further_tensor_is_seen(self):
        net = nn.Sequential(Returns(lambda x: {"a": x, "b": Output(x, x / 0)}), Returns(lambda d: d["a"]))
        monitor = ActivationMonitor(net, modules="all")
        net(torch.zeros(2, 3))
        assert monitor.origin.activity.name == "0['b'].count"

    @pytest.mark.parametrize(
        "make",
        [lambda x: x.to_sparse(), lambda x: torch.nested.as_nested_tensor([x, x[:1]], layout=torch.strided)],
        ids=["sparse", "nested"],
    )
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
    def test_sparse_and_nested_tensors(self, make):
        net = nn.Sequential(Returns(make))
        monitor = ActivationMonitor(net, modules="^0$")
        net(torch.full((2, 3), torch.nan))
        stats = monitor.activities[0].stats
        assert stats.num_nans == stats.total_elements == (6 if make(torch.ones(2, 3)).is_sparse else 9)


class TestCalls:
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpointed_modules_are_counted_once(self, use_reentrant):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=use_reentrant)

        net = Net()
        monitor = ActivationMonitor(net, modules="all")
        monitor.follow_guard()  # so that the step, and with it the sample, goes on during backward
        net(torch.ones(2, 3, requires_grad=True)).sum().backward()
        records = {record.name: record for record in monitor.take(0)}
        assert set(records) == {"Net", "inner", "inner.0", "inner.1"}
        assert records["inner.1"].stats.total_elements == 6

    def test_evaluation_is_left_out(self):
        net = relu_net()
        monitor = ActivationMonitor(net, every=2)
        net.eval()
        net(torch.ones(2, 6))
        assert monitor.activities == () and monitor.cost.num_steps == 0
        net.train()
        with torch.no_grad():
            net(torch.ones(3, 6))
        assert by_name(monitor)["1"].stats.total_elements == 36
        net.eval()(torch.ones(2, 6))
        assert monitor.cost.num_steps == 1

    def test_a_pass_that_raised_leaves_nothing(self):
        net = relu_net()
        monitor = ActivationMonitor(net, every=1, overhead_budget=None)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            nn.Sequential.forward(net, torch.ones(2, 5))
        handle = net[4].register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(torch.full((2, 6), torch.nan))
        handle.remove()
        assert monitor.activities == ()
        net(torch.ones(2, 6))
        assert by_name(monitor)["1"].stats.total_elements == 24 and monitor.origin is None
        assert {"1", "3"} <= by_name(monitor).keys() and "1#2" not in by_name(monitor)

    def test_under_vmap_outputs_are_skipped_visibly(self):
        net = relu_net()
        monitor = ActivationMonitor(net)
        torch.func.vmap(net)(torch.ones(3, 2, 6))
        assert monitor.skipped["1"] == "inside a torch.func transform"
