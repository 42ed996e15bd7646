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
    copied,
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
def test_copies_of_the_optimizer_itself(name: str) -> Any:
    """Deep copies, with their parameters, and pickles; nothing of the guard is in either."""
    spec = OPTIMIZERS[name]
    parameters = make_parameters(spec.shapes)
    optimizer = spec.cls(parameters, **spec.ways[-1])
    take_steps(optimizer, parameters, range(2), **_steps(spec))
    results: list[Any] = [repr(optimizer)]
    for copy in (deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = [p for group in copy.param_groups for p in group["params"]]
        assert all(p is not q for p, q in zip(own, parameters))
        assert type(copy) is type(optimizer)
        gave = attempt(take_steps, copy, own, range(2, 4), **_steps(spec))
        results += [repr(copy), gave, state_of(own, copy)]
    take_steps(optimizer, parameters, range(2, 4), **_steps(spec))
    results.append(state_of(parameters, optimizer))
    if name != "LBFGS":  # torch's copies of it do not know what they step
        assert_identical(results[-1][0], results[3][0])
    return results


@pytest.mark.parametrize("name", OPTIMIZERS)
@in_all_modes
def test_a_copy_has_all_public_attributes(name: str) -> Any:
    spec = OPTIMIZERS[name]
    optimizer = spec.cls(make_parameters(spec.shapes))
    copy = deepcopy(optimizer)
    public = [{key for key in vars(o) if not key.startswith("_")} for o in (optimizer, copy)]
    assert public[0] == public[1]
    return sorted(public[0])


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if spec.groups])
@in_all_modes
def test_named_parameters(name: str) -> Any:
    """State of named parameters into unnamed ones, and the other way round."""
    spec = OPTIMIZERS[name]
    named, plain = make_parameters(spec.shapes), make_parameters(spec.shapes)
    both = [spec.cls([(f"layer.{i}", p) for i, p in enumerate(named)]), spec.cls(plain)]
    for optimizer, parameters in zip(both, (named, plain)):
        take_steps(optimizer, parameters, range(2), **_steps(spec))
    states = copied([optimizer.state_dict() for optimizer in both])
    assert states[0]["param_groups"][0]["param_names"] == [f"layer.{i}" for i in range(len(named))]
    both[0].load_state_dict(states[1])
    both[1].load_state_dict(states[0])
    for optimizer, parameters in zip(both, (named, plain)):
        take_steps(optimizer, parameters, range(2, 4), **_steps(spec))
    return [repr(both), state_of([*named, *plain], *both)]


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


@pytest.mark.parametrize("name", OPTIMIZERS)
@in_all_modes
def test_errors_of_constructors_and_groups(name: str) -> Any:
    """Same type, same words."""
    spec = OPTIMIZERS[name]
    first, second = make_parameters([(2, 2), (2, 2)])
    spec.cls([first])
    results = [
        attempt(spec.cls, *args, **kwargs)
        for args, kwargs in [
            ([first], {}),
            ([[]], {}),
            ([[{"params": first}, {"params": first}]], {}),
            ([[("a", first), second]], {}),
            ([["a"]], {}),
            ([[first * 2]], {}),
            ([[first]], {"lr": -1.0}),
            ([[first]], {"lr": torch.ones(2)}),
            ([[first]], {"weight_decay": -1.0}),
            ([[first]], {"betas": (1.0, 0.9)}),
            ([[first]], {"foreach": True, "fused": True}),
            ([[first]], {"differentiable": True, "fused": True}),
            ([[first]], {"no_such": 1}),
            ([[torch.zeros(2, 2, dtype=torch.int64)]], {}),
        ]
    ]
    optimizer = spec.cls([first])
    for group in ({"params": first}, {"params": {first}}, {"params": ["a"]}, 3, {"params": [second], "lr": 0.3}):
        results.append(attempt(optimizer.add_param_group, group))
    other = spec.cls(make_parameters([(2, 2), (2, 2)]))
    results.append(attempt(optimizer.load_state_dict, other.state_dict()))
    results.append(attempt(optimizer.load_state_dict, {"state": {}, "param_groups": []}))
    return [r if isinstance(r, str) or r is None else str(type(r)) for r in results]


@pytest.mark.parametrize("name", WITHOUT_CLOSURE)
@in_all_modes
def test_errors_of_steps(name: str) -> Any:
    """Sparse and complex gradients that are not taken, `capturable` on the CPU; the optimizer goes on afterwards."""
    spec = OPTIMIZERS[name]
    results: list[Any] = []
    for way in spec.ways:
        shape = (4, 3)
        parameters = make_parameters([shape, (3, 2)])
        optimizer = spec.cls(parameters, **way)
        set_gradients(parameters, 0, sparse=True)
        results.append(attempt(optimizer.step))
        set_gradients(parameters, 1)
        results.append(attempt(optimizer.step))
        odd = make_parameters([shape], torch.complex64)
        complex_ones = spec.cls(odd, **way)
        odd[0].grad = torch.full(shape, 1 + 2j)
        results.append(attempt(complex_ones.step))
        if "capturable" in optimizer.defaults and not way.get("fused"):
            graph = spec.cls(parameters, capturable=True, **way)
            set_gradients(parameters, 1)
            results.append(attempt(graph.step))
        results.append([state_of(parameters), [p.detach() for p in odd]])
    return results


@pytest.mark.parametrize("name", [name for name in WITHOUT_CLOSURE if {"fused": True} in OPTIMIZERS[name].ways])
@in_all_modes
def test_fused_kernels_refuse_meta_tensors(name: str) -> Any:
    parameters = make_parameters([(2, 2)], device="meta")
    optimizer = OPTIMIZERS[name].cls(parameters, fused=True)
    parameters[0].grad = torch.zeros(2, 2, device="meta")
    return attempt(optimizer.step)


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
