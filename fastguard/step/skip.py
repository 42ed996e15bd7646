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
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ..ranks import has_other_ranks
from .backup import Backup, ClosureBackup
from .wrappers import HOOKED_STEP

_log = logging.getLogger("fastguard")
_BETWEEN = ("fastguard.step.", "torch._dynamo.")  # modules of the frames between that function and `interceptor_of`
_LOCK_TIMEOUT_S = 0.01


class Skip:
    """The judge's answer for a step that is to be skipped; `repairs` have to be undone after the step all the same."""

    def __init__(self, repairs: Undo | None = None) -> None:
        self.repairs = repairs


class SkipStrategy:
    """Skips the steps of one optimizer."""

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

    def neutralize(self, optimizer: Optimizer, repairs: Undo | None) -> Undo:
        """What to apply to a step that is called all the same, so that nothing of it lasts."""
        change, backup = DryRunStep(optimizer), self.closure_backup
        if backup is not None:
            try:
                change = DryRunStep(optimizer, backup.complete(optimizer))
            except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is one
                self.warn_once(optimizer, "a skipped step could not be undone for want of a copy (%s)", error)
            if backup.is_late:
                self.warn_once(optimizer, "a skipped step had moved parameters or state before its closure was done")
        return change if repairs is None else UndoPair(repairs, change)

    def warn_once(self, optimizer: Optimizer, text: str, *values: Any) -> None:
        """Logs a warning the first time."""
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
    """Intercepts calls of the `step` of one class.

    torch calls a step between its hooks as `func(*args, **kwargs)`. `func` is a closure cell of the function around
    every `step`, and `args` is what the pre-hooks return, with the optimizer first. For one call the cell holds
    `_dispatch`, which recognises a `SkippedCall` in the optimizer's place and passes every other call on.
    """

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


_interceptors: weakref.WeakKeyDictionary[types.FunctionType, StepInterceptor] = weakref.WeakKeyDictionary()


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
    """Something done to an optimizer for one step, and undone after it.

    The constructor changes nothing, so that the caller already holds the object when `apply` does: an exception may
    come at any line. For the same reason each method may be called again after it was interrupted.
    """

    def apply(self) -> None:
        """Does it."""

    def give_back(self) -> None:
        """Undoes it, right after the step, even if that raised."""

    def give_back_late(self) -> None:
        """Undoes it some time after a step that raised, except for what has been changed since."""
        self.give_back()

    def forget(self) -> None:
        """Drops it instead, because a closure has computed new gradients within the step."""


class UndoPair(Undo):
    """Two things to undo, the later one first. The earlier one has been applied."""

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
