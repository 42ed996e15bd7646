"""Counts backward passes, and finds missing `zero_grad` calls: old gradients to which those of a step are added."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..records import ModelNotes
from .observer import Observer, ParameterHook
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

    def __init__(self, run: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._run = run
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        params = [p for p in params if p.requires_grad and p.is_leaf and p.layout is torch.strided]
        params = [p for p in params if not hasattr(p, "to_local")]  # FSDP2 adds to them past the hooks
        self._watched = [_Watched(p) for p in {id(p): p for p in (*params[:1], *params[-1:])}.values()]
        # num_watched, num_left: steps that ended with gradients added since the one before; of these, those that
        # included the gradients of the step before
        self._num_watched = self._num_left = self._num_steps = 0
        # Those at which the gradients of the backward passes were gone, or, where they may not be read, written to
        self._num_cleared = 0
        self._has_begun = False  # there was a step with gradients
        self._most_passes = 0  # before one step

    def next_after(self, step: int) -> float:
        return step + 1 if self._watched else math.inf

    def after(self, step: int) -> None:
        reached = [watched for watched in self._watched if watched.num_passes]
        self._most_passes = max([self._most_passes, *(watched.num_passes for watched in reached)])
        if reached and self._has_begun:
            self._num_watched += 1
            self._num_left += any(watched.is_left for watched in reached)
        for watched in self._watched:
            watched.end_step(may_read=self._run.may_wait)
        self._num_cleared += bool(reached) and all(watched.was_cleared for watched in reached)
        self._has_begun = self._has_begun or bool(reached)
        self._num_steps += 1
        self._end_if_done()

    def resume(self, step: int, notes: ModelNotes) -> None:
        """Goes on at `step` from the counts in the notes."""
        self._num_watched, self._num_left = notes.num_watched_backwards or 0, notes.num_left_gradients or 0
        self._num_steps, self._num_cleared = step, notes.num_cleared_gradients or 0
        self._has_begun, self._most_passes = self._num_watched > 0, notes.backward_per_step or 0
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._num_watched >= _NUM_WATCHED or self._num_steps >= _MAX_STEPS:
            self.close()

    def facts(self) -> dict[str, Any]:
        passes = {"backward_per_step": self._most_passes} if self._most_passes else {}
        counts = {"num_watched_backwards": self._num_watched, "num_left_gradients": self._num_left}
        return {**passes, **counts, "num_cleared_gradients": self._num_cleared} if self._num_watched else passes

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
