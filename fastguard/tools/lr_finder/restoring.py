"""Everything that training steps change, kept and put back; and an optimizer whose guard does not look."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import kernels
from ...guard import Guard
from ...guard.guard import GUARD
from ..randomness import load_random_state, random_state


class _Kept:
    """A value as it was: a tensor in place, so that whoever else holds it sees it restored too; else a deep copy."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._copy = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    def restored(self) -> Any:
        if not isinstance(self._value, torch.Tensor):
            return self._copy
        with torch.no_grad():
            self._value.copy_(self._copy)
        return self._value


@contextlib.contextmanager
def _model_restored(model: torch.nn.Module) -> Iterator[None]:
    parameters = [(p, _Kept(p), p.grad, p.requires_grad) for p in model.parameters()]
    buffers = [(m, name, _Kept(b)) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    modes = [(m, m.training) for m in model.modules()]
    for p, _, _, _ in parameters:
        p.grad = None  # the test makes its own; those of an accumulation under way are not touched
    try:
        yield
    finally:
        for p, kept, gradient, requires_grad in parameters:
            kept.restored()
            p.grad = gradient
            p.requires_grad_(requires_grad)
        for module, name, kept in buffers:
            module._buffers[name] = kept.restored()
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _optimizer_restored(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    of_model = set(map(id, model.parameters()))
    state = {p: {key: _Kept(value) for key, value in entries.items()} for p, entries in optimizer.state.items()}
    groups = [
        (group, {key: value if key == "params" else _Kept(value) for key, value in group.items()})
        for group in optimizer.param_groups
    ]
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in of_model]
    parameters = [(p, _Kept(p), p.grad) for p in others]  # a loss may have some too
    had_stepped = optimizer.__dict__.get("_opt_called")  # where a scheduler looks
    try:
        yield
    finally:
        for p, kept_value, gradient in parameters:
            kept_value.restored()
            p.grad = gradient
        if had_stepped is not None:
            optimizer.__dict__["_opt_called"] = had_stepped
        optimizer.state.clear()
        for p, entries in state.items():
            optimizer.state[p] = {key: entry.restored() for key, entry in entries.items()}
        for group, kept in groups:
            for key in group.keys() - kept.keys():
                del group[key]
            group.update({key: v.restored() if isinstance(v, _Kept) else v for key, v in kept.items()})


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Gives a group another learning rate; a tensor keeps its place, of which compiled steps know."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _own_generators(loader: Any) -> list[torch.Generator]:
    """The generators of a DataLoader and of its sampler."""
    holders = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return [g for g in found if isinstance(g, torch.Generator)]


@contextlib.contextmanager
def randomness_restored(loader: Any) -> Iterator[None]:
    """Puts the random generators of torch, Python and NumPy back, and those of a loader."""
    own = [(g, g.get_state()) for g in _own_generators(loader)]
    state = random_state()
    try:
        yield
    finally:
        load_random_state(state)
        for generator, before in own:
            generator.set_state(before)


@contextlib.contextmanager
def everything_restored(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Iterator[None]:
    """Puts model, optimizer and random generators back as they were, whatever happened meanwhile."""
    with randomness_restored(loader), _optimizer_restored(model, optimizer), _model_restored(model):
        yield


@contextlib.contextmanager
def without_guard(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Keeps the guard's hooks off the optimizer's steps. Gives what clips the gradients as the guard would have."""
    guard = getattr(optimizer, "__dict__", {}).get(GUARD)
    if not isinstance(guard, Guard):
        yield lambda: None
        return
    policy = copy.deepcopy(guard.clip)

    def clip() -> None:
        gradients, _, _ = kernels.collect_gradients([group["params"] for group in optimizer.param_groups])
        if policy is None or not gradients:
            return
        norm = kernels.tensor_stats(gradients, backend=guard.backend).total_norm()
        if norm < float("inf"):
            kernels.scale_(gradients, policy.coefficient(norm), backend=guard.backend)

    with guard.paused():
        yield clip
