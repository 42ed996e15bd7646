"""Losses on their way to the record of their step: observed before it, after it, or micro-batch by micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr as num_operations

from .judge import Judge
from .ledger import check_scalar, scalar
from .run import Run


class Observed:
    """Knows which step a loss is of, and keeps the mean of those that are of one.

    A loss whose operations autograd recorded before the newest step ended is that step's; one whose came later is of
    the step to come. Of a plain number it is not known when it came about: it is the newest step's, unless something
    was recorded since that ended and losses have been seen to come ahead of their steps, or that step has one already.

    Until a loss has come ahead of its step, the end of a step is looked at only where something else is, too: a loop
    that observes each loss straight after its step pays nothing for the others.
    """

    def __init__(self, run: Run, judge: Judge) -> None:
        self._run, self._judge = run, judge
        self._step = -1  # that the losses are of
        self._total: Any = 0.0
        self._count = 0
        self._val_loss: Any = None  # from before the first step
        self._marked, self._mark = -1, 0  # a step, and how much was recorded when it ended
        self._comes_early = False

    def observe(self, loss: Any, val_loss: Any) -> None:
        """Takes losses.

        Raises:
            ValueError: of what is no number.
            RuntimeError: the record of their step was handed over.
        """
        number = None if loss is None else self._number("loss", loss)
        if val_loss is not None:
            val_loss = self._number("val_loss", val_loss)
            if self._judge.has_step:
                self._judge.observe(None, val_loss)
            else:
                self._val_loss, self._run.has_more_to_do = val_loss, True
        if number is None:
            return
        newest = self._run.step - 1
        if self._is_ahead(loss, newest):
            self._comes_early = self._run.has_more_to_do = True
            self._add(newest + 1, number)
            return
        if self._step != newest and type(number) is float and self._judge.waits and self._run.ring.note_loss(number):
            self._step, self._total, self._count = newest, number, 1  # the ordinary case
            return
        self._add(newest, number)
        self._put()

    def _number(self, name: str, value: Any) -> Any:
        """`value` as a float; a tensor stays one where the host must not wait for it.

        Raises:
            ValueError: it is neither a number nor a tensor of one.
        """
        if isinstance(value, torch.Tensor) and not (value.is_cpu and self._judge.waits):
            check_scalar(name, value)
            return value.detach()
        if type(value) is torch.Tensor and not value.dim():
            number = value.item()
            if type(number) is float:
                return number
        return scalar(name, value)

    def _is_ahead(self, loss: Any, newest: int) -> bool:
        """Whether `loss` is of the step to come."""
        if not self._judge.has_step:
            return True
        recorded = num_operations()
        if self._marked != newest:
            self._marked, self._mark = newest, recorded
            return False
        node = loss.grad_fn if isinstance(loss, torch.Tensor) else None
        if node is not None:
            return bool(node._sequence_nr() >= self._mark)
        if recorded > self._mark and (self._comes_early or self._step == newest):
            return True
        self._mark = recorded
        return False

    def _add(self, step: int, number: Any) -> None:
        if self._step != step:
            self._step, self._total, self._count = step, number, 1
        else:
            self._total, self._count = self._total + number, self._count + 1

    def _put(self) -> None:
        self._judge.observe(self._total if self._count == 1 else self._total / self._count, None)

    def end_step(self) -> bool:
        """A step has been taken: it gets what came ahead of it. Whether to tell this of the next one too."""
        self._marked, self._mark = self._run.step - 1, num_operations()
        if self._judge.is_held:
            if self._step == self._marked:
                self._put()
            if self._val_loss is not None:
                self._judge.observe(None, self._val_loss)
                self._val_loss = None
        return self._comes_early

    def forget(self) -> None:
        """The run goes on from another place."""
        self._step = self._marked = -1
        self._val_loss = None
