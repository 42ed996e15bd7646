"""What is done to an optimizer for one step, and undone after it.

Most steps that are skipped are not taken at all (`detour.py`). Where one is under way already, as when its closure has
been called, it goes on without gradients, which torch's own optimizers answer by leaving everything alone; any other
class is given zeros, and what it does with them is undone. Adam, AdamW, SGD and Adagrad with `fused=True` look at
`optimizer.found_inf` and `optimizer.grad_scale` in `step` instead: where found_inf is 1.0, parameters, state and step
counter stay as they are. They have hazards of their own.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import optim

from .backup import Backup

_FUSED = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)
_MISSING: Any = object()
_TORCHS: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


class Undo(Protocol):
    """What is done to an optimizer for one step, and has to be undone after it.

    Nothing is done before `apply`, so that whoever undoes it can hold it by then: an exception may come anywhere. For
    the same reason each method may be called again after it was interrupted.
    """

    def apply(self) -> None:
        """Does it."""

    def give_back(self) -> None:
        """Straight after the step, or after one that raised."""

    def give_back_late(self) -> None:
        """Instead, some time after a step that raised: what others have changed since is left to them."""

    def forget(self) -> None:
        """Instead, when a closure has made gradients anew within the step."""


class Skip:
    """What the judge returns for a step that is to be skipped, however whoever runs the step brings that about.

    Attributes:
        repairs: what has to be undone after it all the same.
    """

    def __init__(self, repairs: Undo | None = None) -> None:
        self.repairs = repairs


def is_content_without_gradients(optimizer: optim.Optimizer) -> bool:
    """Whether a step of `optimizer` without gradients leaves everything but entries of its groups alone: it is torch's
    own. Some optimizers from elsewhere want gradients, or take missing ones for zeros."""
    return getattr(inspect.unwrap(type(optimizer).step), "__module__", "").startswith("torch.")


class SetAside:
    """Gradients taken away for one step, which makes torch's own optimizers leave parameters and state alone.

    The groups' own entries are kept too: some optimizers advance a counter in the group whether or not there is a
    gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []

    def apply(self) -> None:
        for p in self._params:
            if p.grad is not None:
                self._gradients.append((p, p.grad))
                p.grad = None

    def give_back(self) -> None:
        for p, gradient in self._gradients:
            if p.grad is None:
                p.grad = gradient
        for group, kept in self._groups:
            group.update(kept)
            for key in group.keys() - kept.keys():
                del group[key]

    def give_back_late(self) -> None:
        taken = {id(p) for p, _ in self._gradients}
        if all(p.grad is None for p in self._params if id(p) in taken):  # else there was a backward pass since
            for p, gradient in self._gradients:
                p.grad = gradient

    def forget(self) -> None:
        self._gradients.clear()


class Rehearsal:
    """Zeros in place of gradients for one step of any optimizer, and all that it does put back after it.

    Args:
        backup: of the optimizer as it was before the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backup: Backup) -> None:
        self._params = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self._backup: Backup | None = backup
        self._gradients: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def apply(self) -> None:
        for p in self._params.values():
            if p.grad is not None:
                zeros = torch.zeros_like(p.grad.detach())
                self._gradients.append((p, p.grad, zeros))
                p.grad = zeros

    def give_back(self) -> None:
        if self._backup is not None:
            self._backup.restore()
        for p, gradient, _ in self._gradients:
            if p.grad is not gradient:
                p.grad = gradient

    def give_back_late(self) -> None:
        for p, gradient, zeros in self._gradients:
            if p.grad is zeros:
                p.grad = gradient

    def forget(self) -> None:
        self._gradients.clear()
        self._backup = None


def _has_torchs_step(cls: Any) -> bool:
    """A `step` of a subclass's own may do something to the parameters that no flag prevents."""
    step = inspect.unwrap(cls.step)  # torch wraps steps
    known = _TORCHS[cls] = any(issubclass(cls, c) and step is inspect.unwrap(c.step) for c in _FUSED)
    return known


def takes_flags(optimizer: optim.Optimizer) -> bool:
    """Whether all of `optimizer` is fused, so that `found_inf` on it skips the step."""
    known = _TORCHS.get(type(optimizer))
    if not (_has_torchs_step(type(optimizer)) if known is None else known):
        return False
    for group in optimizer.param_groups:  # noqa: SIM110 - a generator is a frame more, at every step
        if not group.get("fused"):
            return False
    return True


class HandedOver:
    """Attributes set on an optimizer for one step; those that were there before (a scaler's) come back after it.

    Args:
        repairs: what is given back along with them.
    """

    def __init__(self, optimizer: optim.Optimizer, attributes: Mapping[str, Any], repairs: Undo | None) -> None:
        given = self._given = optimizer.__dict__
        self._attributes = attributes
        self._before = list(zip(attributes, map(given.get, attributes, (_MISSING,) * len(attributes))))
        self._repairs = repairs

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
        if self._repairs is not None:
            self._repairs.give_back()

    def give_back_late(self) -> None:
        for name, value in self._attributes.items():
            if self._given.get(name) is value:  # what was there before was for the step that raised
                del self._given[name]
        if self._repairs is not None:
            self._repairs.give_back_late()

    def forget(self) -> None:
        """The attributes were for gradients that are gone."""
        self._repairs = None
        self.give_back()


class Both:
    """Two things to undo, the later one first. The earlier one is done."""

    def __init__(self, earlier: Undo, later: Undo) -> None:
        self._earlier, self._later = earlier, later

    def apply(self) -> None:
        self._later.apply()

    def give_back(self) -> None:
        self._later.give_back()
        self._earlier.give_back()

    def give_back_late(self) -> None:
        self._later.give_back_late()
        self._earlier.give_back_late()

    def forget(self) -> None:
        self._later.forget()
        self._earlier.forget()


def _lies_otherwise(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    if gradient.layout is not torch.strided or gradient.stride() == parameter.stride():
        return False
    strides = zip(gradient.shape, gradient.stride(), parameter.stride())
    return any(size > 1 and a != b for size, a, b in strides)


class Straightened:
    """Gradients in the memory order of their parameters, for one step: fused kernels go through both in one order, and
    take the wrong elements, or refuse, where the orders differ."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._gradients: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient = p.grad
                if gradient is not None and _lies_otherwise(gradient, p):
                    p.grad = torch.empty_like(p).copy_(gradient.detach())
                    self._gradients.append((p, gradient, p.grad))

    @staticmethod
    def is_needed(optimizer: optim.Optimizer) -> bool:
        """Whether any gradient lies otherwise than its parameter. Cost: 0.3 us a tensor."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return any(p.grad is not None and _lies_otherwise(p.grad, p) for p in params)

    def apply(self) -> None:
        """Done when it was made: plans are of the gradients as they lie now."""

    def give_back(self) -> None:
        """The gradients as they lay before, with the values that the step left."""
        with torch.no_grad():
            for p, gradient, straight in self._gradients:
                if p.grad is straight:
                    gradient.copy_(straight)
                    p.grad = gradient

    give_back_late = give_back

    def forget(self) -> None:
        """There are other gradients now."""


class Momentum:
    """Sees to it that a fused SGD has momentum buffers before a step that may be skipped.

    Such a step would leave buffers of uninitialised memory behind. Zeros are what a first step starts from anyway,
    unless it is to be damped: momentum * 0 + gradient is the gradient.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any]] = {}

    def is_safe(self, optimizer: optim.Optimizer, which: Sequence[Any]) -> bool:
        """Makes the buffers that can be made; False if the host has to decide about this step.

        Args:
            which: tells which parameters have a gradient.

        Cost: 0.2 us, and 0.1 us a parameter when something has changed.
        """
        if not isinstance(optimizer, optim.SGD) or not any(group["momentum"] for group in optimizer.param_groups):
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
