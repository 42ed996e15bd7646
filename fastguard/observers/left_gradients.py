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
    """One parameter, and its gradient when it was last added to, or when the last step ended."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._version = self.num_passes = 0  # backward passes that reached it since the last step
        self.is_left = False  # whether the gradient of that time has stayed in it
        self.was_cleared = False  # whether the passes' gradient was gone or zero when the step was taken
        self.hold(
            ParameterHook(parameter, self._is_to_be_added, before=True),
            ParameterHook(parameter, self._was_added),
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

    A gradient is left over if nothing replaced or zeroed it between the end of one step and the next. Accumulated
    micro-batches do not count, nor does a gradient that is cleared later than at the first backward pass.

    Cost: 5 us a backward pass until it is over; then nothing.
    """

    def __init__(self, run: ObservedRun, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._run = run
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        params = [p for p in params if p.requires_grad and p.is_leaf and p.layout is torch.strided]
        params = [p for p in params if not hasattr(p, "to_local")]  # FSDP2 adds to them past the hooks
        self._watched = [_Watched(p) for p in {id(p): p for p in (*params[:1], *params[-1:])}.values()]
        # Steps that ended with gradients added since the one before; of these, those that included the gradients of the
        # step before; all steps; whether there was one with gradients; and those at which the gradients of the backward
        # passes were gone, or, where gradients may not be read, had been written to.
        self._counts = [0, 0, 0, 0, 0]

    def next_after(self, step: int) -> float:
        return step + 1 if self._watched else math.inf

    def after(self, step: int) -> None:
        reached = [watched for watched in self._watched if watched.num_passes]
        num_watched, num_left, num_steps, has_begun, num_cleared = self._counts
        if reached and has_begun:
            num_watched += 1
            num_left += any(watched.is_left for watched in reached)
        for watched in self._watched:
            watched.end_step(may_read=self._run.may_wait)
        num_cleared += bool(reached) and all(watched.was_cleared for watched in reached)
        self.load([num_watched, num_left, num_steps + 1, int(has_begun or bool(reached)), num_cleared])

    def state(self) -> list[int]:
        return list(self._counts)

    def load(self, state: Sequence[int]) -> None:
        """Goes on from `state`, which older versions wrote without the last count."""
        self._counts = [*state, 0][:5]
        if self._counts[0] >= _NUM_WATCHED or self._counts[2] >= _MAX_STEPS:
            self.close()

    def facts(self) -> dict[str, Any]:
        names = ("num_watched_backwards", "num_left_gradients", "", "", "num_cleared_gradients")
        return {name: count for name, count in zip(names, self._counts) if name} if self._counts[0] else {}

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
