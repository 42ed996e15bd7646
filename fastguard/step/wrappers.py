"""What is around an optimizer or a model: wrappers, and calls of `step` that are not steps of their own."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from .. import kernels
from ..observers.observer import leave_to_python
from ..records import TensorStats

# The code of the function that torch wraps around every `step`, and that calls the hooks.
HOOKED_STEP = Optimizer.profile_hook_step(lambda self: None).__code__
_HOOKS = "_optimizer_step_pre_hooks"
_PROXIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")  # packages that only wrap others


def inwards(optimizer: Any) -> Iterator[Any]:
    """`optimizer`, and what it wraps, outermost first."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        inner = getattr(optimizer, "__dict__", {})
        optimizer = inner.get("optimizer", inner.get("_optimizer"))


def _is_proxy(optimizer: Any) -> bool:
    """Whether `optimizer` only hands on to what it holds, which is what takes the steps. Optimizers that do something
    of their own around another (Lookahead, SAM, schedule-free wrappers) are no proxies. Most call Optimizer.__init__,
    or have their `step` wrapped as that does. One that has neither is an accelerate-like wrapper if it has no groups
    and no state of its own."""
    if any(c.__module__.partition(".")[0] in _PROXIES for c in type(optimizer).__mro__):
        return True
    own = getattr(optimizer, "__dict__", {})
    return not isinstance(optimizer, Optimizer) or not (_HOOKS in own or "param_groups" in own or "state" in own)


def innermost(optimizer: Any, *, in_backward: bool = False) -> Optimizer:
    """The optimizer that takes the steps, inside the proxies that stand around it. Raises TypeError if it is none of
    torch's, or is DeepSpeed's; if its step cannot be hooked; if it steps within the backward pass, and not
    `in_backward`."""
    for module in {c.__module__ for c in type(optimizer).__mro__}:
        if module.split(".")[0] == "deepspeed":
            raise TypeError(
                "`optimizer` must be a torch.optim.Optimizer that takes one step a call, got DeepSpeed's "
                f"{type(optimizer).__name__}, which steps group by group on partitioned gradients. Run without ZeRO."
            )
    inner = next((layer for layer in inwards(optimizer) if not _is_proxy(layer)), [optimizer, *inwards(optimizer)][-1])
    if not isinstance(inner, Optimizer):
        raise TypeError(f"`optimizer` must be a torch.optim.Optimizer, got {type(inner).__name__}")
    if _HOOKS not in inner.__dict__ or not getattr(type(inner).step, "hooked", False):
        raise TypeError(
            f"`optimizer` must have a step that hooks can be put on, got {type(inner).__name__}, which never calls "
            "Optimizer.__init__. Call super().__init__ in it; or guard the optimizer that it holds, before it is made: "
            "then only what that one does is skipped."
        )
    groups = (getattr(inner, "defaults", {}), *inner.param_groups)
    if not in_backward and any(group.get("gradient_release") for group in groups):
        raise TypeError(
            f"`optimizer` must be stepped after the backward pass, got {type(inner).__name__} with "
            "gradient_release=True, which steps within it, parameter by parameter: no gradients are there to be judged "
            "together. Leave gradient_release out, or call fastguard.wrap_backward(model, optimizer)."
        )
    return inner


def is_state_initialisation(optimizer: Optimizer, kwargs: dict[str, Any]) -> bool:
    """Whether this is the step by which torch.distributed.checkpoint makes an optimizer create its state. It calls
    `step(closure=None)` on an optimizer without state, with every learning rate and every gradient zero."""
    if kwargs.get("closure", True) is not None or optimizer.state:
        return False
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    if any(rate is None or float(rate) != 0.0 for rate in rates):
        return False
    groups = [group["params"] for group in optimizer.param_groups]
    total = TensorStats(kernels.gradient_stats(groups, "auto", 1.0)[0]).total()
    return total.num_zeros == total.total_elements


def may_nest(cls: type) -> bool:
    """Whether the `step` of an optimizer class may call that of a parent class, which would run all hooks twice."""
    steps = {inspect.unwrap(c.__dict__["step"]) for c in cls.__mro__ if "step" in c.__dict__}
    return len(steps - {Optimizer.step}) > 1


def is_nested(optimizer: Optimizer) -> bool:
    """Whether the step that runs this hook is part of another step of the same optimizer. A subclass's `step` that
    calls `super().step()` runs all hooks again once torch has wrapped the parent's `step`. A counter would miss the end
    of a step that raised."""
    steps = (frame for frame in callers() if frame.f_code is HOOKED_STEP and frame.f_locals.get("self") is optimizer)
    return next(steps, None) is not None and next(steps, None) is not None


def callers() -> Iterator[types.FrameType]:
    """The frames of all calls under way, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def left_to_python(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A method that dynamo does not trace. It would otherwise be compiled into the step, and recompiled at every step.
    Older versions of torch need a decorator for that."""
    function: Any = hook.__func__  # type: ignore[attr-defined]
    if not leave_to_python(function):
        return torch.compiler.disable(hook)
    function._torchdynamo_disable = True
    return hook
