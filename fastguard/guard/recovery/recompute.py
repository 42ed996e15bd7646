"""The gradients of a step once more, to tell the data and the model from the machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..buffers import BufferPlace
from ..transient import Hooked, Transient
from .snapshots import States, random_states


class Recomputation(NamedTuple):
    """What came of computing the gradients of a step once more, from the same random state.

    Attributes:
        step: its number.
        tensors: names of those whose gradient has other bits than the first time; empty: all have the same.
        is_finite: whether all are finite, this time.
    """

    step: int
    tensors: list[str]
    is_finite: bool

    @property
    def verdict(self) -> str:
        """ "data or model" where the bits are the same, "machine" where they are not."""
        return "machine" if self.tensors else "data or model"


class RandomStates(Hooked):
    """Keeps the random state from before the first forward pass of each step.

    Attributes:
        first: of the newest step; None before the first pass of all.
        is_over: the next pass is that of another step.
        is_paused: passes are not looked at.

    Cost: a forward pass takes 5 us more; on a GPU it waits for the device.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.first: States | None = None
        self.is_over, self.is_paused = True, False
        self._handle: Any = model.register_forward_pre_hook(_Ahead(self))


class _Ahead(Transient):
    """The hook ahead of a forward pass."""

    def __init__(self, states: RandomStates) -> None:
        self._states = weakref.ref(states)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        states = self._states()
        if torch.compiler.is_compiling() or states is None or states.is_paused:
            return
        if states.is_over and module.training and torch.is_grad_enabled():
            states.first, states.is_over = random_states(), False


def recomputed(
    closure: Callable[[], Any],
    step: int,
    params: Sequence[torch.Tensor],
    names: Sequence[str],
    places: Iterable[BufferPlace],
    states: States | None,
) -> tuple[Recomputation, Any]:
    """Calls `closure`, which makes the gradients anew, and compares them bit by bit with those that are there.

    Afterwards gradients, buffers and random state are as they were before.
    """
    before = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in params]
    buffers = [(place, place.tensor, place.tensor.clone()) for place in places if place.tensor is not None]
    now = random_states()
    for put_back, state in states or ():
        put_back(state)
    try:
        loss = closure()
        others, is_finite = [], True
        for i, (p, _, was) in enumerate(before):
            is_same = (p.grad is None) is (was is None) and (was is None or _are_same_bits(p.grad, was))
            if not is_same:
                others.append(names[i] if i < len(names) else f"param{i}")
            is_finite = is_finite and (p.grad is None or bool(_dense(p.grad).isfinite().all()))
    finally:
        for put_back, state in now:
            put_back(state)
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
