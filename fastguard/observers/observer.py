"""The Observer contract, and the hooks that observers set on modules and parameters."""

from __future__ import annotations

import contextlib
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

# Modules that only wrap another one, and the name under which they hold it.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive, for one of the object's own parts to call."""
    return types.MethodType(method.__func__, weakref.proxy(method.__self__))  # type: ignore[attr-defined]


def while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method that does not keep its object alive, and does nothing once that is freed."""
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = ref()
        if found is not None:
            found(*args)

    return call


class Transient:
    """A hook that does nothing in a copy of the model or in a file, and that loads without this package."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class ModuleHook(Transient):
    """A hook on a module that calls a method, held weakly, with `given` and what torch passes; not while tracing."""

    def __init__(self, method: Callable[..., None], *given: Any) -> None:
        self._method, self._given = weakref.WeakMethod(method), given

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        method = self._method()
        if method is not None and not torch._C._is_tracing():
            method(*self._given, *args)


class ParameterHook:
    """Calls `method` with the gradient of `parameter` before it is added, or with the parameter afterwards.

    It does not keep the method's object alive. Once removed, it leaves the parameter without a trace: torch would enter
    Python at every backward pass for a dictionary of hooks that is empty.
    """

    def __init__(
        self, parameter: torch.Tensor, method: Callable[[torch.Tensor], None], *, before: bool = False
    ) -> None:
        self._parameter = weakref.ref(parameter)
        self._name = "_backward_hooks" if before else "_post_accumulate_grad_hooks"
        register: Any = parameter.register_hook if before else parameter.register_post_accumulate_grad_hook
        self._handle = register(unserializable_hook(while_alive(method)))

    def remove(self) -> None:
        self._handle.remove()
        parameter = self._parameter()
        if parameter is not None and getattr(parameter, self._name) == {}:
            setattr(parameter, self._name, None)


class Observer:
    """Observes something besides the gradients, around the steps that it asks for. `Observers` owns and calls it.

    An observation may allocate max(1 MiB, 1 % of what it reads), and keeps neither the graph nor a batch alive. Errors
    are counted, and training continues.
    """

    what = "sampled evidence"  # the name under which its errors are counted
    so = "What it saw of that step was left out."  # what an error means for the run
    _handles: tuple[Any, ...] = ()

    def next_after(self, step: int) -> float:
        """The first step after `step` around which to call it; Inf for none."""
        return math.inf

    @property
    def has_before(self) -> bool:
        """Whether `before` has something to do at the step that is due next."""
        return type(self).before is not Observer.before

    def before(self, step: int) -> None:
        """Called before such a step, when its gradients are there, if any observer has something to do then."""

    def after(self, step: int) -> None:
        """Called when all optimizers have taken or skipped such a step."""

    def facts(self) -> dict[str, Any]:
        """Its findings, as facts about the model."""
        return {}

    def forget(self) -> None:
        """The next step does not follow the last one: there were unobserved steps, or the run resumes elsewhere."""

    def close(self) -> None:
        """Removes all hooks."""
        handles, self._handles = self._handles, ()
        for handle in handles:
            handle.remove()

    def hold(self, *handles: Any) -> None:
        """Keeps handles of hooks until `close`."""
        self._handles += handles


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP, FSDP, `torch.compile` and activation checkpointing."""
    while True:
        name = next((WRAPPERS[c.__name__] for c in type(module).__mro__ if c.__name__ in WRAPPERS), "")
        inner = getattr(module, name, None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def leave_to_python(*functions: Any) -> bool:
    """Keeps dynamo, where torch can tell it so, from compiling hooks on their own for a model that is not compiled."""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return False
    leave = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for function in functions:
        frames.set_code_exec_strategy(function.__code__, leave)
    return True


leave_to_python(ModuleHook.__call__)
