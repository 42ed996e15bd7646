"""Another way for one call of an optimizer's `step`: not to be taken at all, or to be attended to its end.

torch calls a step between its hooks as `func(*args, **kwargs)`: `func` is a cell of the function that it wraps around
every `step`, and `args` is what the pre-hooks made of the arguments, the optimizer first. For one call a function is
put into that cell that knows a `Ticket` in the optimizer's place, and passes every other call on. Nothing else is
touched, so a step that is left out leaves everything as it is, whatever its class does without gradients.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# The code of the function that torch wraps around every `step`, and that calls the hooks.
HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
_BETWEEN = ("fastguard.guard.", "torch._dynamo.")  # modules of the frames from that function to who asks here
_PATIENCE_S = 0.01


def may_communicate() -> bool:
    """Whether a step may be waited for by other processes, which would wait for ever if it were not taken."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def may_nest(cls: type) -> bool:
    """Whether the `step` of an optimizer may call that of a parent class, which would run all hooks twice."""
    steps = {inspect.unwrap(c.__dict__["step"]) for c in cls.__mro__ if "step" in c.__dict__}
    return len(steps - {torch.optim.Optimizer.step}) > 1


def is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that runs this hook is part of another step of the same optimizer.

    A subclass's `step` that calls `super().step()` runs all hooks again once torch has wrapped the parent's `step` too,
    which it does when the first optimizer of the parent's class is made. A count alone would not do: a step that raised
    never told that it was over.
    """
    count = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is HOOKED_STEP and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count > 1


class Ticket:
    """Stands for an optimizer among the arguments of one call of its `step`, which is then not taken."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def take(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of `step(optimizer, *args, **kwargs)`."""
        return None

    def close(self) -> None:
        """Afterwards, whatever happened."""


class Junction:
    """Where the calls of one class's `step` pass through."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell
        self._step: Callable[..., Any] = cell.cell_contents
        # Between who puts `_pass` there and who takes it away for want of tickets. An interrupt may leave it locked:
        # then nobody takes it away any more, and nobody needs the lock.
        self._lock = threading.Lock()
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()  # issued, and not taken yet

    def admit(self, ticket: Ticket, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments to call `step` with, once; of a call that never comes, nothing is left but a way through."""
        self._tickets.add(ticket)
        is_locked = self._lock.acquire(timeout=_PATIENCE_S)
        try:
            self._cell.cell_contents = self._pass
        finally:
            if is_locked:
                self._lock.release()
        return (ticket, *args[1:])

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        ticket = args[0]
        if not isinstance(ticket, Ticket):
            self._leave(None)
            return self._step(*args, **kwargs)
        try:
            return ticket.take(self._step, args[1:], kwargs)
        finally:
            ticket.close()
            self._leave(ticket)

    def _leave(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._tickets.discard(ticket)
        if not self._lock.acquire(blocking=False):
            return  # the next call will
        try:
            if not self._tickets:
                self._cell.cell_contents = self._step
        finally:
            self._lock.release()


_junctions: weakref.WeakKeyDictionary[types.FunctionType, Junction] = weakref.WeakKeyDictionary()


def junction_of(optimizer: torch.optim.Optimizer) -> Junction | None:
    """Where the step that runs this hook passes through; None if it is not torch's wrapper that calls it, as in a
    compiled step.

    Cost: 3 us.
    """
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
                if cell.cell_contents is func or cell.cell_contents == func:  # a bound method is made anew each time
                    return _junction_at(step, cell)
            step = getattr(step, "__wrapped__", None)
    return None


def _junction_at(step: types.FunctionType, cell: types.CellType) -> Junction:
    junction = _junctions.get(step)
    return _junctions.setdefault(step, Junction(cell)) if junction is None else junction


def left_to_python(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A method as dynamo runs it untraced: else it would be compiled into the step, and recompiled at every one.

    An older torch has to be told so by a decorator.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return torch.compiler.disable(hook)
    function: Any = hook.__func__  # type: ignore[attr-defined]
    leave = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, leave)
    function._torchdynamo_disable = True
    return hook
