"""All optimizers of torch.optim, guarded: steps, ways of computing them, kinds of parameters and gradients."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from comparing import attempt, in_all_modes
from torch import optim
from torch_optimizers import (
    OPTIMIZERS,
    WITHOUT_CLOSURE,
    copied,
    evaluating,
    make_parameters,
    set_gradients,
    state_of,
    take_steps,
)

SPARSE = [name for name, spec in OPTIMIZERS.items() if spec.sparse != "no"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@in_all_modes
def test_all_settings_in_all_ways(name: str, thorough: bool) -> Any:
    """The ways agree with one another, too."""
    spec = OPTIMIZERS[name]
    results = []
    for settings in spec.settings if thorough else spec.settings[-1:]:
        ends = []
        for way in spec.ways:
            parameters = make_parameters(spec.shapes)
            optimizer = spec.cls(parameters, **settings, **way)
            gave = take_steps(optimizer, parameters, range(3), sparse=spec.sparse == "only", closure=spec.closure)
            ends.append([p.detach() for p in parameters])
            results.append([gave, state_of(parameters, optimizer)])
        for end in ends[1:]:
            torch.testing.assert_close(end, ends[0])
    return results


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if spec.groups])
@in_all_modes
def test_groups_of_their_own_settings_and_later_ones(name: str) -> Any:
    spec = OPTIMIZERS[name]
    decay: dict[str, Any] = {"weight_decay": 0.3} if "weight_decay" in spec.cls([torch.zeros(1, 1)]).defaults else {}
    results = []
    for way in spec.ways:
        parameters = make_parameters(spec.shapes * 2)
        half = len(spec.shapes)
        groups = [{"params": parameters[:1], "lr": 0.02, **decay}, {"params": parameters[1:half]}]
        optimizer = spec.cls(groups, lr=0.01, **way)
        take_steps(optimizer, parameters, range(2), sparse=spec.sparse == "only")
        optimizer.add_param_group({"params": parameters[half:], "lr": 0.05, **decay})
        take_steps(optimizer, parameters, range(2, 4), sparse=spec.sparse == "only")
        optimizer.param_groups[0]["lr"] = 0.0
        take_steps(optimizer, parameters, range(4, 6), sparse=spec.sparse == "only")
        results.append(state_of(parameters, optimizer))
    return results


@pytest.mark.parametrize("name", SPARSE)
@in_all_modes
def test_sparse_gradients(name: str) -> Any:
    """Not coalesced, coalesced, empty, missing; with a scheduler; against dense ones where both are taken."""
    spec = OPTIMIZERS[name]
    results = []
    for settings in [{}, {"lr": 0.05}]:
        sparse, dense = make_parameters([(5, 3), (4, 2)]), make_parameters([(5, 3), (4, 2)])
        optimizer = spec.cls(sparse, **settings)
        other = spec.cls(dense, **settings) if spec.sparse == "too" else None
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
        for step in range(6):
            set_gradients(sparse, step, sparse=True)
            if step == 2:
                sparse[0].grad = sparse[0].grad.coalesce()
            if step == 3:
                sparse[0].grad = torch.sparse_coo_tensor(torch.empty(1, 0).long(), torch.empty(0, 3), (5, 3))
            if step == 4:
                sparse[1].grad = None
            for p, q in zip(sparse, dense):
                q.grad = None if p.grad is None else p.grad.to_dense()
            optimizer.step()
            scheduler.step()
            if other is not None:
                other.step()
        if other is not None:
            for p, q in zip(sparse, dense):
                torch.testing.assert_close(p.detach(), q.detach())
        results.append([copied([p.detach() for p in sparse]), copied(optimizer.state_dict())])
    return results


@pytest.mark.parametrize("name", WITHOUT_CLOSURE)
@in_all_modes
def test_steps_without_gradients_and_with_zeros(name: str) -> Any:
    spec = OPTIMIZERS[name]
    results = []
    for way in spec.ways:
        parameters = make_parameters(spec.shapes)
        before = copied([p.detach() for p in parameters])
        optimizer = spec.cls(parameters, **way)
        assert optimizer.step() is None
        assert all(torch.equal(p, b) for p, b in zip(parameters, before))
        empty = copied(optimizer.state_dict())
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        zeros = state_of(parameters, optimizer)
        parameters[0].grad = None
        optimizer.step()
        results.append([empty, zeros, state_of(parameters, optimizer)])
    return results


@pytest.mark.parametrize("name", WITHOUT_CLOSURE)
@in_all_modes
def test_mixed_and_odd_parameters(name: str) -> Any:
    """Several dtypes in one group, empty ones, transposed ones, and gradients that lie otherwise."""
    spec = OPTIMIZERS[name]
    results = []
    for way in spec.ways:
        parameters = [
            *make_parameters(spec.shapes, torch.float64),
            *make_parameters(spec.shapes, torch.float32),
            *make_parameters(spec.shapes[:2], torch.bfloat16),
            torch.nn.Parameter(torch.randn(6, 4).T),
            torch.nn.Parameter(torch.randn(2, 3)),
        ]
        if name not in ("Muon", "Adafactor"):
            parameters.append(torch.nn.Parameter(torch.empty(0)))
        optimizer = spec.cls(parameters, **way)
        for step in range(3):
            set_gradients(parameters, step)
            transposed = next(p for p in parameters if p.shape == (2, 3))
            if not way.get("fused"):  # fused kernels want them in one order
                transposed.grad = transposed.grad.T.contiguous().T
            optimizer.step()
        results.append(state_of(parameters, optimizer))
    return results


@pytest.mark.parametrize("name", OPTIMIZERS)
@in_all_modes
def test_a_learning_rate_that_is_a_tensor(name: str) -> Any:
    """Where torch takes one; what it says where it does not."""
    spec = OPTIMIZERS[name]
    results = []
    for way in spec.ways:
        for rate in (torch.tensor(0.02), torch.tensor([0.02])):
            parameters = make_parameters(spec.shapes)
            optimizer = attempt(spec.cls, parameters, lr=rate, **way)
            if isinstance(optimizer, str):
                results.append(optimizer)
                continue
            scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            for step in range(3):
                settings = {"sparse": spec.sparse == "only", "closure": spec.closure}
                results.append(attempt(take_steps, optimizer, parameters, [step], **settings))
                scheduler.step()
            optimizer.param_groups[0]["lr"].fill_(0.3)
            results.append(attempt(take_steps, optimizer, parameters, [3], **settings))
            results.append(state_of(parameters, optimizer, scheduler))
    return results


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if spec.is_differentiable])
@in_all_modes
def test_steps_that_are_differentiated(name: str, thorough: bool) -> Any:
    """By where they start, and by the gradient: each step by itself."""
    spec = OPTIMIZERS[name]
    results = []
    for settings in spec.settings if thorough else spec.settings[:1]:
        start = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        slope = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        p = start.clone()
        optimizer = spec.cls([p], differentiable=True, **settings)
        p.grad = slope.clone()
        optimizer.step()
        results.append([*torch.autograd.grad(p.square().sum(), [start, slope], allow_unused=True), p.detach()])
        for state in optimizer.state.values():
            state.update({key: value.detach() for key, value in state.items() if isinstance(value, torch.Tensor)})
        results.append(copied(optimizer.state_dict()))
    return results


@pytest.mark.parametrize("name", OPTIMIZERS)
@in_all_modes
def test_closures(name: str) -> Any:
    """Called once or more, with autograd on, without arguments; positional and by name; its loss is given back."""
    spec = OPTIMIZERS[name]

    def run(way: dict[str, Any]) -> Any:
        parameters = make_parameters(spec.shapes)
        optimizer = spec.cls(parameters, **way)
        modes = []

        def closure() -> torch.Tensor:
            modes.append(torch.is_grad_enabled())
            if spec.takes_dense:
                return evaluating(optimizer, parameters, len(modes))()
            set_gradients(parameters, len(modes), sparse=True)
            return torch.tensor(float(len(modes)))

        with torch.no_grad():
            gave = [optimizer.step(closure), optimizer.step(closure=closure)]
        assert all(modes) and all(isinstance(loss, torch.Tensor) for loss in gave)
        return [len(modes), copied(gave), state_of(parameters, optimizer)]

    return [run(way) for way in spec.ways]


@pytest.mark.parametrize("name", WITHOUT_CLOSURE)
@in_all_modes
def test_a_flag_handed_to_fused_kernels(name: str) -> Any:
    """`found_inf` and `grad_scale`, set by hand as a scaler does."""
    spec = OPTIMIZERS[name]
    results = []
    for way in (way for way in spec.ways if way.get("fused")):
        parameters = make_parameters(spec.shapes)
        optimizer = spec.cls(parameters, **way)
        for step, (found, scale) in enumerate([(0.0, 1.0), (1.0, 1.0), (0.0, 4.0), (1.0, 2.0), (0.0, 1.0)]):
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(found), torch.tensor(scale)
            set_gradients(parameters, step)
            optimizer.step()
            results.append(state_of(parameters, optimizer))
        del optimizer.found_inf, optimizer.grad_scale
        take_steps(optimizer, parameters, [9])
        results.append(state_of(parameters, optimizer))
    if not results:
        spec.cls(make_parameters(spec.shapes))
    return results


@in_all_modes
def test_optimizers_of_ones_own() -> Any:
    """One that calls its parent's step, one whose step takes more, one with a counter in its groups."""

    class Nested(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["counter"] = group.get("counter", 0) + 1
            return super().step(closure)

    class Wide(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.later = 0

        @torch.no_grad()
        def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.later += 1
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-scale * group["lr"])
            return loss if loss is not None else self.later

    results: list[Any] = []
    for cls in (Nested, Wide):
        parameters = make_parameters([(4, 3), (5,)])
        optimizer = cls(parameters)
        results.append(take_steps(optimizer, parameters, range(2)))
        if cls is Wide:
            set_gradients(parameters, 5)
            results += [optimizer.step(scale=0.5), optimizer.step(None, scale=0.5), optimizer.later]
        results.append(take_steps(optimizer, parameters, range(3), closure=True))
        results.append(state_of(parameters, optimizer))
        results.append(deepcopy(optimizer).state_dict())
    return results
