"""Fused optimizers: the attributes through which they skip and clip a step on the device, and their pitfalls."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from .skip import Undo

_FUSED = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)
_MISSING: Any = object()
_HAS_TORCHS_STEP: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def takes_flags(optimizer: Optimizer) -> bool:
    """Whether all of `optimizer` is fused, so that a `found_inf` of 1.0 on it skips the step."""
    cls = type(optimizer)
    known = _HAS_TORCHS_STEP.get(cls)
    if known is None:  # a subclass's own `step` may change parameters whatever the flag says
        step: Any = inspect.unwrap(cls.step)
        known = any(issubclass(cls, c) and step is inspect.unwrap(c.step) for c in _FUSED)
        _HAS_TORCHS_STEP[cls] = known
    if not known:
        return False
    for group in optimizer.param_groups:  # noqa: SIM110 - a generator is a frame more, at every step
        if not group.get("fused"):
            return False
    return True


class FusedFlags(Undo):
    """Sets `found_inf` and `grad_scale` on an optimizer for one step, and then restores those of a GradScaler."""

    def __init__(self, optimizer: Optimizer, attributes: Mapping[str, Any]) -> None:
        given = self._given = optimizer.__dict__
        self._attributes = attributes
        self._before = []
        for name in attributes:  # a comprehension is a frame more, at every step
            self._before.append((name, given.get(name, _MISSING)))

    def apply(self) -> None:
        self._given.update(self._attributes)

    def give_back(self) -> None:
        given, attributes = self._given, self._attributes
        for name, value in self._before:
            if given.get(name) is not attributes[name]:
                continue
            if value is _MISSING:
                del given[name]
            else:
                given[name] = value

    def give_back_late(self) -> None:
        for name, value in self._attributes.items():
            if self._given.get(name) is value:  # what was there before was for the step that raised
                del self._given[name]

    def forget(self) -> None:
        self.give_back()


def _with_other_strides(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters and their gradients, where the strides differ."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        gradient = p.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.stride() == p.stride():
            continue
        strides = zip(gradient.shape, gradient.stride(), p.stride())
        if any(size > 1 and a != b for size, a, b in strides):
            yield p, gradient


class ContiguousGrads(Undo):
    """Copies gradients to the memory order of their parameters for one step, already when it is made.

    Fused kernels walk through both in one order; where the orders differ, they read the wrong elements, or refuse.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._gradients: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for p, gradient in _with_other_strides(optimizer):
            p.grad = torch.empty_like(p).copy_(gradient.detach())
            self._gradients.append((p, gradient, p.grad))

    @staticmethod
    def is_needed(optimizer: Optimizer) -> bool:
        """Whether any gradient has other strides than its parameter. Cost: 0.3 us a tensor."""
        return next(_with_other_strides(optimizer), None) is not None

    def give_back(self) -> None:
        """Puts the original gradients back, with the values that the step left."""
        with torch.no_grad():
            for p, gradient, copy in self._gradients:
                if p.grad is copy:
                    gradient.copy_(copy)
                    p.grad = gradient


class Momentum:
    """Gives a fused SGD its momentum buffers before a step that may be skipped, which would leave them uninitialised.

    Zeros give the same first step, unless it is dampened: momentum * 0 + gradient is the gradient.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any]] = {}

    def is_safe(self, optimizer: Optimizer, which: Sequence[Any]) -> bool:
        """Makes the buffers. False if the first step is dampened, so that the host has to decide whether to skip it.

        `which` tells which parameters have a gradient. Cost: 0.2 us, and 0.1 us a parameter when something has changed.
        """
        if not any(group["momentum"] for group in optimizer.param_groups):
            return True
        state = optimizer.state
        seen, probe = self._seen.get(id(optimizer), (None, None))
        if seen == (id(state), len(state), *which) and (probe is None or _has_buffer(state, probe())):
            return True
        safe, probe = True, None
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not group["momentum"] or p.grad is None:
                    continue
                if not _has_buffer(state, p):
                    if group["dampening"]:
                        safe = False
                        continue
                    state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                probe = weakref.ref(p) if probe is None else probe
        if safe:
            self._seen[id(optimizer)] = ((id(state), len(state), *which), probe)
        return safe


def _has_buffer(state: Any, p: torch.Tensor | None) -> bool:
    return p in state and state[p].get("momentum_buffer") is not None
