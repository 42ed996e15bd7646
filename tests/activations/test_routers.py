"""Routers: which modules are taken for one, and what their load, entropy and unused experts are."""

import math

import pytest
import torch
from choosing_models import Block, Experts, Heads, Language, StackedMoe
from torch import nn
from torch.nn import functional as F

from fastguard import ActivationMonitor
from fastguard.observers.activations.choices import routers_of
from fastguard.observers.activations.selection import names_of
from fastguard.report import build_report
from fastguard.report.tables import module_rows, sample_tables
from fastguard.visualization import plot_activations

from made_runs import activity, attending, routing, with_activities


def routed(monitor):
    return {r.name.removesuffix("[router]"): r for r in monitor.activities if r.family == "router"}


def names(model, selector="default"):
    return [target.name for target, _ in routers_of(names_of(model), selector, lambda target: True)]


class TestWhichTheyAre:
    def test_of_all_kinds(self):
        renamed = Experts()
        renamed.choice, renamed.gate = renamed.gate, nn.Identity()
        deep = Experts(router=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
        model = nn.ModuleDict({"plain": Experts(), "deep": deep, "stacked": StackedMoe(), "renamed": renamed})
        assert names(model) == ["plain.gate", "deep.gate", "stacked.router", "renamed.choice"]
        assert names(Experts()) == ["gate"]

    def test_by_pattern_module_or_not_at_all(self):
        model = Language(Block(Heads(), Experts()), Block(Heads(), Experts()))
        assert names(model, r"1\.mlp\.gate") == names(model, model.blocks[1].mlp.gate) == ["blocks.1.mlp.gate"]
        assert names(model, None) == []
        with pytest.raises(ValueError, match=r"`routers` must fit a module, got 'rooter'"):
            ActivationMonitor(model, routers="rooter")


class TestWhatTheyChoose:
    x = torch.randn(3, 50, 16, generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize("kind", ["logits", "probabilities", "stacked"])
    def test_load_and_entropy(self, kind):
        torch.manual_seed(0)
        softmax = nn.Sequential(nn.Linear(16, 8), nn.Softmax(-1))
        model = {"logits": Experts(), "probabilities": Experts(router=softmax), "stacked": StackedMoe()}[kind]
        if kind == "probabilities":
            model.forward = lambda x: softmax(x)  # chosen from the probabilities themselves
            model.gate.register_forward_hook(lambda m, a, output: None)
        monitor = ActivationMonitor(model)
        nn.Module.__call__(model, self.x)
        (found,) = routed(monitor).values()
        with torch.no_grad():
            scores = model.router(self.x)[0] if kind == "stacked" else model.gate(self.x).flatten(0, 1)
        p = (scores if kind == "probabilities" else scores.softmax(-1)).double()
        load = F.one_hot(p.topk(2).indices, 8).sum(1).double().mean(0)
        assert found.load == pytest.approx(load.tolist()) and sum(found.load) == pytest.approx(2.0)
        assert found.entropy == pytest.approx(float((-p * p.log()).sum(-1).mean()) / math.log(8), rel=1e-5)
        assert (found.num_units, found.num_dead_units) == (8, 0) and found.stats.total_elements == 150 * 8

    def test_indices_go_before_scores(self):
        class Router(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 16))

            def forward(self, x):  # the bias of the choice is in no score
                return F.linear(x, self.weight), torch.full((*x.shape[:-1], 1), 3)

        model = nn.Sequential()
        model.router, model.experts = Router(), nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        model.forward = lambda x: model.router(x)
        monitor = ActivationMonitor(model)
        model(self.x)
        assert routed(monitor)["router"].load == (0.0, 0.0, 0.0, 1.0)

    def test_an_expert_with_few_tokens_lives_and_one_with_none_is_dead_once_the_window_says_so(self):
        model = Experts(num=4, top_k=1)
        with torch.no_grad():
            model.gate.weight.zero_()
            model.gate.weight[:, 0] = torch.tensor([9.0, -9.0, 0.0, -20.0])
        x = torch.ones(1, 300, 16)
        monitor = ActivationMonitor(model, every=1, window=3, overhead_budget=None)
        for few in (True, False, True):
            x[0, 0, 0] = -1.0 if few else 1.0  # to expert 3, whose weight is the least
            model(x)
        found = routed(monitor)["gate"]
        assert found.load[3] == pytest.approx(1 / 300) and found.dead_units == (1, 2) and found.num_batches == 3

    @pytest.mark.slow
    def test_a_compiled_model_shows_the_same(self):
        torch.manual_seed(0)
        model = nn.Sequential(StackedMoe())
        found = []
        for run in (model, torch.compile(model, backend="aot_eager")):
            monitor = ActivationMonitor(model)
            run(self.x)
            found.append(routed(monitor))
            monitor.detach()
        assert list(found[0]) == list(found[1]) == ["0.router"]
        assert found[0]["0.router"].load == found[1]["0.router"].load


@pytest.fixture
def history():
    return with_activities(activity("relu"), attending(max_logit=123.0, entropy=0.25), routing([0.9, 0.9, 0.2, 0.0]))


def test_in_the_report(history):
    activations, choices = sample_tables(module_rows(history), ())
    assert [line.split() for line in choices] == [
        ["choices", "of", "entropy", "max", "logit", "max", "load", "unused", "experts"],
        ["attn[attention]", "25%", "123", "-", "-"],
        ["moe.gate[router]", "50%", "-", "90%", "1", "of", "4"],
    ]
    assert [line.split()[0] for line in activations] == ["activations", "relu"]
    assert "choices of" in str(build_report(history))


def test_in_figures(history):
    pytest.importorskip("plotly", reason="plotly is not installed")
    rows = lambda value: plot_activations(history, value).data[0].y  # noqa: E731
    assert {"attn[attention]", "moe.gate[router]"} == {*rows("entropy")} and {*rows("zeros")} == {"relu"}
