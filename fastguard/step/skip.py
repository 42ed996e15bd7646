"""How a step is skipped: parameters, state and attributes of the optimizer stay bit-identical, whatever its class.

There are two simple ways and a fallback:

* The step is not called: a `StepInterceptor` stands between torch's step hooks and the step.
* Adam, AdamW, SGD and Adagrad with `fused=True` read `found_inf` on the device: the host need not wait (`FusedFlags`).
* A step that has begun, because its closure has been called, runs without gradients (`DryRunStep`), and torch's own
  optimizers then change nothing. Any other optimizer gets zeros, and whatever it does is undone from a backup.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from ..ranks import has_other_ranks
from .backup import Backup, ClosureBackup
from .wrappers import HOOKED_STEP

_log = logging.getLogger("fastguard")
_BETWEEN = ("fastguard.step.", "torch._dynamo.")  # modules of the frames between that function and `interceptor_of`
_LOCK_TIMEOUT_S = 0.01
_FUSED = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)
_MISSING: Any = object()
_HAS_TORCHS_STEP: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
_interceptors: weakref.WeakKeyDictionary[types.FunctionType, StepInterceptor] = weakref.WeakKeyDictionary()


class Skip:
    """The judge's answer for a step that is to be skipped."""


class SkipStrategy:
    def __init__(self, optimizer: Optimizer, can_skip: bool) -> None:
        # Without gradients a step of torch's optimizers changes nothing but entries of the groups. Others may require
        # gradients, or take missing ones for zeros.
        self._is_noop = getattr(inspect.unwrap(type(optimizer).step), "__module__", "").startswith("torch.")
        # For steps with a closure that may have to be undone; None if that is never needed.
        self.closure_backup = None if self._is_noop or not can_skip else ClosureBackup()
        self._warned: set[str] = set()

    def interceptor(self, optimizer: Optimizer) -> StepInterceptor | None:
        """The interceptor; None for a step that communicates: the other processes would wait for it for ever."""
        return interceptor_of(optimizer) if self._is_noop or not has_other_ranks() else None

    def neutralize(self, optimizer: Optimizer) -> Undo:
        """What to apply to a step that is called all the same, so that nothing of it lasts."""
        change, backup = DryRunStep(optimizer), self.closure_backup
        if backup is not None:
            try:
                change = DryRunStep(optimizer, backup.complete(optimizer))
            except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is one
                self.warn_once(optimizer, "a skipped step could not be undone for want of a copy (%s)", error)
            if backup.is_late:
                self.warn_once(optimizer, "a skipped step had moved parameters or state before its closure was done")
        return change

    def warn_once(self, optimizer: Optimizer, text: str, *values: Any) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s: " + text, type(optimizer).__name__, *values)


class SkippedCall:
    """Takes the optimizer's place among the arguments of one call of its `step`, which is then skipped."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def take(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in place of `step(optimizer, *args, **kwargs)`."""
        return None

    def close(self) -> None:
        """Runs after `take`, even if that raised."""


class StepInterceptor:
    """Intercepts calls of the `step` of one class. torch calls a step between its hooks as `func(*args, **kwargs)`.
    `func` is a closure cell of the function around every `step`, and `args` is what the pre-hooks return, with the
    optimizer first. For one call the cell holds `_dispatch`, which recognises a `SkippedCall` in the optimizer's place
    and passes every other call on."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell
        self._step: Callable[..., Any] = cell.cell_contents
        # Guards the cell. An interrupt may leave it locked: `_dispatch` then stays in the cell, which does no harm.
        self._lock = threading.Lock()
        self._pending: weakref.WeakSet[SkippedCall] = weakref.WeakSet()

    def intercept(self, call: SkippedCall, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments for the pre-hook to return. If the call never comes, only `_dispatch` stays in the cell."""
        self._pending.add(call)
        is_locked = self._lock.acquire(timeout=_LOCK_TIMEOUT_S)
        try:
            self._cell.cell_contents = self._dispatch
        finally:
            if is_locked:
                self._lock.release()
        return (call, *args[1:])

    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        call = args[0]
        if not isinstance(call, SkippedCall):
            self._restore_cell()
            return self._step(*args, **kwargs)
        try:
            return call.take(self._step, args[1:], kwargs)
        finally:
            call.close()
            self._pending.discard(call)
            self._restore_cell()

    def _restore_cell(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # the next call will
        try:
            if not self._pending:
                self._cell.cell_contents = self._step
        finally:
            self._lock.release()


def interceptor_of(optimizer: Optimizer) -> StepInterceptor | None:
    """The interceptor of the step that runs this hook; None in compiled steps, where torch's wrapper is gone."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None or frame.f_code is not HOOKED_STEP or frame.f_locals.get("self") is not optimizer:
        return None
    func = frame.f_locals["func"]
    for cls in type(optimizer).__mro__:
        step: Any = cls.__dict__.get("step")
        while step is not None:
            if getattr(step, "__code__", None) is HOOKED_STEP:
                cell = step.__closure__[HOOKED_STEP.co_freevars.index("func")]
                if cell.cell_contents == func:
                    known = _interceptors.get(step)
                    return _interceptors.setdefault(step, StepInterceptor(cell)) if known is None else known
            step = getattr(step, "__wrapped__", None)
    return None


class Undo:
    """Something done to an optimizer for one step, and undone after it. The constructor changes nothing, so that the
    caller already holds the object when `apply` does: an exception may come at any line. For the same reason each
    method may be called again after it was interrupted."""

    def apply(self) -> None:
        """Does it."""

    def give_back(self) -> None:
        """Undoes it, right after the step, even if that raised."""

    def give_back_late(self) -> None:
        """Undoes it some time after a step that raised, except for what has been changed since."""
        self.give_back()

    def forget(self) -> None:
        """Drops it instead, because a closure has computed new gradients within the step."""


class DryRunStep(Undo):
    """Removes the gradients for one step, and then restores entries of the groups, in which some steps count all the
    same. With a backup, replaces the gradients by zeros, and then restores all that changed."""

    def __init__(self, optimizer: Optimizer, backup: Backup | None = None) -> None:
        self.backup = backup
        self._params = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self._groups = [(group, dict(group)) for group in optimizer.param_groups if backup is None]
        self._gradients: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def apply(self) -> None:
        for p in self._params.values():
            if p.grad is not None:
                instead = None if self.backup is None else torch.zeros_like(p.grad.detach())
                self._gradients.append((p, p.grad, instead))
                p.grad = instead

    def give_back(self) -> None:
        if self.backup is not None:
            self.backup.restore()
        for p, gradient, instead in self._gradients:
            if self.backup is not None or p.grad is instead:
                p.grad = gradient
        for group, kept in self._groups:
            group.update(kept)
            for key in group.keys() - kept.keys():
                del group[key]

    def give_back_late(self) -> None:
        if all(p.grad is instead for p, _, instead in self._gradients):  # else there was a backward pass since
            for p, gradient, _ in self._gradients:
                p.grad = gradient

    def forget(self) -> None:
        self._gradients.clear()
        self.backup = None


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
    """Sets `found_inf` and `grad_scale` on an optimizer for one step, and then restores those of a GradScaler.
    `repairs` have been applied before, and are undone last."""

    def __init__(self, optimizer: Optimizer, attributes: Mapping[str, Any], repairs: Undo | None = None) -> None:
        self._repairs = repairs
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
        if self._repairs is not None:
            self._repairs.give_back()

    def give_back_late(self) -> None:
        self._before = [(name, _MISSING) for name in self._attributes]  # what was there was for the step that raised
        self.give_back()

    forget = give_back


def with_other_strides(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters and their gradients, where the strides differ. Cost: 0.3 us a tensor."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        gradient = p.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.stride() == p.stride():
            continue
        strides = zip(gradient.shape, gradient.stride(), p.stride())
        if any(size > 1 and a != b for size, a, b in strides):
            yield p, gradient


class ContiguousGrads(Undo):
    """Copies gradients to the memory order of their parameters for one step, already when it is made. Fused kernels
    walk through both in one order; where the orders differ, they read the wrong elements, or refuse."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._gradients: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for p, gradient in with_other_strides(optimizer):
            p.grad = torch.empty_like(p).copy_(gradient.detach())
            self._gradients.append((p, gradient, p.grad))

    def give_back(self) -> None:
        """Puts the original gradients back, with the values that the step left."""
        with torch.no_grad():
            for p, gradient, copy in self._gradients:
                if p.grad is copy:
                    gradient.copy_(copy)
                    p.grad = gradient


class Momentum:
    """Gives a fused SGD its momentum buffers before a step that may be skipped, which would leave them uninitialised.
    Zeros give the same first step, unless it is dampened: momentum * 0 + gradient is the gradient."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any]] = {}

    def is_safe(self, optimizer: Optimizer, which: Sequence[Any]) -> bool:
        """Makes the buffers. False if the first step is dampened, so that the host has to decide whether to skip it.
        `which` tells which parameters have a gradient. Cost: 0.2 us, and 0.1 us a parameter when something has
        changed."""
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
