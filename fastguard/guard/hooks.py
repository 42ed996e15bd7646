"""The two step hooks on one optimizer: judge the gradients before the step, put things back after it."""

from __future__ import annotations

import functools
import sys
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import kernels
from ..stats import TensorStats
from ..weights import WeightCollector
from .scaler import Handed, ScalerContract
from .undo import Undo

if TYPE_CHECKING:
    from .guard import Guard


class Attachment:
    """The guard's hooks on one optimizer. Refers to the optimizer weakly: the optimizer owns the guard."""

    def __init__(
        self,
        guard: Guard,
        optimizer: torch.optim.Optimizer,
        proxies: Sequence[weakref.ref[Any]] = (),
        weights: WeightCollector | None = None,
    ) -> None:
        self.guard = guard
        self._weights = weights
        self._optimizer = weakref.ref(optimizer)
        self._scaler = ScalerContract(optimizer, proxies)
        # LBFGS evaluates its closure several times a step and has no step without gradients.
        self.can_skip = not isinstance(optimizer, torch.optim.LBFGS)
        self._undo: Undo | None = None
        self._evaluations = 0
        self._depth = 0  # of steps under way; more than 1 where a subclass's step calls its parent's
        self._silent = False
        self.is_paused = False
        # A hook that dynamo traced would be compiled into the step, and recompiled at every one.
        self._handles = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._before)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._after)),
        ]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("the guarded optimizer no longer exists")
        return optimizer

    def remove(self) -> None:
        """Leaves the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        self._give_back()
        optimizer = self._optimizer()
        if optimizer is not None:
            self._scaler.leave(optimizer)

    def _give_back(self) -> None:
        if self._undo is not None:
            self._undo.give_back()
            self._undo = None

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.is_paused:
            return None
        started = time.perf_counter()
        if self._depth and _is_nested(optimizer):
            self._depth += 1
            return None  # the outer step has been judged, or its closure will be
        self._depth = 1
        self._give_back()  # of a step that raised before its post-hook ran
        self._evaluations = 0
        handed = self._scaler.receive(optimizer, kwargs)
        self._silent = _is_state_initialisation(optimizer, kwargs)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self._silent:
            return None
        if self._weights is not None:
            self._weights.before(self.guard, self, optimizer)
            started = time.perf_counter()
        if not callable(closure):
            self._judge(optimizer, handed)
            self.guard.judges.now.add_overhead(time.perf_counter() - started)
            return None
        # The gradients of this step do not exist before the closure has run.
        judged = self._judging(closure, optimizer, handed)
        if len(args) > 1:
            return (args[0], judged, *args[2:]), kwargs
        return args, {**kwargs, "closure": judged}

    def _judging(
        self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer, handed: Handed
    ) -> Callable[[], Any]:
        @functools.wraps(closure)
        def judged() -> Any:
            loss = closure()
            started = time.perf_counter()
            if self._undo is not None:  # the closure has made gradients anew
                self._undo.forget()
                self._undo = None
            self._judge(optimizer, handed, loss)
            self.guard.judges.now.add_overhead(time.perf_counter() - started)
            return loss

        return judged

    def _judge(self, optimizer: torch.optim.Optimizer, handed: Handed, loss: Any = None) -> None:
        try:
            self._undo = self.guard.judge(self, optimizer, handed, self._evaluations == 0, loss)
        except BaseException:
            self._scaler.abandon(optimizer)
            self.guard.step_taken()  # too many skips in a row: what was sampled belongs to this step
            raise
        self._evaluations += 1

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_paused:
            return
        self._depth -= 1
        if self._depth == 0:
            self._give_back()
            if self._weights is not None:
                self._weights.after(self.guard, self, optimizer)
            self._scaler.give_back(optimizer)
            if self.guard.has_more_to_do and not self._silent:
                self.guard.step_taken()
            self._silent = False


# The code of the function that torch wraps around every `step`, and that calls the hooks.
_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that runs this hook is part of another step of the same optimizer.

    A subclass's `step` that calls `super().step()` runs all hooks again once torch has wrapped the parent's `step` too,
    which it does when the first optimizer of the parent's class is made. A count alone would not do: a step that raised
    never told that it was over.
    """
    count = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count > 1


def _is_state_initialisation(optimizer: torch.optim.Optimizer, kwargs: dict[str, Any]) -> bool:
    """Whether this is the step by which torch.distributed.checkpoint makes an optimizer create its state.

    It calls `step(closure=None)` on an optimizer without state, with every learning rate and every gradient zero.
    """
    if kwargs.get("closure", True) is not None or optimizer.state:
        return False
    if any(float(group["lr"]) != 0.0 for group in optimizer.param_groups if "lr" in group):
        return False
    groups = [group["params"] for group in optimizer.param_groups]
    total = TensorStats(kernels.gradient_stats(groups, "auto", 1.0)[0]).total()
    return total.num_zeros == total.total_elements
