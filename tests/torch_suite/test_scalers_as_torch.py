"""`torch.amp.GradScaler` on the CPU with guarded optimizers: what it is told, what it raises, what it leaves."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from comparing import attempt, in_all_modes
from guard_helpers import loss_at, make_model
from torch import optim
from torch.amp import GradScaler
from torch_optimizers import OPTIMIZERS, WITHOUT_CLOSURE, copied, make_parameters, set_gradients, state_of

SETTINGS: dict[str, Any] = {"init_scale": 128.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}


def _scaler(**settings: Any) -> GradScaler:
    return GradScaler("cpu", **{**SETTINGS, **settings})


def _scaler_that_has_scaled() -> GradScaler:
    scaler = _scaler()
    scaler.scale(torch.ones(()))
    return scaler


def _backward(model: torch.nn.Module, scaler: GradScaler, step: int, bad: float | None = None) -> None:
    model.zero_grad()
    scaler.scale(loss_at(model, step)).backward()
    if bad is not None:
        next(model.parameters()).grad.view(-1)[3] = bad


OPTIMIZERS_HERE: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9),
    "SGD, fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda ps: optim.Adam(ps, lr=0.02, foreach=True),
    "AdamW, fused": lambda ps: optim.AdamW(ps, lr=0.02, fused=True),
    "Adagrad, fused": lambda ps: optim.Adagrad(ps, lr=0.02, fused=True),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.02),
}


def _plain(scaler: GradScaler, optimizer: Any, model: torch.nn.Module) -> None:
    scaler.step(optimizer)


def _unscaled(scaler: GradScaler, optimizer: Any, model: torch.nn.Module) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def _clipped(scaler: GradScaler, optimizer: Any, model: torch.nn.Module) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    scaler.step(optimizer)


def _clipped_by_value(scaler: GradScaler, optimizer: Any, model: torch.nn.Module) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    scaler.step(optimizer)


WAYS = {"plain": _plain, "unscaled": _unscaled, "clipped": _clipped, "clipped by value": _clipped_by_value}


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("name", OPTIMIZERS_HERE)
@pytest.mark.parametrize("enabled", [True, False])
@in_all_modes
def test_growth_and_backoff(name: str, enabled: bool, thorough: bool) -> Any:
    """Inf and NaN at some steps: they are skipped, the scale halves, and grows again."""
    results = []
    for way in WAYS if thorough else ["plain", "clipped"] if enabled else ["plain"]:
        model = make_model()
        optimizer = OPTIMIZERS_HERE[name](model.parameters())
        scaler = _scaler(enabled=enabled)
        bad = {1: math.inf, 2: math.nan, 6: -math.inf} if enabled else {}
        for step in range(8):
            _backward(model, scaler, step, bad.get(step))
            before = copied([p.detach() for p in model.parameters()])
            WAYS[way](scaler, optimizer, model)
            after = [p.detach() for p in model.parameters()]
            assert (step in bad) == all(torch.equal(a, b) for a, b in zip(after, before))
            scaler.update()
            results.append([scaler.get_scale(), scaler._get_growth_tracker()])
            assert not {"found_inf", "grad_scale"} & set(vars(optimizer))
        results.append(state_of(model.parameters(), optimizer, scaler))
    return results


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("name", [name for name in WITHOUT_CLOSURE if name != "Muon"])
@in_all_modes
def test_every_optimizer_under_a_scaler(name: str) -> Any:
    spec = OPTIMIZERS[name]
    results = []
    for way in spec.ways:
        model = make_model()
        optimizer = spec.cls(model.parameters(), **way)
        scaler = _scaler()
        for step in range(4):
            _backward(model, scaler, step, math.inf if step == 2 else None)
            scaler.step(optimizer)
            scaler.update()
        results.append(state_of(model.parameters(), optimizer, scaler))
    return results


@in_all_modes
def test_state_and_settings_of_a_scaler() -> Any:
    results: list[Any] = []
    for lazy in (True, False):
        model = make_model()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler = _scaler()
        if not lazy:
            for step in range(3):
                _backward(model, scaler, step)
                scaler.step(optimizer)
                scaler.update()
        copy = pickle.loads(pickle.dumps(scaler)) if lazy else _scaler(init_scale=3.0)
        copy.load_state_dict(scaler.state_dict())
        for each in (scaler, copy):
            each.set_growth_factor(4.0)
            each.set_backoff_factor(0.25)
            each.set_growth_interval(1)
            for step in range(3, 6):
                _backward(model, each, step, math.inf if step == 4 else None)
                each.step(optimizer)
                each.update()
            _backward(model, each, 6)
            each.step(optimizer)
            each.update(new_scale=8.0)
            results.append([each.state_dict(), each.get_growth_factor(), each.is_enabled()])
            each.update(torch.tensor(16.0))
            results.append(each.get_scale())
        results.append(state_of(model.parameters(), optimizer))
    return copied(results)


@in_all_modes
def test_errors_of_a_scaler() -> Any:
    """Same type, same words, and it goes on afterwards."""
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = _scaler()
    results = [attempt(scaler.unscale_, optimizer), attempt(scaler.update)]
    _backward(model, scaler, 0)
    results += [attempt(scaler.step, optimizer, closure=lambda: None), attempt(scaler.update)]
    scaler.unscale_(optimizer)
    results += [attempt(scaler.unscale_, optimizer), attempt(scaler.step, optimizer)]
    results += [attempt(scaler.step, optimizer), attempt(scaler.unscale_, optimizer)]
    scaler.update()
    results.append(attempt(scaler.load_state_dict, {}))
    fresh = _scaler()
    _backward(model, fresh, 1)
    fresh.step(optimizer)
    fresh.update()
    return [results, state_of(model.parameters(), optimizer, fresh)]


@in_all_modes
def test_a_scaled_step_without_any_gradient() -> Any:
    """Nobody has looked for Infs: torch says so in `step`; for optimizers that unscale by themselves, in `update`."""
    optimizer = optim.SGD(make_model().parameters(), lr=0.1)
    scaler = _scaler_that_has_scaled()
    return [attempt(scaler.update), attempt(scaler.step, optimizer), attempt(scaler.update)]


@in_all_modes
def test_float16_gradients_are_not_unscaled() -> Any:
    """torch refuses them; for optimizers that unscale by themselves, in `unscale_` only."""
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones(2, dtype=torch.float16)
    optimizer = optim.SGD([half], lr=0.1)
    results = [attempt(_scaler_that_has_scaled().unscale_, optimizer)]
    return [*results, attempt(_scaler_that_has_scaled().step, optimizer), half.detach()]


@pytest.mark.parametrize("fused", [False, True])
@in_all_modes
def test_several_models_losses_and_optimizers(fused: bool) -> Any:
    """Two losses through both models; one optimizer steps where the other one's gradients hold an Inf."""
    results = []
    for unscaling in (set(), {0}, {0, 1}):
        models = [make_model(seed=i) for i in range(2)]
        optimizers = [
            optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9, fused=fused),
            optim.Adam(models[1].parameters(), lr=0.02, fused=fused),
        ]
        scaler = _scaler()
        for step in range(5):
            for model in models:
                model.zero_grad()
            losses = [loss_at(model, step) for model in models]
            scaled = scaler.scale([losses[0] + 0.5 * losses[1], losses[1]])
            scaled[0].backward(retain_graph=True)
            scaled[1].backward()
            if step in (1, 3):
                next(models[step // 3].parameters()).grad.view(-1)[0] = math.inf
            for i in unscaling:
                scaler.unscale_(optimizers[i])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            results.append(scaler.get_scale())
        results.append([state_of(m.parameters(), o) for m, o in zip(models, optimizers)])
    return results


@in_all_modes
def test_accumulated_gradients_and_penalties() -> Any:
    """A step after two backward passes; a penalty on scaled gradients, which have to be unscaled by hand."""
    model = make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    scaler = _scaler()
    results = []
    for step in range(8):
        scaler.scale(loss_at(model, step) / 2).backward()
        if step % 2:
            if step == 3:
                next(model.parameters()).grad.view(-1)[0] = math.nan
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            results.append(scaler.get_scale())
    for step in range(3):
        loss = loss_at(model, step)
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        penalty = torch.stack([(g / scaler.get_scale()).square().sum() for g in scaled]).sum().sqrt()
        optimizer.zero_grad()
        scaler.scale(loss + penalty).backward()
        scaler.step(optimizer)
        scaler.update()
    return [results, state_of(model.parameters(), optimizer, scaler)]


@in_all_modes
def test_sparse_and_half_gradients() -> Any:
    """Sparse ones are unscaled as they are; a bfloat16 model under autocast."""
    table = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = optim.SGD([table], lr=0.1)
    scaler = _scaler()
    results = []
    for step in range(4):
        scaler.scale(torch.ones(()))  # makes the scale
        set_gradients([table], step, sparse=True)
        if step == 2:
            table.grad._values()[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        results.append([scaler.get_scale(), table.detach().clone()])
    model = make_model()
    second = optim.Adam(model.parameters(), lr=0.02)
    for step in range(3):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_at(model, step)
        scaler.scale(loss).backward()
        scaler.step(second)
        scaler.update()
    return [results, state_of(model.parameters(), second, scaler)]


class _TakesScaler(optim.SGD):
    """Looks for Infs and unscales by itself, as `GradScaler.step` allows."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        if any(found.item() for found in grad_scaler._check_inf_per_device(self).values()):
            return "left out"
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / grad_scaler.get_scale(), alpha=group["lr"])
        return "taken"


@in_all_modes
def test_an_optimizer_that_is_given_the_scaler() -> Any:
    model = make_model()
    optimizer = _TakesScaler(model.parameters(), lr=0.1)
    scaler = _scaler()
    gave = []
    for step in range(3):
        _backward(model, scaler, step, math.inf if step == 1 else None)
        with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
            gave.append(scaler.step(optimizer))
        scaler.update()
    assert gave == ["taken", "left out", "taken"]
    return [gave, state_of(model.parameters(), optimizer, scaler)]


@pytest.mark.parametrize("fused", [False, True])
@in_all_modes
def test_gradients_that_go_bad_after_they_were_unscaled(fused: bool) -> Any:
    """A scaler does not look again: unguarded, the parameters become NaN."""
    model = make_model()
    optimizer = optim.Adam(model.parameters(), lr=0.02, fused=fused)
    scaler = _scaler()
    _backward(model, scaler, 0)
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.fill_(math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert all(p.isnan().all() for p in model.parameters()), "the parameters were kept"
    return state_of(model.parameters(), optimizer, scaler)


@in_all_modes
def test_a_scaler_that_is_copied_midway() -> Any:
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = _scaler()
    _backward(model, scaler, 0)
    scaler.unscale_(optimizer)
    results = [attempt(pickle.dumps, scaler), attempt(deepcopy, scaler)]
    scaler.step(optimizer)
    scaler.update()
    parameters = make_parameters([(2, 2)])
    other = optim.SGD(parameters, lr=0.1)
    set_gradients(parameters, 0)
    results.append(attempt(scaler.step, other))
    return [[r if isinstance(r, str) or r is None else type(r).__name__ for r in results], state_of(parameters, other)]
