"""Parameters without a gradient: whether they change anyway, and whether a backward pass reaches them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .observer import Observer, ParameterHook
from .sketches import Snapshot, guarded_parameters, next_look

_REST = 64  # steps without a look while no gradient is missing
_NUM_REACHED, _MAX_LOOKS = 20, 40  # steps for which it counts backward passes; after which it ends
_NUM_LATELY = 100  # steps


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
            missing += [(p, name) for p, name in run.model_parameters() if p.requires_grad and id(p) not in held]
        return Snapshot(step, missing, may_read=run.may_wait)

    def facts(self) -> dict[str, Any]:
        params = self._run.params()  # none where the optimizers are gone
        look = self._run.ring.seen.look(self._run.step) if params else None
        if look is None:
            return {}
        never, lately, num_seen = look
        frozen = {n for p, n in zip(params, self._run.known_names) if not p.requires_grad} if never or lately else set()
        known = {
            "never_seen": [name for name in never if name not in frozen],
            "unseen_lately": [name for name in lately if name not in frozen],
            "num_seen": num_seen,
        }
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
    """Which parameters ever had a gradient, and which had none for a while.

    `found[place]` of the ring holds the marks since the newest look, a byte a parameter, which C++ sets too; None while
    every step had all gradients. Cost: nothing then; else a byte a parameter and step, in C++ 1 ns, elsewhere 30.
    """

    def __init__(self, found: list[Any], place: int) -> None:
        self._found, self._place = found, place
        self._names: Sequence[str] = ()
        self._ever: set[str] = set()
        self._candidates: set[str] | None = None  # of the run that is resumed: no others can be those never seen
        self._lately: tuple[str, ...] = ()
        self._since: int | None = None
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
            self._since = self._taken = None
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
        """Whether every step since the newest look had all gradients, or no step was taken."""
        marks = self._found[self._place]
        return marks is None or 0 not in marks

    def never(self) -> list[int]:
        """Places of the parameters that never had one. Cost: 50 ns a parameter, where some are missing."""
        if self.has_all:
            return []
        self._fold()
        return [i for i, name in enumerate(self._names) if self._is_never(name)]

    def _is_never(self, name: str) -> bool:
        return name not in self._ever and (self._candidates is None or name in self._candidates)

    def look(self, step: int) -> tuple[list[str], list[str], int] | None:
        """Names that never had a gradient, names that had none in the newest hundred steps or more, and how many others
        there are; None before the first step."""
        names, marks = self._names, self._found[self._place]
        if not names:
            return None
        if marks is None:
            self._lately = ()
            return [], [], len(names)
        self._fold()
        if self._since is None or step - self._since >= _NUM_LATELY:
            if self._since is not None:
                self._lately = tuple(name for name, mark in zip(names, marks) if not mark)
            marks[:] = bytes(len(marks))
            self._since, self._taken = step, None
        never = [name for name in names if self._is_never(name)]
        return never, [name for name in self._lately if name in self._ever], len(names) - len(never)

    def go_on(self, never: Sequence[str]) -> None:
        """A run is resumed that knows only `never` to have had no gradient."""
        self._candidates = set(never)
