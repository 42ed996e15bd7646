"""ActivationMonitor: what it takes and selects, when it samples, what modules may return, and what it leaves behind."""

import copy
import dataclasses
import io
import logging
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastguard import ActivationMonitor, detect_dead_neurons
from fastguard.observers.activations.collector import Budget

from activation_models import Transformer, by_name, origins, relu_net, taken


class TestToolkit:
    @pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["ndarray", "tensor"])
    def test_dead_and_saturated_layers(self, make):
        monitor = ActivationMonitor(window_size=100)
        for _ in range(12):
            monitor.record("dead", make([0.0, 0.0, 0.5]))
            monitor.record("saturated", make([0.995, -0.2, 0.1, 0.3]))
            monitor.record("both", make([0.0, 0.0, 0.0, 2.0]))
            monitor.record("fine", make([0.3, -0.4, 0.0]))
        assert monitor.diagnose() == {"dead": "Dead", "saturated": "Saturated", "both": "Dead, Saturated"}

    def test_dead_neurons(self):
        x = np.array([[0.0, 1.0, 0.005, np.nan], [0.0, -1.0, -0.005, 0.0]], dtype=np.float32)
        assert detect_dead_neurons(x) == (2, 0.5)
        assert detect_dead_neurons(torch.from_numpy(x), threshold=0.001) == (1, 0.25)
        assert detect_dead_neurons(torch.zeros(5, 2, 3)) == (6, 1.0)
        assert detect_dead_neurons(torch.zeros(5)) == (1, 1.0)
        assert detect_dead_neurons(torch.full((4, 3), 6e4).half()) == (0, 0.0)


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPERS = [nn.DataParallel, compiled, lambda model: nn.DataParallel(compiled(model))]


class TestSelection:
    def test_of_other_modules_only_what_is_not_finite_is_recorded(self):
        net = Transformer(num_blocks=1)
        monitor = ActivationMonitor(net, every=1, overhead_budget=None)
        net(torch.randint(0, 11, (2, 5)))
        assert set(by_name(monitor)) == set(monitor.names)
        with torch.no_grad():
            net.blocks[0].mlp[2].weight[0, 0] = torch.nan
        net(torch.randint(0, 11, (2, 5)))
        assert set(by_name(monitor)) > set(monitor.names)
        assert [record.name for record in monitor.activities if record.is_origin] == ["blocks.0.mlp.2"]
        with torch.no_grad():
            net.blocks[0].mlp[2].weight[0, 0] = 0.0
        net(torch.randint(0, 11, (2, 5)))
        assert by_name(monitor)["blocks.0.mlp.2"].stats.is_finite  # seen to have recovered

    @pytest.mark.parametrize(
        ("settings", "names"),
        [
            ({"modules": r"\.1\.attn$"}, ["blocks.1.attn"]),
            ({"modules": r"mlp\.1$|^head$"}, ["blocks.0.mlp.1", "blocks.1.mlp.1", "head"]),
        ],
    )
    def test_by_pattern(self, settings, names):
        assert sorted(ActivationMonitor(Transformer(), **settings).names) == names

    def test_nothing_to_watch_is_refused(self):
        with pytest.raises(ValueError, match="must match at least one module, got none") as error:
            ActivationMonitor(Transformer(), modules="nothing")
        assert "'blocks.0'" in str(error.value)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"modules": "("}, "`modules` must be a regular expression"),
            ({"modules": nn.GELU}, "`modules` must be a regular expression"),
            ({"every": 0}, "`every` must be an integer >= 1, got 0"),
            ({"window_size": 1.5}, "`window_size` must be an integer"),
            ({"overhead_budget": 0.0}, "`overhead_budget` must be > 0 or None"),
            ({"backend": "nothing"}, "`backend` must be one of"),
        ],
    )
    def test_bad_settings_are_refused(self, settings, message):
        with pytest.raises((ValueError, TypeError), match=message):
            ActivationMonitor(relu_net(), **settings)

    @pytest.mark.parametrize("wrap", WRAPPERS)
    def test_names_of_wrappers_are_left_out(self, wrap):
        names = ActivationMonitor(wrap(relu_net()), modules="all").names
        assert names == ("Sequential", "0", "1", "2", "3", "4")


class TestFamilies:
    @pytest.mark.parametrize(
        ("module", "family", "x", "num_saturated"),
        [
            (nn.Sigmoid(), "sigmoid", [-9.0, 0.0, 9.0], 2),
            (nn.Tanh(), "tanh", [-9.0, 0.0, 9.0], 2),
            (nn.Hardtanh(-3.0, 1.0), "hardtanh", [-9.0, 0.0, 0.9, 9.0], 2),
            (nn.ReLU6(), "relu", [-9.0, 0.0, 5.0, 9.0], 1),
            (nn.ReLU(), "relu", [-9.0, 0.0, 9.0], 0),
            (nn.ELU(2.0), "gelu", [-9.0, 0.0, 9.0], 1),
            (nn.SELU(), "gelu", [-9.0, 0.0, 9.0], 1),
            (nn.SiLU(), "gelu", [-9.0, 0.0, 9.0], 0),
            (nn.Softmax(-1), "softmax", [0.0, 9.0, 0.0], 0),
            (nn.LayerNorm(3), "norm", [-9.0, 0.0, 9.0], 0),
            (nn.Linear(3, 3), "linear", [-99.0, 0.0, 99.0], 0),
        ],
    )
    def test_saturation(self, module, family, x, num_saturated):
        monitor = ActivationMonitor(nn.Sequential(module), modules="all")
        monitor_input = torch.tensor([x])
        nn.Module.__call__(module, monitor_input)
        monitor._follow_guard()
        record = {r.name: r for r in taken(monitor, 0)}["0"]
        assert (record.family, record.stats.num_saturated) == (family, num_saturated)

    def test_activation_functions_of_other_libraries_go_by_their_name(self):
        def family(name):
            module = type(name, (nn.Module,), {"forward": lambda self, x: x})()
            return ActivationMonitor(nn.Sequential(module), modules="all"), module

        for name, expected in [
            ("NewGELUActivation", "gelu"),
            ("LlamaRMSNorm", "norm"),
            ("ReLUSquaredActivation", "relu"),
            ("StochasticDropPath", "linear"),
        ]:
            monitor, module = family(name)
            module(torch.zeros(2, 2))
            monitor._follow_guard()
            assert {record.family for record in taken(monitor, 0)} == {expected}


class TestSampling:
    def test_a_monitor_follows_one_guard(self):
        monitor = ActivationMonitor(relu_net())
        monitor._follow_guard()
        with pytest.raises(RuntimeError, match="follows no other guard"):
            monitor._follow_guard()
        with pytest.raises(ValueError, match="must be a monitor of a model"):
            ActivationMonitor()._follow_guard()

    def test_hooks_that_see_nothing_are_reported(self, caplog):
        net = nn.Sequential(relu_net())
        monitor = ActivationMonitor(net)
        monitor._follow_guard()
        with caplog.at_level(logging.WARNING, "fastguard"):
            for step in range(5):
                taken(monitor, step)
        assert [record.getMessage()[:40] for record in caplog.records] == ["no output of the 4 watched modules was s"]
        net(torch.ones(1, 6))
        assert taken(monitor, 5)

    def test_the_interval_stretches_to_the_budget(self):
        budget = Budget(every=10, share=0.01)
        budget.step(None, 5.0, sampled=True)  # the first one does not count
        for _ in range(9):
            budget.step(0.1, 0.0, sampled=False)
        budget.step(0.13, 0.03, sampled=True)  # 0.03 s a sample, 0.1 s a step: 30 steps apart
        assert budget.interval == 30
        for _ in range(29):
            budget.step(0.1, 0.0, sampled=False)
        budget.step(0.101, 0.001, sampled=True)
        assert budget.interval == 10
        cost = budget.cost()
        assert (cost.num_samples, cost.num_steps) == (3, 41)
        assert cost.seconds == pytest.approx(5.031)


class TestTraces:
    def test_copies_and_files_of_the_model_hold_no_monitor(self):
        net = relu_net()
        monitor = ActivationMonitor(net)
        twin = copy.deepcopy(net)
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        for other in (twin, read):
            assert torch.equal(other(torch.ones(2, 6)), other(torch.ones(2, 6)))
        assert monitor.cost.num_steps == 0
        net(torch.ones(2, 6))
        assert monitor.cost.num_steps == 1


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

    def test_integers_and_bools_are_left_out(self):
        net = nn.Sequential(Returns(lambda x: (x, x.long(), x > 0)))
        monitor = ActivationMonitor(net, modules="^0$")
        net(torch.ones(2, 3))
        assert [record.name for record in monitor.activities] == ["0"]

    def test_nan_in_a_further_tensor_is_seen(self):
        net = nn.Sequential(Returns(lambda x: {"a": x, "b": Output(x, x / 0)}), Returns(lambda d: d["a"]))
        monitor = ActivationMonitor(net, modules="all")
        net(torch.zeros(2, 3))
        assert origins(monitor) == ["0['b'].count"]

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
        monitor._follow_guard()  # so that the step, and with it the sample, goes on during backward
        net(torch.ones(2, 3, requires_grad=True)).sum().backward()
        records = {record.name: record for record in taken(monitor, 0)}
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
        assert by_name(monitor)["1"].stats.total_elements == 24 and origins(monitor) == []
        assert {"1", "3"} <= by_name(monitor).keys() and "1#2" not in by_name(monitor)

    def test_under_vmap_outputs_are_left_out(self):
        net = relu_net()
        monitor = ActivationMonitor(net)
        torch.func.vmap(net)(torch.ones(3, 2, 6))
        assert monitor.activities == () and monitor.failures.counts() == {}


NAMES = {"blocks.0.attn", "blocks.1.mlp.1", "norm", "Transformer"}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("watch_inner", [False, True])
def test_under_ddp(watch_inner):
    net = Transformer()
    model = torch.nn.parallel.DistributedDataParallel(net)
    monitor = ActivationMonitor(net if watch_inner else model, every=2, overhead_budget=None)
    for _ in range(3):
        model(torch.randint(0, 11, (2, 5))).sum().backward()
    names = {record.name for record in monitor.activities}
    assert names >= NAMES and not any("module" in name for name in names)
    assert monitor.cost.num_steps == 3 and monitor.cost.num_samples == 2


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's own
def test_under_fully_shard():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Transformer()
    mesh = init_device_mesh("cpu", (1,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    monitor = ActivationMonitor(net, every=2, overhead_budget=None)
    for _ in range(3):
        net(torch.randint(0, 11, (2, 5))).sum().backward()
    assert {record.name for record in monitor.activities} >= NAMES
    assert monitor.cost.num_samples == 2
