"""The guard keeps nothing alive, leaves nothing behind, and tells autograd what it changed."""

import copy
import gc
import math
import weakref

import pytest
import torch
import torch._dynamo  # torch imports it at the first step with a closure, and the import leaves frames in cycles
from guard_helpers import assert_identical, gradients, guarded_model, loss_at, make_model, poison, snapshot, take_step
from torch import nn

import fastguard


@pytest.fixture
def without_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("bad", [None, math.nan])
@pytest.mark.usefixtures("without_gc")
def test_gradients_are_freed_by_zero_grad(bad, backend):
    model, optimizer = guarded_model(_sgd, max_norm=0.01, backend=backend)
    take_step(model, optimizer, 0, bad=bad)
    refs = [weakref.ref(g) for g in gradients(model)]
    assert all(ref() is not None for ref in refs)
    optimizer.zero_grad(set_to_none=True)
    assert [ref() for ref in refs] == [None] * 4


def hooks_of(model, optimizer):
    owners = [optimizer, *model.modules(), *model.parameters()]
    found = [getattr(owner, name) for owner in owners for name in dir(owner) if name.endswith("_hooks")]
    return [hooks for hooks in found if isinstance(hooks, dict) and len(hooks)]


STAGES = ("Ledger", "Judge", "ModelFacts", "Observers", "Observed", "Rescue", "Hooks", "Checkup", "flush_at_end")


@pytest.mark.parametrize("stage", [*STAGES, "sinks"])
def test_a_wrap_that_is_refused_leaves_no_hook(stage, monkeypatch):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    optimizer = _sgd(model.parameters())
    settings = {"activations": True, "recovery": fastguard.Recovery()}
    if stage != "sinks":
        monkeypatch.setattr(f"fastguard.step.guard.{stage}", lambda *args: 1 / 0)
    try:
        fastguard.wrap(optimizer, model, sinks=[3] if stage == "sinks" else [], **settings)
    except (ZeroDivisionError, TypeError):
        assert hooks_of(model, optimizer) == []  # here already, while the traceback keeps what was made alive
    else:
        pytest.fail("not refused")
    monkeypatch.undo()
    fastguard.wrap(optimizer, model, **settings)
    assert len(hooks_of(model, optimizer)) > 5
    optimizer.guard.detach()
    assert hooks_of(model, optimizer) == []


@pytest.mark.parametrize("bad", [None, math.nan])
@pytest.mark.usefixtures("without_gc")
def test_parameters_and_optimizer_are_freed_by_their_last_reference(bad):
    model, optimizer = guarded_model(_sgd, max_norm=0.01)
    guard = optimizer.guard
    take_step(model, optimizer, 0)
    take_step(model, optimizer, 1, bad=bad, closure=True)
    refs = [weakref.ref(optimizer), weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
    del model, optimizer
    assert [ref() for ref in refs] == [None] * 6
    # A guard that outlives its optimizer still reports.
    assert guard.report().numbers["num_steps"] == 2
    assert guard.last.tensors.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    guard.detach()
    guard.close()


OPTIMIZERS = {
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_detach_leaves_the_optimizer_as_it_was(make, num_steps):
    model = make_model()
    optimizer = make(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    before = {name: copy.copy(value) for name, value in vars(optimizer).items()}
    guard = fastguard.wrap(optimizer, model, max_norm=1e-3).guard
    for step in range(num_steps):
        take_step(model, optimizer, step, closure=True)
    guard.detach()
    assert vars(optimizer).keys() == before.keys()
    for name in before.keys() - {"state", "param_groups", "_numel_cache"}:  # the last is a cache of LBFGS's own
        assert vars(optimizer)[name] == before[name], name
    calls.clear()

    plain = copy.deepcopy(model)
    unguarded = make(plain)
    unguarded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_step(plain, unguarded, 5, closure=True)
    take_step(model, optimizer, 5, closure=True)
    assert calls == ["pre", "post"]  # theirs stay
    assert_identical(snapshot(model, optimizer), snapshot(plain, unguarded))
    assert guard.history.num_steps == num_steps
    with pytest.raises(fastguard.NotGuardedError):
        fastguard.Guard.of(optimizer)
    guard.detach()  # again does nothing


def test_hooks_of_others_see_what_they_would_see():
    """A pre-hook that was there first sees the whole gradients, one that came later the clipped ones."""
    model = make_model()
    optimizer = _sgd(model.parameters())
    norms = []

    def look(*_):
        norms.append(float(torch.nn.utils.get_total_norm([g for g in gradients(model) if g is not None])))

    optimizer.register_step_pre_hook(look)
    fastguard.wrap(optimizer, model, max_norm=0.01)
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    take_step(model, optimizer, 0)
    assert norms == pytest.approx([optimizer.guard.last.norm, 0.01, 0.01], rel=1e-3)
    norms.clear()
    take_step(model, optimizer, 1, bad=math.nan)
    assert all(math.isnan(norm) for norm in norms) and len(norms) == 3  # the gradients stay where they are


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_versions_are_bumped_by_clipping_alone(max_norm, backend):
    model, optimizer = guarded_model(_sgd, max_norm=max_norm, backend=backend)
    loss_at(model, 0).backward()
    before = [g._version for g in gradients(model)]
    optimizer.step()
    bumped = [g._version > b for g, b in zip(gradients(model), before, strict=True)]
    assert bumped == [max_norm == 0.01] * 4


class Idle(torch.optim.Optimizer):
    """A step that changes nothing, so that only what the guard does is seen."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def _with_graph(model):
    """Gradients that can be differentiated again, as for a gradient penalty."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss_at(model, 0), parameters, create_graph=True)
    for p, gradient in zip(parameters, found, strict=True):
        p.grad = gradient


@pytest.mark.parametrize("clips", [True, False])
def test_a_graph_through_clipped_gradients_fails_rather_than_go_on(clips, backend):
    model, optimizer = guarded_model(Idle, max_norm=0.01 if clips else 1e6, backend=backend)
    _with_graph(model)
    penalty = sum(g.square().sum() for g in gradients(model))
    optimizer.step()
    assert optimizer.guard.last.clipped == clips
    assert optimizer.guard.last.lr is None
    if not clips:
        assert all(g is not None for g in torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)[:3])
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)


def test_the_step_changes_neither_grad_mode_nor_requires_grad():
    model, optimizer = guarded_model(_sgd, max_norm=0.01)
    for enabled in (True, False):
        with torch.set_grad_enabled(True):
            optimizer.zero_grad()
            loss_at(model, 0).backward()
            poison(model, math.nan if not enabled else 1.0)
        with torch.set_grad_enabled(enabled):
            optimizer.step()
            assert torch.is_grad_enabled() == enabled
    assert all(p.requires_grad for p in model.parameters())
    assert not any(g.requires_grad for g in gradients(model))
