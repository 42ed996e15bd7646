"""What a guard looks at beside the gradients, as one object for the hooks of its steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..observers.activations import ActivationMonitor, ActivationWatch, Replay, replay
from ..observers.owner import Observers
from .judge import Judge
from .observed import Observed
from .run import Run


class Sampling:
    """The observers of one guard, and the losses that it is given.

    Attributes:
        monitor: of activations; None if they are not watched.
    """

    def __init__(
        self,
        run: Run,
        judge: Judge,
        observers: Observers,
        observed: Observed,
        model: torch.nn.Module | None,
        activations: ActivationWatch | None,
        monitor: ActivationMonitor | None,
    ) -> None:
        self.monitor, self._activations = monitor, activations
        self._run, self._judge, self.observers = run, judge, observers
        self._observed = observed
        self._model = None if model is None else weakref.ref(model)

    def end_step(self) -> bool:
        """An optimizer has stepped. Whether to call this after the next step, too."""
        if not self._judge.is_between_steps:
            return True
        self.observers.end_step()
        self._observed.end_step()
        return False

    def attach_arrived(self) -> None:
        """Attaches to records what has arrived."""
        if self._activations is not None:
            self._activations.attach()

    def arrive_all(self) -> None:
        """Hands over everything, waiting for what is on its way."""
        self.observers.attach()
        if self._activations is not None:
            self._activations.attach(waits=True)

    def close(self) -> None:
        """Hands over everything and removes all hooks."""
        self.observers.attach()
        self.observers.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For passes through the model that are no part of the training."""
        before = self.observers.pause(True)
        try:
            with contextlib.nullcontext() if self.monitor is None else self.monitor.paused():
                yield
        finally:
            self.observers.pause(before)

    def replay(self, forward: Callable[[], Any]) -> Replay:
        """Watches all modules through one more forward pass; adds it to the step just taken, if that was skipped."""
        model = None if self._model is None else self._model()
        if model is None:
            raise ValueError("`replay` must have a model to watch, got none. Call wrap(optimizer, model, …).")
        with self.paused():
            found = replay(model, forward)
        ring = self._run.ring
        if ring.is_held and ring.is_skipped:
            ring.attach(ring.step, activations=found.activities)
        return found
