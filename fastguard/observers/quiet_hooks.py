"""A forward hook that torch skips while it has nothing to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..kernels.cpu import extension

_is_traced = torch.compiler.is_dynamo_compiling
_FIRST_TORCH = 2, 13  # whose dynamo traces a model with such hooks


class PlainSchedule:
    """What `schedule_for` returns without the extension. A class of its own, since dynamo traces what sets it."""

    training_from = evaluation_from = 0
    is_evaluation_due = False


def schedule_for(clock: Any, model: nn.Module) -> Any:
    """From which steps on a forward pass of the model is to be looked at, to begin with at once.

    With the clock of a run, which only the extension has, C++ compares these with the number of the step, and a pass
    that is not due enters no Python function.

    Returns:
        an object with `training_from`, from which step on a pass in train mode and with autograd is due;
        `evaluation_from`, the same for any other pass if there was one in train mode since the last; and
        `is_evaluation_due`, whether there was.
    """
    if clock is None:
        return PlainSchedule()
    return extension.ScheduleState(clock, model)


class QuietHooks(OrderedDict[int, Any]):
    """The forward hooks of a module, which are false while the only one has nothing to do.

    `Module.__call__` calls just `forward` where all its dicts of hooks are false. A hook adds 4 us a pass, whatever it
    does. Dynamo compiles the hook like any other.

    Attributes:
        is_awaited: asks that hook, at each pass, and again where the module has hooks of other kinds. None: it has been
            removed, and these are ordinary hooks.
    """

    is_awaited: Callable[[], bool] | None = None

    def __bool__(self) -> bool:
        if _is_traced() or len(self) != 1 or self.is_awaited is None:
            return len(self) > 0
        return self.is_awaited()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or one in a file, has plain hooks."""
        return OrderedDict, (list(self.items()),)


def can_be_traced() -> bool:
    """Whether this torch can compile a model with such hooks."""
    return tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= _FIRST_TORCH


def hook_quietly(module: nn.Module, hook: Any, is_awaited: Callable[[], bool], schedule: Any) -> tuple[Any, Any]:
    """Registers a forward hook with kwargs. Returns its handle, and the dict in which it is quiet, or None.

    It cannot be quiet where there are hooks already, whose handles know the dict that is there, or where the module
    has a `__call__` of its own.
    """
    hooks: Any = None
    if can_be_traced() and type(module).__call__ is nn.Module.__call__:
        known = module.__dict__.get("_forward_hooks")
        if type(known) is OrderedDict and not known:
            hooks = QuietHooks() if isinstance(schedule, PlainSchedule) else extension.QuietHooks()
            module.__dict__["_forward_hooks"] = hooks
    handle = module.register_forward_hook(hook, with_kwargs=True)
    if hooks is not None:
        hooks.schedule, hooks.is_awaited = schedule, is_awaited
    return handle, hooks


def unhook(module: nn.Module | None, handle: Any, hooks: Any) -> None:
    """Takes away what `hook_quietly` gave."""
    handle.remove()
    if hooks is not None:
        hooks.is_awaited = None
        if module is not None and not hooks and module.__dict__.get("_forward_hooks") is hooks:
            module.__dict__["_forward_hooks"] = OrderedDict()
