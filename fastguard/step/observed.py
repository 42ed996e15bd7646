"""Losses on their way to the record of their step: observed before it, after it, or micro-batch by micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr as num_operations

from ..observers.owner import Observers
from .judge import Judge
from .run import Run
from .scalars import check_scalar, scalar

_NUM_MARKED = 8  # steps whose ends are noted until a loss comes ahead of one
_LAST_OPERATIONS = 8  # of a loss, which may have come after the step that it led to


class Observed:
    """Knows which step a loss is of, and keeps the mean of those that are of one. A loss whose operations autograd
    recorded before the newest step ended is that step's; one whose came later is of the step to come. Of a plain number
    it is not known when it came about: it is the newest step's, unless something was recorded since that ended and
    losses have been seen to come ahead of their steps, or that step has one already. When a step ends is noted at the
    first ones, and from then on where a loss has come ahead of its step, or a second one of a step: `run.marked` and
    `run.mark`. A loop that observes each loss straight after its step pays nothing for the others, and C++ puts its
    losses into their slots without coming here."""

    def __init__(self, run: Run, judge: Judge, observers: Observers) -> None:
        self._run, self._judge, self.observers = run, judge, observers
        self._step = -1  # that the losses are of
        self._total: Any = 0.0
        self._count = 0
        self._val_loss: Any = None  # from before the first step

    def observe(self, loss: Any, val_loss: Any) -> None:
        """Takes losses; raises ValueError for anything but numbers, RuntimeError if their step was delivered."""
        run, newest = self._run, self._run.step - 1
        number = None if loss is None else self._number("loss", loss)
        if val_loss is not None:
            val_loss = self._number("val_loss", val_loss)
            if self._judge.has_step:
                self._judge.record_loss(val_loss=val_loss)
            else:
                self._val_loss, run.has_more_to_do = val_loss, True
        if number is None:
            return
        if not self._judge.has_step or (run.marked == newest and self._is_ahead(loss, newest)):
            run.marks_ends = run.has_more_to_do = True
            self._add(newest + 1, number)
            return
        if run.marked != newest and val_loss is None and self._run.waits and not run.ring.has_loss:
            self._judge.record_loss(number)  # the ordinary case, which C++ does itself
            return
        known = None if self._step == newest or not self._run.waits else run.ring.observed_loss
        if known is not None:
            run.marks_ends = run.has_more_to_do = True
            self._add(newest, known)
        self._add(newest, number)
        self._put()

    def _number(self, name: str, value: Any) -> Any:
        """`value` as a float, or a tensor where the host must not wait for it; raises ValueError for anything else."""
        if isinstance(value, torch.Tensor) and not (value.is_cpu and self._run.waits):
            check_scalar(name, value)
            return value.detach()
        return scalar(name, value)

    def _is_ahead(self, loss: Any, newest: int) -> bool:
        """Whether `loss` is of the step to come, where it is known when the newest one ended."""
        run, recorded = self._run, num_operations()
        node = loss.grad_fn if isinstance(loss, torch.Tensor) else None
        if node is not None:
            for _ in range(_LAST_OPERATIONS):  # a loss may be divided or moved after the pass that led to it
                if node._sequence_nr() < run.mark:
                    return False
                before = [one for one, _ in node.next_functions if one is not None and one.next_functions]
                if not before:
                    break
                node = min(before, key=lambda one: one._sequence_nr())
            return True
        if recorded > run.mark and (run.marks_ends or self._step == newest):
            return True
        run.mark = recorded
        return False

    def _add(self, step: int, number: Any) -> None:
        if self._step != step:
            self._step, self._total, self._count = step, number, 1
        else:
            self._total, self._count = self._total + number, self._count + 1

    def _put(self) -> None:
        self._judge.record_loss(self._total if self._count == 1 else self._total / self._count)

    def end_step(self) -> bool:
        """An optimizer has stepped, and gets what came ahead of it. Whether to call this after the next step, too."""
        run = self._run
        if not self._judge.is_between_steps:
            return True
        self.observers.end_step()
        if run.marks_ends or run.step <= _NUM_MARKED:
            run.marked, run.mark = run.step - 1, num_operations()
        if self._judge.is_held:
            if self._step == run.step - 1:
                self._put()
            if self._val_loss is not None:
                self._judge.record_loss(val_loss=self._val_loss)
                self._val_loss = None
        return False

    def forget(self) -> None:
        self._step = self._run.marked = -1
        self._val_loss = None
