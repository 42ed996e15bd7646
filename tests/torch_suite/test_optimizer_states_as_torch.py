"""State dicts, copies, hooks and errors of all optimizers of torch.optim, guarded."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from comparing import attempt, in_all_modes
from guard_helpers import assert_identical
from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_optimizers import (
    OPTIMIZERS,
    WITHOUT_CLOSURE,
    Spec,
    make_parameters,
    set_gradients,
    state_of,
    take_steps,
)


def _steps(spec: Spec) -> dict[str, bool]:
    """What `take_steps` has to be told."""
    return {"sparse": spec.sparse == "only", "closure": spec.closure}


def _later(spec: Spec, state: dict[str, Any], parameters: list[Any], **way: Any) -> Any:
    """What becomes of `parameters` in two steps of an optimizer that has loaded `state`."""
    parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = spec.cls(parameters, **way)
    optimizer.load_state_dict(state)
    gave = attempt(take_steps, optimizer, parameters, range(5, 7), **_steps(spec))
    return [state_of(parameters, optimizer), gave]


@pytest.mark.parametrize("name", OPTIMIZERS)
@in_all_modes
def test_going_on_from_a_state_dict(name: str, thorough: bool) -> Any:
    """Deep-copied, pickled, saved and loaded with `weights_only`; with a step that is a number; with flags missing that
    came later than the optimizer."""
    spec = OPTIMIZERS[name]
    results = []
    for way in spec.ways if thorough else spec.ways[-1:]:
        parameters = make_parameters(spec.shapes)
        optimizer = spec.cls(parameters, **way)
        take_steps(optimizer, parameters, range(2), **_steps(spec))
        state = optimizer.state_dict()
        assert list(state) == ["state", "param_groups"] and "guard" not in state["param_groups"][0]
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        plain = deepcopy(state)
        for entry in plain["state"].values():
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = entry["step"].item()
        older = deepcopy(state)
        for group in older["param_groups"]:
            for key in ("foreach", "fused", "differentiable", "maximize", "capturable"):
                group.pop(key, None)
        forms = [deepcopy(state), pickle.loads(pickle.dumps(state)), torch.load(file, weights_only=True), plain]
        later = [_later(spec, form, parameters, **way) for form in [*forms, older]]
        take_steps(optimizer, parameters, range(5, 7), **_steps(spec))
        for (others, _), _ in later[:3]:
            assert_identical(others, state_of(parameters)[0])
        results += [*later, state_of(parameters, optimizer)]
    return results


@pytest.mark.parametrize("name", OPTIMIZERS)
@in_all_modes
def test_step_hooks_in_their_order(name: str) -> Any:
    """Hooks of the optimizer and of all optimizers; those that change the arguments; removed ones."""
    spec = OPTIMIZERS[name]
    parameters = make_parameters(spec.shapes)
    optimizer = spec.cls(parameters, **spec.ways[-1])
    calls: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before all")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after all")),
        optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("before", len(args), sorted(kwargs)))),
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("after", len(args), sorted(kwargs)))),
    ]
    try:
        for step in range(4):
            take_steps(optimizer, parameters, [step], **_steps(spec))
            calls.append([p.detach().clone() for p in parameters])
            if step:
                handles.pop(0).remove()
    finally:
        for handle in handles:
            handle.remove()
    names = [call if isinstance(call, str) else call[0] for call in calls if not isinstance(call, list)]
    assert names[:4] == ["before all", "before", "after", "after all"]
    assert names[8:] == ["before", "after", "after all", "before", "after"]
    return [calls, state_of(parameters, optimizer)]


@in_all_modes
def test_hooks_that_change_what_the_step_is_given() -> Any:
    parameters = make_parameters([(4, 3), (5,)])
    optimizer = optim.SGD(parameters, lr=0.1)
    seen = []

    def closure() -> torch.Tensor:
        return torch.tensor(1.0)

    def with_closure(optimizer: Any, args: Any, kwargs: Any) -> Any:
        for p in parameters:
            p.grad = torch.full_like(p, 2.0)  # gradients, too
        return (args[0], closure), {}

    handle = optimizer.register_step_pre_hook(with_closure)
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(len(args)))
    gave = [optimizer.step() for _ in range(2)]
    handle.remove()
    set_gradients(parameters, 0)
    gave.append(optimizer.step())
    return [gave, seen, state_of(parameters, optimizer)]


@pytest.mark.parametrize("name", WITHOUT_CLOSURE)
@in_all_modes
def test_hooks_of_state_dicts(name: str) -> Any:
    """Before and after `state_dict` and `load_state_dict`: their order, and what they change."""
    spec = OPTIMIZERS[name]
    parameters = make_parameters(spec.shapes)
    optimizer = spec.cls(parameters)
    take_steps(optimizer, parameters, range(2))
    calls: list[str] = []

    def saved(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        return {**state, "note": len(state["state"])}

    def loading(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("loading")
        return {**state, "param_groups": [{**group, "lr": 0.25} for group in state["param_groups"]]}

    handles = [
        optimizer.register_state_dict_pre_hook(lambda o: calls.append("saving")),
        optimizer.register_state_dict_pre_hook(lambda o: calls.append("saving first"), prepend=True),
        optimizer.register_state_dict_post_hook(saved),
        optimizer.register_load_state_dict_pre_hook(loading),
        optimizer.register_load_state_dict_pre_hook(lambda o, s: calls.append("loading first"), prepend=True),
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded")),
    ]
    state = optimizer.state_dict()
    assert state["note"] == len(state["state"])
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert calls == ["saving first", "saving", "saved", "loading first", "loading", "loaded"]
    for handle in handles:
        handle.remove()
    take_steps(optimizer, parameters, range(2, 4))
    return [calls, state_of(parameters, optimizer)]


@in_all_modes
def test_a_step_that_raises_and_the_next_one() -> Any:
    """From a closure, from a hook, from the optimizer's own lines."""

    class Breaking(optim.SGD):
        breaks = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.breaks:
                raise KeyError("step")
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"])

    parameters = make_parameters([(4, 3), (5,)])
    optimizer = Breaking(parameters, lr=0.1)
    results: list[Any] = take_steps(optimizer, parameters, range(2))
    Breaking.breaks = True
    results.append(attempt(take_steps, optimizer, parameters, [2]))
    Breaking.breaks = False
    results.append(state_of(parameters))
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    results.append(attempt(take_steps, optimizer, parameters, [3]))
    handle.remove()
    results.append(take_steps(optimizer, parameters, [4]))

    def broken() -> None:
        raise ValueError("closure")

    adam = optim.Adam(parameters)
    results.append(attempt(adam.step, broken))
    results.append(take_steps(adam, parameters, range(2), closure=True))
    return [results, state_of(parameters, optimizer, adam)]
