"""Parameters without a gradient: whether they change anyway, and whether a backward pass reaches them."""

from __future__ import annotations

import math
import weakref
from typing import Any, TypeAlias

import torch

from .observer import ObservedRun, Observer, ParameterHook
from .sketches import guarded_parameters, next_look, sample

_MAX_PARAMETERS = 16
_PER_PARAMETER = 4
_REST = 64  # steps without a look while no gradient is missing
_NUM_REACHED, _MAX_LOOKS = 20, 40  # steps for which it counts backward passes; after which it ends
_Sample: TypeAlias = list[tuple[weakref.ref[torch.Tensor], str, Any]]  # parameters, their names, and what they were
_ELSEWHERE = ("main_grad", "ds_tensor", "ds_id")  # attributes where Megatron and DeepSpeed keep gradients


class CoverageWatch(Observer):
    """Compares sixteen of the parameters that never had a gradient, around the steps of `looks`.

    These are trainable parameters of the optimizers, and of the model if no guarded optimizer holds them. On a GPU,
    where it reads nothing, a parameter has changed if it was written to.

    Cost: nothing if all parameters have gradients; otherwise 0.3 us a parameter and 50 us, at the first forty such
    steps.
    """

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        self._before: tuple[int, _Sample] | None = None
        self._after: tuple[int, _Sample] | None = None
        self._in_step: dict[str, None] = {}
        self._between: dict[str, None] = {}
        self._num_passes = 0
        self._num_reached = self._num_looks = 0
        self._elsewhere = ""

    def next_after(self, step: int) -> float:
        if self._num_looks >= _MAX_LOOKS:
            return math.inf
        return next_look(step + _REST if self._run.ring.seen.has_all else step)

    @property
    def has_before(self) -> bool:
        return self._after is not None or not self._run.ring.seen.has_all

    def before(self, step: int) -> None:
        taken, self._after, self._before = self._after, None, None
        if taken is not None and taken[0] == step - 1:
            self._between.update(dict.fromkeys(_moved(taken[1])))
        if self._num_looks < _MAX_LOOKS and not self._run.ring.seen.has_all:
            self._before = step, self._take()

    def after(self, step: int) -> None:
        taken, self._before = self._before, None
        if taken is not None and taken[0] == step:
            self._in_step.update(dict.fromkeys(_moved(taken[1])))
        if self._num_looks >= _MAX_LOOKS or self._run.ring.seen.has_all:
            Observer.close(self)
            return
        if self._handles:
            self._num_reached += self._num_passes > 0
        self._num_passes = 0
        taken_now = self._take()
        self._after = step, taken_now
        self._num_looks += 1
        if self._num_looks > _NUM_REACHED or not taken_now:
            Observer.close(self)
        elif not self._handles:
            for p in {id(p): p for p in (taken_now[0][0](), taken_now[-1][0]()) if p is not None}.values():
                if p.is_leaf and p.layout is torch.strided:
                    self.hold(p.register_post_accumulate_grad_hook(ParameterHook(self._reached)))

    def _take(self) -> _Sample:
        """The present state of some of the parameters without a gradient."""
        run = self._run
        params = run.params()
        missing = [(params[i], run.known_names[i]) for i in run.ring.seen.never() if i < len(params)]
        missing = [(p, name) for p, name in missing if p.requires_grad]
        for p, _ in missing[:1]:
            self._elsewhere = next((name for name in _ELSEWHERE if hasattr(p, name)), "")
        if missing:
            held = guarded_parameters()
            missing += [(p, name) for p, name in run.model_parameters() if p.requires_grad and id(p) not in held]
        chosen = missing[:: max(1, -(-len(missing) // _MAX_PARAMETERS))]
        return [(weakref.ref(p), name, _state_of(p, run.may_wait)) for p, name in chosen]

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
            "gradients_elsewhere": self._elsewhere,
        }

    def _reached(self, parameter: torch.Tensor) -> None:
        self._num_passes += 1

    def forget(self) -> None:
        self._before = self._after = None

    def close(self) -> None:
        super().close()
        self.forget()


def _state_of(p: torch.Tensor, may_read: bool) -> bytearray | int:
    """Some elements of `p`, or how often it was written to if it may not be read."""
    values = sample([p], _PER_PARAMETER) if may_read else None
    return p._version if values is None else values


def _moved(taken: _Sample) -> list[str]:
    """Names of those that have changed."""
    names = []
    for ref, name, before in taken:
        p = ref()
        now = None if p is None else _state_of(p, isinstance(before, bytearray))
        if type(now) is type(before) and now != before:
            names.append(name)
    return names
