"""Finds missing `zero_grad` calls: gradients of a step that are still there when those of the next are added."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .observer import ObservedRun, Observer, ParameterHook
from .sketches import sample
from .tensors import can_be_read, strided

_NUM_WATCHED = 20  # steps
_MAX_STEPS = 64  # after which it is given up where there are no backward passes
_MAX_READ = 65536
_FIRST_READ = 16  # elements, one of which is not zero as a rule


class _Watched(Observer):
    """One parameter, and its gradient when it was last added to, or when the last step ended.

    Attributes:
        is_left: whether the gradient of that time has stayed in it.
        num_passes: backward passes that reached it since the last step.
        was_cleared: whether their gradient was gone or zero when the step was taken.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self.is_left = self.was_cleared = False
        self.num_passes = 0
        self.hold(
            parameter.register_hook(ParameterHook(self._is_to_be_added)),
            parameter.register_post_accumulate_grad_hook(ParameterHook(self._was_added)),
        )

    def _is_to_be_added(self, gradient: torch.Tensor) -> None:
        parameter = self._parameter()
        self.is_left = self.is_left and parameter is not None and self._is_untouched(parameter.grad)

    def _is_untouched(self, gradient: torch.Tensor | None) -> bool:
        """Whether it is the gradient that was remembered, and nothing has written to it."""
        known = None if self._gradient is None else self._gradient()
        return gradient is not None and gradient is known and gradient._version == self._version

    def _was_added(self, parameter: torch.Tensor) -> None:
        self.num_passes += 1
        self._remember(parameter.grad)

    def end_step(self, *, may_read: bool) -> None:
        """The step has been taken: what is in the gradient from here on is old."""
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        is_zero = gradient is not None and may_read and _is_zero(gradient)
        self.was_cleared = gradient is None or (not self._is_untouched(gradient) and (is_zero or not may_read))
        self.num_passes = 0
        self._remember(gradient)
        self.is_left = gradient is not None and not is_zero

    def _remember(self, gradient: torch.Tensor | None) -> None:
        self._gradient = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else gradient._version


class LeftGradients(Observer):
    """Watches the first and the last parameter for the first twenty steps.

    A gradient is left over if nothing replaced or zeroed it between the end of one step and the next, so that it is
    part of the gradient of the next step. Accumulated micro-batches do not count, nor does a gradient that is cleared
    later than at the first backward pass.

    Attributes:
        num_watched: steps that ended with gradients added since the one before.
        num_left: of these, the steps that included the gradients of the step before.
        num_cleared: steps at which the gradients of the backward passes were gone; if gradients may not be read, steps
            before which something wrote to them.

    Cost: 5 us a backward pass until it is over; then nothing.
    """

    def __init__(self, run: ObservedRun, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._run = run
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        params = [p for p in params if p.requires_grad and p.is_leaf and p.layout is torch.strided]
        params = [p for p in params if not hasattr(p, "to_local")]  # FSDP2 adds to them past the hooks
        chosen = {id(p): p for p in (*params[:1], *params[-1:])}
        self._watched = [_Watched(p) for p in chosen.values()]
        self._num_steps = 0
        self._has_begun = False
        self.num_watched = 0
        self.num_left = self.num_cleared = 0

    def next_after(self, step: int) -> float:
        return step + 1 if self._watched else math.inf

    def after(self, step: int) -> None:
        if not self._watched:
            return
        if any(watched.num_passes for watched in self._watched):
            if self._has_begun:
                self.num_watched += 1
                self.num_left += any(watched.is_left and watched.num_passes for watched in self._watched)
            self._has_begun = True
        reached = [watched for watched in self._watched if watched.num_passes]
        for watched in self._watched:
            watched.end_step(may_read=self._run.may_wait)
        self.num_cleared += bool(reached) and all(watched.was_cleared for watched in reached)
        self._num_steps += 1
        self._end()

    def _end(self) -> None:
        if self.num_watched >= _NUM_WATCHED or self._num_steps >= _MAX_STEPS:
            self.close()

    def state(self) -> list[int]:
        """The counts."""
        return [self.num_watched, self.num_left, self._num_steps, int(self._has_begun), self.num_cleared]

    def load(self, state: Sequence[int]) -> None:
        """Goes on from `state`."""
        self.num_watched, self.num_left, self._num_steps, has_begun, *rest = state
        self.num_cleared = rest[0] if rest else 0
        self._has_begun = bool(has_begun)
        self._end()

    def facts(self) -> dict[str, Any]:
        if not self.num_watched:
            return {}
        return {
            "num_left_gradients": self.num_left,
            "num_watched_backwards": self.num_watched,
            "num_cleared_gradients": self.num_cleared,
        }

    def close(self) -> None:
        for watched in self._watched:
            watched.close()
        self._watched = []


def _is_zero(gradient: torch.Tensor) -> bool:
    """Whether all elements are zero, as after `zero_grad` within the step. False for a gradient on a device."""
    if not can_be_read(gradient):
        return False
    few = sample([gradient], _FIRST_READ)
    if few is not None and any(memoryview(few).cast("d")):
        return False
    with torch.no_grad():
        return not bool(strided(gradient, _MAX_READ).any())
