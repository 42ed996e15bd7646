"""What a GradScaler hands to an optimizer, and what the guard makes of it.

With `_step_supports_amp_scaling` set, `GradScaler.step` does not decide on the host whether to step: it sets
`optimizer.grad_scale` (None once the gradients are unscaled) and `optimizer.found_inf`, calls `step`, and deletes both.
The guard sets that flag, to see skipped steps. A fused optimizer unscales by itself. For any other the guard does, and
takes both attributes away during the step, since many optimizers raise on them; None is left for the scaler to delete.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

_log = logging.getLogger("fastguard")
_FLAG = "_step_supports_amp_scaling"


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
        """What the scaler handed over for the step that is about to be taken; None if that is itself, and nobody but
        the optimizer knows how its gradients are scaled. Does not synchronise."""
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
