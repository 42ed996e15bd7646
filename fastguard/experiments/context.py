"""The training that an arm changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..records import ModelNotes, TrainingHistory


@dataclass
class Context:
    """The training that an arm changes.

    Attributes:
        optimizers: without wrappers; those that share a guard.
        model: None if it is not known.
        guard: None if there is none.
        step: number of steps taken so far.
        num_steps: how long the arm runs.
        seed: of the arm's own random numbers. An arm never draws from the generators that the training uses.
        known: the history of a run of the same training without the arm; None if there was none.
        num_applied: how often a hook of the arm has changed something.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    model: torch.nn.Module | None = None
    guard: Any = None
    step: int = 0
    num_steps: int = 40
    seed: int = 0
    known: TrainingHistory | None = None
    num_applied: int = 0

    @property
    def history(self) -> TrainingHistory | None:
        """What is known of the training without the arm, or what the guard has recorded; None without either."""
        return self.known if self.known is not None or self.guard is None else self.guard.history

    @property
    def facts(self) -> ModelNotes:
        """What is known of the model; empty notes if nothing is."""
        return ModelNotes() if self.history is None else self.history.model

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def modules(self, kinds: type | tuple[type, ...] = torch.nn.Module) -> list[torch.nn.Module]:
        """The modules of the model that are of these kinds; none without a model."""
        return [] if self.model is None else [one for one in self.model.modules() if isinstance(one, kinds)]
