"""Which parameters backward passes reach, whether their gradients are cleared, and whether others change anyway."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..records import ModelNotes
from .observer import Observer, ParameterHook
from .sketches import Snapshot, guarded_parameters, next_look, sample
from .tensors import can_be_read, strided

_COUNTS = ("backward_per_step", "num_watched_backwards", "num_left_gradients", "num_cleared_gradients")
_NUM_WATCHED = 20  # steps
_MAX_STEPS = 64  # after which it is given up where there are no backward passes
_MAX_READ = 65536
_FIRST_READ = 16  # elements; usually at least one of them is not zero
_REST = 64  # steps without a look while no gradient is missing
_NUM_REACHED, _MAX_LOOKS = 20, 40  # steps for which it counts backward passes; after which it ends


class _Watched(Observer):
    """One parameter, and its gradient when it was last added to, or when the last step ended."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._known: tuple[weakref.ref[torch.Tensor], int] | None = None  # the gradient, and its version
        self.num_passes = 0  # backward passes that reached it since the last step
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
        if gradient is None or self._known is None:
            return False
        return self._known[0]() is gradient and self._known[1] == gradient._version

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
        self._known = None if gradient is None else (weakref.ref(gradient), gradient._version)


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
        # Steps that ended with gradients added since the one before; of these, those that included the gradients of the
        # step before; those at which the gradients of the backward passes were gone, or, where they may not be read,
        # written to. Most passes before one step
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._num_steps, self._has_begun = 0, False  # whether there was a step with gradients

    def next_after(self, step: int) -> float:
        return step + 1 if self._watched else math.inf

    def after(self, step: int) -> None:
        reached = [watched for watched in self._watched if watched.num_passes]
        counts = self._counts
        counts["backward_per_step"] = max([counts["backward_per_step"], *(watched.num_passes for watched in reached)])
        if reached and self._has_begun:
            counts["num_watched_backwards"] += 1
            counts["num_left_gradients"] += any(watched.is_left for watched in reached)
        for watched in self._watched:
            watched.end_step(may_read=self._run.may_wait)
        counts["num_cleared_gradients"] += bool(reached) and all(watched.was_cleared for watched in reached)
        self._has_begun = self._has_begun or bool(reached)
        self._num_steps += 1
        self._end_if_done()

    def resume(self, step: int, notes: ModelNotes) -> None:
        """Goes on at `step` from the counts in the notes."""
        self._counts = {name: getattr(notes, name) or 0 for name in _COUNTS}
        self._num_steps, self._has_begun = step, self._counts["num_watched_backwards"] > 0
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._counts["num_watched_backwards"] >= _NUM_WATCHED or self._num_steps >= _MAX_STEPS:
            self.close()

    def facts(self) -> dict[str, Any]:
        known = _COUNTS if self._counts["num_watched_backwards"] else _COUNTS[:1]
        return {name: self._counts[name] for name in known if self._counts["backward_per_step"]}

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


class CoverageWatch(Observer):
    """Compares sixteen of the trainable parameters that never had a gradient, around the steps of `looks`.

    They are the optimizers', and the model's that no guarded optimizer holds. On a GPU it counts writes instead.

    Cost: nothing if all parameters have gradients; otherwise 0.3 us a parameter and 50 us, at the first forty such
    steps.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._before: Snapshot | None = None
        self._after: Snapshot | None = None
        self._in_step: dict[str, None] = {}
        self._between: dict[str, None] = {}
        self._num_passes = self._num_reached = self._num_looks = 0

    @property
    def _is_over(self) -> bool:
        return self._num_looks >= _MAX_LOOKS or self._run.ring.seen.has_all

    def next_after(self, step: int) -> float:
        if self._num_looks >= _MAX_LOOKS:
            return math.inf
        return next_look(step + _REST if self._run.ring.seen.has_all else step)

    @property
    def has_before(self) -> bool:
        return self._after is not None or not self._run.ring.seen.has_all

    def before(self, step: int) -> None:
        if self._after is not None and self._after.step == step - 1:
            self._between.update(dict.fromkeys(self._after.changed() or ()))
        self._after, self._before = None, None if self._is_over else self._take(step)

    def after(self, step: int) -> None:
        if self._before is not None and self._before.step == step:
            self._in_step.update(dict.fromkeys(self._before.changed() or ()))
        self._before = None
        if self._is_over:
            super().close()
            return
        self._num_reached += bool(self._handles) and self._num_passes > 0
        self._num_passes = 0
        self._after = self._take(step)
        self._num_looks += 1
        params = [p for p in self._after.params if p.is_leaf and p.layout is torch.strided]
        if self._num_looks > _NUM_REACHED or not params:
            super().close()
        elif not self._handles:
            for p in {id(p): p for p in (params[0], params[-1])}.values():
                self.hold(ParameterHook(p, self._reached))

    def _take(self, step: int) -> Snapshot:
        """The present state of some of the parameters without a gradient."""
        run, params = self._run, self._run.params()
        missing = [(params[i], run.known_names[i]) for i in run.ring.seen.never() if i < len(params)]
        missing = [(p, name) for p, name in missing if p.requires_grad]
        if missing:
            held = guarded_parameters()
            missing += [(p, name) for p, name in run.namer.known() if p.requires_grad and id(p) not in held]
        return Snapshot(step, missing, may_read=run.may_wait)

    def facts(self) -> dict[str, Any]:
        params = self._run.params()  # none where the optimizers are gone
        look = self._run.ring.seen.look() if params else None
        if look is None:
            return {}
        never, num_seen = look
        frozen = {n for p, n in zip(params, self._run.known_names) if not p.requires_grad} if never else set()
        known = {"never_seen": [name for name in never if name not in frozen], "num_seen": num_seen}
        if not self._num_looks:
            return known
        had = set(self._run.known_names).difference(never)
        return {
            **known,
            "moved_in_step": [name for name in self._in_step if name not in had],
            "moved_between": [name for name in self._between if name not in had],
            "num_reached_unseen": self._num_reached,
        }

    def _reached(self, parameter: torch.Tensor) -> None:
        self._num_passes += 1

    def forget(self) -> None:
        self._before = self._after = None

    def close(self) -> None:
        super().close()
        self.forget()


class SeenParameters:
    """Which parameters ever had a gradient.

    `found[place]` of the ring holds the marks, a byte a parameter, which C++ sets too; None while
    every step had all gradients. Cost: nothing then; else a byte a parameter and step, in C++ 1 ns, elsewhere 30.
    """

    def __init__(self, found: list[Any], place: int) -> None:
        self._found, self._place = found, place
        self._names: Sequence[str] = ()
        self._ever: set[str] = set()
        self._candidates: set[str] | None = None  # of the run that is resumed: no others can be those never seen
        self._taken: Sequence[int] | None = None

    def take(self, positions: Sequence[int] | None, names: Sequence[str]) -> None:
        """Takes a step: `positions` among `names` had a gradient; None for all."""
        marks = self._found[self._place]
        if names is not self._names:
            self._fold()
            marks = self._found[self._place] = None
            self._names, self._taken = names, None
        elif marks is None and positions is not None:
            self._ever.update(names)  # at each step before
        if positions is None:
            if marks is not None:
                marks[:] = bytes([1]) * len(marks)
            return
        if marks is None:
            marks = self._found[self._place] = bytearray(len(names))
            self._taken = None
        if positions is not self._taken:
            for position in positions:
                marks[position] = 1
            self._taken = positions

    def _fold(self) -> None:
        marks = self._found[self._place]
        if marks is None:
            self._ever.update(self._names)
        elif len(self._ever) < len(self._names) or not self._ever.issuperset(self._names):
            self._ever.update(name for name, mark in zip(self._names, marks) if mark)

    @property
    def has_all(self) -> bool:
        """Whether every parameter had a gradient, or no step was taken."""
        marks = self._found[self._place]
        return marks is None or 0 not in marks

    def never(self) -> list[int]:
        """Places of the parameters that never had one. Cost: 50 ns a parameter, where some are missing."""
        if self.has_all:
            return []
        self._fold()
        known = self._candidates
        missing = ((i, name) for i, name in enumerate(self._names) if name not in self._ever)
        return [i for i, name in missing if known is None or name in known]

    def look(self) -> tuple[list[str], int] | None:
        """Names that never had a gradient, and how many others there are; None before the first step."""
        never = [self._names[i] for i in self.never()]
        return (never, len(self._names) - len(never)) if self._names else None

    def go_on(self, never: Sequence[str]) -> None:
        """A run is resumed that knows only `never` to have had no gradient."""
        self._candidates = set(never)
