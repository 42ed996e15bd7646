"""Ignite: a handler for its `Engine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import missing_package

try:
    from ignite.engine import Engine, Events
except ImportError as error:
    raise missing_package("fastguard.integrations.ignite", "ignite", error) from error

from ..step import Guard
from .common import StepLoss, begin, end, figures, guard_of


class FastguardHandler:
    """Guards an optimizer that an `ignite.engine.Engine` steps: `FastguardHandler(optimizer, model).attach(trainer)`.

    After each optimizer step the guard gets the loss, the mean over the accumulated iterations, and its values go into
    `engine.state.metrics` for ignite's loggers, as `fastguard/grad/norm` and others. The handler has a state for
    checkpoints: `Checkpoint({"guard": handler}, ...)`.

    Args:
        optimizer: the optimizer, which is guarded unless it already is.
        model: as for `fastguard.wrap`.
        output_transform: takes the output of the engine's process function and returns the loss.
        **settings: other arguments of `fastguard.wrap`.

    Attributes:
        guard: the guard.

    Cost: about 150 us an iteration on top of the guard's. No sync.
    """

    def __init__(
        self,
        optimizer: Any,
        model: torch.nn.Module | None = None,
        *,
        output_transform: Callable[[Any], Any] = lambda output: output,
        **settings: Any,
    ) -> None:
        self.guard: Guard = guard_of(optimizer, model, settings)
        self._output_transform = output_transform
        self._loss = StepLoss()
        self._step = self.guard._run.step

    def attach(self, engine: Engine) -> None:
        """Follows the iterations of `engine`."""
        engine.add_event_handler(Events.STARTED, lambda engine: begin(self.guard, None, None))
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._follow)
        engine.add_event_handler(Events.COMPLETED, lambda engine: end(self.guard))

    def _follow(self, engine: Engine) -> None:
        self._loss.add(self._output_transform(engine.state.output))
        if self._step == self.guard._run.step:
            return
        self._step = self.guard._run.step
        self._loss.give(self.guard, mean=True)
        engine.state.metrics.update(figures([self.guard]))

    def state_dict(self) -> dict[str, Any]:
        """The guard's state."""
        return self.guard.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes the guard from `state`."""
        self.guard.load_state_dict(dict(state))
        self._step = self.guard._run.step
