"""The observers of one guard: which one is called at which step, and their hooks and facts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..records import ModelNotes
from .batches import BatchWatch
from .coverage import CoverageWatch, LeftGradients
from .observer import Observer
from .sketches import Sketches

_NEVER = 1 << 62


class Observers:
    """Calls each observer around the steps that it asks for. An error in one is counted, and stops nothing else.

    `run.wakes_at` is the next step at which something is due before the step, `run.ends_at` after it; earlier steps
    compare two integers. `run.has_more_to_do` asks for a call of `end_step`, too.
    """

    def __init__(
        self,
        run: Any,
        model: torch.nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        others: Sequence[Observer] = (),
    ) -> None:
        self._run = run
        self._begun = -1  # the step that `begin_step` was called before
        self._due: list[Observer] = []
        self._left, self._sketches = LeftGradients(run, optimizers), Sketches(run, optimizers)
        observers: list[Observer] = [self._left, self._sketches, CoverageWatch(run), *others]
        self.batches: BatchWatch | None = None  # stays so without a model, and where it takes no hooks
        if model is not None and not isinstance(model, torch.jit.ScriptModule):
            device = next((p.device.type for o in optimizers for g in o.param_groups for p in g["params"]), "cpu")
            with run.failures.kept("batch sampler", "No forward pass is looked at."):
                self.batches = BatchWatch(model, run, device)
                observers.append(self.batches)
        self._next: dict[Observer, float] = dict.fromkeys(observers, 0)  # the step around which to call each
        for observer in observers:
            weakref.finalize(self, observer.close).atexit = False  # no hook outlives the guard

    def _ask(self, observer: Observer, method: Callable[..., Any], *args: Any) -> Any:
        """What a method of an observer returns; None if it raises, which is counted."""
        try:
            return method(*args)
        except Exception as error:
            self._run.failures.note(observer.what, error, observer.so)

    def begin_step(self, step: int) -> None:
        """Called before a step at which something is due, ahead of the decision about it."""
        self._run.wakes_at, self._run.ends_at = step + 1, step  # should the step raise, the next one wakes this again
        self._due, self._begun = self._due_at(step), step
        self._call("before", step)

    def _due_at(self, step: int) -> list[Observer]:
        return [observer for observer, due_at in self._next.items() if due_at <= step]

    def _call(self, method: str, step: int) -> None:
        """Calls those that are due, without autograd."""
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # a tenth of what `torch.no_grad` takes where it is not in a cache
        try:
            for observer in self._due:
                self._ask(observer, getattr(observer, method), step)
        finally:
            torch._C._set_grad_enabled(before)

    def end_step(self) -> None:
        """Called when all optimizers have taken or skipped a step."""
        run, step = self._run, self._run.step - 1
        if step >= run.ends_at:
            self._due = self._due if self._begun == step else self._due_at(step)
            self._call("after", step)
            self._begun = -1
            run.ends_at = run.wakes_at = _NEVER
            for observer, due_at in self._next.items():
                if due_at <= step:
                    due_at = self._ask(observer, observer.next_after, step) or math.inf
                    self._next[observer] = due_at
                if due_at < run.ends_at:
                    run.ends_at = int(due_at)
                if due_at < run.wakes_at and observer.has_before:
                    run.wakes_at = int(due_at)

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for observer in self._next:
            found.update(self._ask(observer, observer.facts) or {})
        return found

    def resume(self, notes: ModelNotes) -> None:
        """Resumes at the run's step, with the findings in the notes about the model."""
        step = self._run.step
        self._left.resume(step, notes)
        self._sketches.resume(notes.overwritten)
        if self.batches is not None and step:
            self.batches.resume(step)
        self.forget()

    def forget(self) -> None:
        """There are unobserved steps, or the run resumes elsewhere."""
        for observer in self._next:
            observer.forget()
            self._next[observer] = 0
        self._run.wakes_at = self._run.ends_at = 0

    def pause(self, is_paused: bool) -> bool:
        """Pauses or resumes the samples of forward passes. Returns whether they were paused before."""
        if self.batches is None:
            return False
        before, self.batches.is_paused = self.batches.is_paused, is_paused
        return before

    def close(self) -> None:
        for observer in self._next:
            observer.close()
