"""What a guard does with an activation monitor: tells it where steps end, and adds what it saw to their records."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..activations import ActivationMonitor, Replay, replay
from .recorder import Recorder


class Watch:
    """The monitor of one guard.

    Attributes:
        monitor: None if activations are not watched.
    """

    def __init__(self, monitor: ActivationMonitor | None, model: torch.nn.Module | None, recorder: Recorder) -> None:
        self.monitor = monitor
        self._model = None if model is None else weakref.ref(model)
        self._recorder = recorder
        if monitor is not None:
            recorder.fetch = self._hand_over

    def end_step(self, step: int) -> float:
        """Ends the sample of step `step`, which may not be one; hands over what has arrived. The seconds it took."""
        monitor = self.monitor
        if monitor is None:
            return 0.0
        seconds = monitor.end_step(step)
        self._hand_over()
        return seconds

    def catch_up(self) -> None:
        """Hands over everything, waiting for what is on its way."""
        if self.monitor is not None:
            self.monitor.flush()
            self._hand_over()

    def _hand_over(self) -> None:
        if self.monitor is not None:
            for step, records in self.monitor.arrived():
                self._recorder.attach(step, activations=records)

    def close(self) -> None:
        """Hands over everything and removes the hooks."""
        self.catch_up()
        if self.monitor is not None:
            self.monitor.detach()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """For passes through the model that are no part of the training."""
        return contextlib.nullcontext() if self.monitor is None else self.monitor.paused()

    def replay(self, forward: Callable[[], Any]) -> Replay:
        """Watches all modules through one more forward pass; adds it to the step just taken, if that was skipped."""
        model = None if self._model is None else self._model()
        if model is None:
            raise ValueError("`replay` must have a model to watch, got none. Call wrap(optimizer, model, …).")
        with self.paused():
            found = replay(model, forward)
        last = self._recorder.last
        if last is not None and last.skipped and self._recorder.is_pending:
            self._recorder.attach(last.step, activations=found.activities)
        return found
