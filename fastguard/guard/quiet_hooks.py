"""A forward hook that torch goes past while it has nothing to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_is_traced = torch.compiler.is_dynamo_compiling
_FIRST_TORCH = 2, 13  # from which on dynamo finds its way through what stands here


class QuietHooks(OrderedDict[int, Any]):
    """The forward hooks of a module, which are false while the only one says that it has nothing to do.

    `Module.__call__` calls `forward` and nothing else where all its dicts of hooks are false. With a hook it takes 4 us
    more, at each pass, whatever the hook does. In what dynamo compiles the hook is one as any.

    Attributes:
        is_awaited: of that hook; asked at each pass, and again where the module has hooks of other kinds. None: it is
            gone, and these are hooks as any.
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


def hook_quietly(module: nn.Module, hook: Any, is_awaited: Callable[[], bool]) -> tuple[Any, QuietHooks | None]:
    """Sets a forward hook with kwargs; its handle, and the dict in which it stays quiet, or None where it cannot.

    It cannot where there are hooks already, whose handles know the dict that is there, or where the module is called in
    its own way.
    """
    hooks: QuietHooks | None = None
    if can_be_traced() and type(module).__call__ is nn.Module.__call__:
        known = module.__dict__.get("_forward_hooks")
        if type(known) is OrderedDict and not known:
            module.__dict__["_forward_hooks"] = hooks = QuietHooks()
    handle = module.register_forward_hook(hook, with_kwargs=True)
    if hooks is not None:
        hooks.is_awaited = is_awaited
    return handle, hooks


def unhook(module: nn.Module | None, handle: Any, hooks: QuietHooks | None) -> None:
    """Takes away what `hook_quietly` gave."""
    handle.remove()
    if hooks is not None:
        hooks.is_awaited = None
        if module is not None and not hooks and module.__dict__.get("_forward_hooks") is hooks:
            module.__dict__["_forward_hooks"] = OrderedDict()
