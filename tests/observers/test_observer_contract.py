"""One contract for everything that looks beside the gradients: what it costs, when it is called, what it leaves."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from typing import Any

import pytest
import torch
from guard_helpers import Allocations
from torch import nn

import fastguard
import fastguard.observers
import fastguard.ranks
from fastguard.kernels import cpu
from fastguard.observers.activations.monitor import ActivationWatch
from fastguard.observers.batches import BatchWatch
from fastguard.observers.coverage import CoverageWatch, LeftGradients
from fastguard.observers.observer import Observer
from fastguard.observers.sketches import Sketches
from fastguard.observers.weights import WeightWatch

SCHEDULED = (LeftGradients, Sketches, CoverageWatch, WeightWatch, ActivationWatch)
HELD = {"FirstPass", "NormStatistics", "Buffers"}  # by another part of the guard, which calls them
WHOLE = {"activations": {"every": 3, "overhead_budget": None}, "weights": 4}


def kinds() -> dict[str, type[Observer]]:
    for package in (fastguard.observers, fastguard.ranks):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found, waiting = {}, [Observer]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            found[kind.__name__] = kind
    return {name: kind for name, kind in found.items() if name[0] != "_" and kind.__module__.startswith("fastguard.")}


def make(width: int = 8) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))
    return model, torch.optim.SGD(
        [*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.01
    )  # the last has no gradient


def train(model: nn.Module, optimizer: Any, num_steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        x = torch.randn(64, model[0].in_features, generator=generator)  # type: ignore[index, arg-type]
        nn.functional.cross_entropy(model(x), torch.arange(64) % 4).backward()
        optimizer.step()
    return [p.detach().clone() for p in (*model.parameters(), *model.buffers())]


def observers_of(optimizer: Any) -> list[Observer]:
    return list(optimizer.guard._observers._next)


def hooks_of(model: nn.Module) -> list[Any]:
    on_modules = [[*m._forward_hooks, *m._forward_pre_hooks, *m._load_state_dict_post_hooks] for m in model.modules()]
    on_parameters = [[p._backward_hooks, p._post_accumulate_grad_hooks] for p in model.parameters()]
    return [hook for hooks in on_modules for hook in hooks] + [one for pair in on_parameters for one in pair if one]


def test_every_observer_is_known_here() -> None:
    model, optimizer = make()
    fastguard.wrap(optimizer, model, **WHOLE)
    own = {type(one).__name__ for one in observers_of(optimizer)}
    assert own == {kind.__name__ for kind in (*SCHEDULED, BatchWatch)}
    assert kinds().keys() == own | HELD


@pytest.mark.parametrize("name", sorted(kinds()))
def test_each_says_what_it_costs(name: str) -> None:
    assert "Cost" in (kinds()[name].__doc__ or "")


@pytest.mark.parametrize("method", ["before", "after", "next_after", "facts"])
@pytest.mark.parametrize("kind", SCHEDULED)
def test_one_that_raises_is_counted_and_changes_nothing(
    kind: type[Observer], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(*make(), 30)
    model, optimizer = make()
    fastguard.wrap(optimizer, model, **WHOLE)
    monkeypatch.setattr(kind, method, lambda self, *args: 1 / 0)
    found = train(model, optimizer, 30)
    assert all(map(torch.equal, found, expected))
    guard: Any = optimizer.guard
    guard.flush()
    guard.report()
    assert guard.history.num_steps == 30
    assert any(failure.error.startswith("ZeroDivisionError") for failure in guard._run.failures)
    others = {type(one) for one in observers_of(optimizer)} - {kind}
    assert WeightWatch not in others or guard.history.weights
    assert Sketches not in others or guard.history.grad_cosines


def test_each_is_called_around_the_steps_that_it_asks_for() -> None:
    model, optimizer = make()
    fastguard.wrap(optimizer, model, weights=10)
    called = Counter[str]()
    for observer in observers_of(optimizer):
        for name in ("before", "after"):
            key, method = f"{type(observer).__name__}.{name}", getattr(observer, name)
            setattr(observer, name, lambda step, key=key, method=method: (called.update([key]), method(step)))
    train(model, optimizer, 100)
    expected = {"LeftGradients": 21, "Sketches": 23, "CoverageWatch": 23, "WeightWatch": 10}
    for kind, num_calls in expected.items():
        assert called[f"{kind}.before"] <= called[f"{kind}.after"] == num_calls, called
    assert called["WeightWatch.before"] == 10 and called["Sketches.before"] >= 6  # after each KEEP, and no other step


def test_gradients_set_by_hand_keep_nothing_awake() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer: Any = fastguard.wrap(torch.optim.SGD([p], lr=0.1))
    for _ in range(100):  # 64 of them wait for a backward pass
        p.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.guard._run.wakes_at > 100 and not optimizer.guard._run.has_more_to_do


@pytest.mark.skipif(cpu.extension is None, reason="the extension is not built")
def test_no_look_allocates_more_than_a_mebibyte() -> None:
    model, optimizer = make(1024)  # whose weight has 4 MiB
    fastguard.wrap(optimizer, model, **WHOLE)
    seen = Counter[str]()
    for observer in observers_of(optimizer):
        for name in ("before", "after", "_look"):
            method = getattr(observer, name, None)
            if method is None:
                continue

            def looking(*args: Any, method: Any = method, key: str = type(observer).__name__) -> None:
                with Allocations() as allocations:
                    method(*args)
                seen[key] = max(seen[key], 1, allocations.largest)

            setattr(observer, name, looking)
    train(model, optimizer, 30)
    assert seen.keys() == {kind.__name__ for kind in (*SCHEDULED, BatchWatch)}
    assert {name: size for name, size in seen.items() if size > 1 << 20} == {}
    assert not optimizer.guard._run.failures.counts()


@pytest.mark.parametrize("num_steps", [0, 1, 30])
def test_detach_removes_every_hook(num_steps: int) -> None:
    model, optimizer = make()
    fastguard.wrap(optimizer, model, **WHOLE)
    train(model, optimizer, num_steps)
    assert hooks_of(model)
    optimizer.guard.detach()
    assert hooks_of(model) == []
