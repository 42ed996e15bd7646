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

from activation_models import by_name, num_hooks, relu_net


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

    def test_complex_outputs_are_read_as_their_parts(self):
        net = nn.Sequential(Returns(lambda x: torch.complex(x, -x).conj()))
        monitor = ActivationMonitor(net)
        net(torch.ones(2, 3))
        assert monitor.activities[0].stats.total_elements == 12
        assert monitor.activities[0].stats.mean == 1.0

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

    def test_a_tensor_returned_by_several_modules_is_read_once(self, monkeypatch):
        from fastguard.observers.activations import readers

        reads = []
        run = readers.run_activation
        monkeypatch.setattr(readers, "run_activation", lambda x, *rest: reads.append(x.shape) or run(x, *rest))
        net = nn.Sequential(nn.Sequential(nn.Sequential(nn.ReLU())))
        monitor = ActivationMonitor(net, modules="all")
        net(torch.ones(2, 3))
        assert len(monitor.activities) == 4 and len(reads) == 1

    def test_an_in_place_activation(self):
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
        with torch.no_grad():
            net[0].weight.zero_()
            net[0].bias.fill_(-2.0)
        monitor = ActivationMonitor(net, modules="all")
        net(torch.ones(2, 3)).sum().backward()
        records = by_name(monitor)
        assert (records["0"].stats.mean, records["1"].stats.mean) == (-2.0, 0.0)

    def test_the_origin_before_an_in_place_activation(self):
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
        with torch.no_grad():
            net[0].bias[1] = torch.nan
        for modules in ("all", "default"):
            monitor = ActivationMonitor(net, modules=modules)
            net(torch.ones(2, 3))
            records = by_name(monitor)
            assert not records["1"].is_origin  # what it got has been written over, but a ReLU is not to blame
            monitor.detach()


class TestCalls:
    def test_a_module_called_several_times(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.relu = nn.ReLU()

            def forward(self, x):
                return self.relu(self.relu(x) - 1.0)

        net = Net()
        monitor = ActivationMonitor(net, modules=nn.ReLU, every=1, overhead_budget=None)
        for _ in range(2):
            net(torch.tensor([[3.0, -1.0]]))
            assert [(r.name, r.stats.max_val, r.order) for r in monitor.activities] == [
                ("relu", 3.0, 0),
                ("relu#2", 2.0, 1),
            ]

    def test_a_module_under_two_names_goes_by_the_first(self):
        relu = nn.ReLU()
        net = nn.Sequential(OrderedDict(a=relu, b=nn.Tanh(), c=relu))
        monitor = ActivationMonitor(net, modules=nn.ReLU)
        net(torch.ones(1, 2))
        assert [record.name for record in monitor.activities] == ["a", "a#2"]

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

    def test_evaluation_is_watched_if_asked_for(self):
        net = relu_net().eval()
        monitor = ActivationMonitor(net, training_only=False)
        with torch.inference_mode():
            net(torch.ones(2, 6))
        assert monitor.cost.num_samples == 1 and by_name(monitor)["1"].stats.total_elements == 24

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

    def test_monitors_side_by_side_and_nested(self):
        net = nn.Sequential(relu_net(), nn.Linear(2, 2))
        outer = ActivationMonitor(net, modules="all", every=2, overhead_budget=None)
        inner = ActivationMonitor(net[0], modules="all", every=3, overhead_budget=None)
        for _ in range(7):
            net(torch.ones(2, 6))
        assert outer.cost.num_samples == 4 and inner.cost.num_samples == 3
        assert {"0.1", "1"} <= by_name(outer).keys() and "1" in by_name(inner)
        assert by_name(outer)["0.1"].stats == by_name(inner)["1"].stats
        outer.detach()
        inner.detach()
        assert num_hooks(net) == 0

    def test_under_vmap_outputs_are_skipped_visibly(self):
        net = relu_net()
        monitor = ActivationMonitor(net)
        torch.func.vmap(net)(torch.ones(3, 2, 6))
        assert monitor.skipped["1"] == "inside a torch.func transform"
