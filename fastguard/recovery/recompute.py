"""The gradients of a step once more, to tell the data and the model from the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..observers.buffers import BufferPlace
from ..observers.observer import ModuleHook, Observer
from .randomness import load_random_state, random_state


class Recomputation(NamedTuple):
    """The result of computing the gradients of a step again, from the same random state.

    Attributes:
        step: its number.
        tensors: names of those whose gradients have other bits now.
        is_finite: whether all gradients are finite now.
    """

    step: int
    tensors: list[str]
    is_finite: bool

    @property
    def verdict(self) -> str:
        """ "data or model" where the bits are the same, "machine" where they are not."""
        return "machine" if self.tensors else "data or model"


class RandomStates(Observer):
    """Keeps the random state from before the first forward pass of each step.

    Attributes:
        first: of the newest step; None before the first pass of all.
        is_over: the next pass is that of another step.
        is_paused: passes are not looked at.

    Cost: a forward pass takes 5 us more; on a GPU it waits for the device.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.first: dict[str, Any] | None = None
        self.is_over, self.is_paused = True, False
        self.hold(model.register_forward_pre_hook(ModuleHook(self._ahead)))

    def _ahead(self, module: torch.nn.Module, args: Any) -> None:
        if self.is_over and not self.is_paused and module.training and torch.is_grad_enabled():
            self.first, self.is_over = random_state(), False


def recomputed(
    closure: Callable[[], Any],
    step: int,
    params: Sequence[torch.Tensor],
    names: Sequence[str],
    places: Iterable[BufferPlace],
    states: RandomStates | None,
) -> tuple[Recomputation, Any]:
    """Calls `closure` with the random state that `states` kept, and compares its gradients bit by bit with the present.

    Restores gradients, buffers and random state afterwards.
    """
    before = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in params]
    buffers = [(place, place.tensor, place.tensor.clone()) for place in places if place.tensor is not None]
    now = random_state()
    if states is not None:
        states.is_paused = True
        if states.first is not None:
            load_random_state(states.first)
    try:
        loss = closure()
        others, is_finite = [], True
        for i, (p, _, was) in enumerate(before):
            is_same = (p.grad is None) is (was is None) and (was is None or _are_same_bits(p.grad, was))
            if not is_same:
                others.append(names[i] if i < len(names) else f"param{i}")
            is_finite = is_finite and (p.grad is None or bool(_dense(p.grad).isfinite().all()))
    finally:
        if states is not None:
            states.is_paused = False
        load_random_state(now)
        with torch.no_grad():
            for place, buffer, content in buffers:
                buffer.data.copy_(content)
                place.dict[place.key] = buffer
            for p, gradient, values in before:
                if gradient is not None and values is not None:
                    gradient.copy_(values)
                p.grad = gradient
    return Recomputation(step, others, is_finite), loss


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.detach().coalesce().values() if x.layout is torch.sparse_coo else x.detach()


def _are_same_bits(one: Any, other: torch.Tensor) -> bool:
    a, b = _dense(one), _dense(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.contiguous(), b.contiguous()
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
