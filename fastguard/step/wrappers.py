"""What is around an optimizer: wrappers, calls of `step` that are not steps of their own, and a GradScaler.

With `_step_supports_amp_scaling` set, `GradScaler.step` does not decide on the host whether to step: it sets
`optimizer.grad_scale` (None once the gradients are unscaled) and `optimizer.found_inf`, calls `step`, and deletes both.
The guard sets that flag, to see skipped steps. A fused optimizer unscales by itself. For any other the guard does, and
takes both attributes away during the step, since many optimizers raise on them; None is left for the scaler to delete.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .. import kernels
from ..observers.observer import leave_to_python
from ..records import TensorStats

_log = logging.getLogger("fastguard")
# The code of the function that torch wraps around every `step`, and that calls the hooks.
HOOKED_STEP = Optimizer.profile_hook_step(lambda self: None).__code__
_HOOKS = "_optimizer_step_pre_hooks"
_FLAG = "_step_supports_amp_scaling"
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


class Handed(NamedTuple):
    """What a scaler handed over, as it is. The host has not waited for it."""

    grad_scale: Any = None  # what the gradients have to be divided by: tensor or number; None if they are not scaled
    found_inf: Any = None  # not 0 if the scaler saw a non-finite gradient; a sum over devices, so it may be 2
    fused: bool = False  # the optimizer divides by `grad_scale` itself
    from_scaler: bool = False  # a scaler is at work, also where it has unscaled already
    inverse: float = 1.0  # what to multiply by instead, rounded as `GradScaler.unscale_` rounds it; set by `read`

    def read(self) -> Handed:
        """The same as numbers, and a truth value; synchronises if a tensor is on an accelerator."""
        if not self.from_scaler:
            return _READ_NOTHING
        scale, inverse = None, 1.0
        if self.grad_scale is not None:
            scale = float(self.grad_scale)
            inverse = float(torch.tensor(scale, dtype=torch.float64, device="cpu").reciprocal().float())
        return Handed(scale, self.found_inf is not None and bool(self.found_inf), self.fused, True, inverse)


_NOTHING, _READ_NOTHING = Handed(), Handed(found_inf=False)


class ScalerContract:
    def __init__(self, optimizer: Optimizer, proxies: Sequence[weakref.ref[Any]] = ()) -> None:
        self._proxies = proxies
        self._had_flag = optimizer.__dict__.get(_FLAG)
        self.is_skipped = False  # the step under way, which a scaler asked for, is left out
        self.holds = False  # what the scaler set has to be there again after the step
        self._native = bool(getattr(optimizer, _FLAG, False))
        # A step with this argument gets the scaler itself and unscales by rules of its own.
        self._takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
        if not self._takes_scaler:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        elif self._native:
            _log.warning(
                "%s.step takes a `grad_scaler` and unscales by itself: a step that a GradScaler hands itself to is "
                "neither clipped, skipped nor recorded. Call scaler.unscale_(optimizer) and optimizer.step() yourself.",
                type(optimizer).__name__,
            )

    def leave(self, optimizer: Optimizer) -> None:
        if self._had_flag is None:
            optimizer.__dict__.pop(_FLAG, None)
        else:
            optimizer.__dict__[_FLAG] = self._had_flag

    def give_back(self, optimizer: Optimizer) -> None:
        """Before control returns to the scaler, which deletes what it set: so that there is something to delete."""
        if self.holds:
            self.holds = False
            optimizer.__dict__["grad_scale"] = optimizer.__dict__["found_inf"] = None
        if self.is_skipped:
            self.is_skipped = False
            # accelerate knows a skipped step by `step` not being called, which the scaler leaves to us, and has its
            # schedulers wait for one. It replaces `step` by a function that sees that, whose closure holds accelerate's
            # optimizer.
            for cell in getattr(optimizer.__dict__.get("step"), "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # nothing is in it yet
                    if "_accelerate_step_called" in getattr(cell.cell_contents, "__dict__", {}):
                        cell.cell_contents._accelerate_step_called = False

    def withhold(self, optimizer: Optimizer) -> None:
        """Takes away what was handed over: from a step that would raise on it, or that is not called."""
        given = optimizer.__dict__
        if "grad_scale" in given or "found_inf" in given:
            self.holds = True
            given.pop("grad_scale", None)
            given.pop("found_inf", None)

    def abandon(self, optimizer: Optimizer) -> None:
        """The step ends in an error: the scaler will not clean up, and would take leftovers into its next step."""
        self.withhold(optimizer)
        self.holds = False

    def receive(self, optimizer: Optimizer, kwargs: dict[str, object]) -> Handed | None:
        """What the scaler handed over for the coming step. None if it handed over itself: then only the optimizer knows
        how its gradients are scaled. Does not synchronise."""
        self.holds = self.is_skipped = False  # a step that raised left it set
        given = optimizer.__dict__
        grad_scale, found_inf = given.get("grad_scale"), given.get("found_inf")
        is_leaked = grad_scale is None and found_inf is None and bool(self._proxies)
        if is_leaked:
            # What it set on a wrapper of the optimizer, which shows the optimizer's flag as its own. The guard then
            # unscales, and the scaler finds its attributes where it left them.
            for held in (getattr(proxy(), "__dict__", {}) for proxy in reversed(self._proxies)):
                if held.get("grad_scale") is not None or held.get("found_inf") is not None:
                    grad_scale, found_inf = held.get("grad_scale"), held.get("found_inf")
        if grad_scale is None and found_inf is None:
            return _NOTHING if kwargs.get("grad_scaler") is None else None
        # An optimizer from elsewhere that has the flag, and no such option, always reads the attributes.
        fused = self._native and not is_leaked and any(group.get("fused", True) for group in optimizer.param_groups)
        if not fused and not is_leaked:
            self.withhold(optimizer)
        return Handed(grad_scale, found_inf, fused, True)
