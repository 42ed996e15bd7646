"""What the guard knows of the model beside its gradients: facts that no record shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ModelNotes:
    """Facts about model and optimizer, told once (`TrainingHistory.note_model`); empty where nobody told.

    Attributes:
        names: every parameter of the model, in the model's order.
        not_in_optimizer: trainable parameters that no optimizer under the guard holds.
        without_gradient: parameters with `requires_grad=False`.
        zero_lr: parameters in a group whose learning rate is 0.
        initialization: for each weight matrix or kernel, (standard deviation, the one expected from its fan-in).
        dropout: share that each dropout module leaves out, by name.
        decay_per_step: the largest share by which one step shrinks a parameter for its size alone, learning rate
            included where the decay is decoupled from the gradient (AdamW) or plain (SGD); None if not known.
        backward_per_step: backward passes whose gradients one step takes; None if not known.
        has_scheduler: whether a learning rate scheduler was made for the optimizer; None if not known.
        initial_lr: the learning rate that the scheduler started from, if there is one.
        steps_per_epoch: if known.
    """

    names: tuple[str, ...] = ()
    not_in_optimizer: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    zero_lr: tuple[str, ...] = ()
    initialization: dict[str, tuple[float, float]] = field(default_factory=dict)
    dropout: dict[str, float] = field(default_factory=dict)
    decay_per_step: float | None = None
    backward_per_step: int | None = None
    has_scheduler: bool | None = None
    initial_lr: float | None = None
    steps_per_epoch: int | None = None

    @property
    def judged_weights(self) -> set[str]:
        """Weight matrices whose updates say something: known, and not begun so small that any update is large."""
        return {name for name, (actual, expected) in self.initialization.items() if actual >= 0.1 * expected}

    def update(
        self,
        *,
        names: Sequence[str] | None,
        names_not_in_optimizer: Sequence[str] | None,
        names_without_gradient: Sequence[str] | None,
        names_with_zero_lr: Sequence[str] | None,
        initialization: Mapping[str, Sequence[float]] | None,
        dropout: Mapping[str, float] | None,
        decay_per_step: float | None,
        backward_per_step: int | None,
        has_scheduler: bool | None,
        initial_lr: float | None,
        steps_per_epoch: int | None,
    ) -> None:
        """Takes what is given; None leaves what was known."""
        if names is not None:
            self.names = tuple(names)
        if names_not_in_optimizer is not None:
            self.not_in_optimizer = tuple(names_not_in_optimizer)
        if names_without_gradient is not None:
            self.without_gradient = tuple(names_without_gradient)
        if names_with_zero_lr is not None:
            self.zero_lr = tuple(names_with_zero_lr)
        if initialization is not None:
            pairs = {name: (float(actual), float(expected)) for name, (actual, expected) in initialization.items()}
            self.initialization = {
                name: pair for name, pair in pairs.items() if math.isfinite(pair[0]) and 0.0 < pair[1] < math.inf
            }
        if dropout is not None:
            self.dropout = {name: float(share) for name, share in dropout.items()}
        if decay_per_step is not None:
            self.decay_per_step = float(decay_per_step)
        if backward_per_step is not None:
            self.backward_per_step = backward_per_step
        if has_scheduler is not None:
            self.has_scheduler = has_scheduler
        if initial_lr is not None:
            self.initial_lr = float(initial_lr)
        if steps_per_epoch is not None:
            if steps_per_epoch < 1:
                raise ValueError(f"`steps_per_epoch` must be at least 1, got {steps_per_epoch} - at `note_model`")
            self.steps_per_epoch = steps_per_epoch

    def state(self) -> dict[str, Any]:
        """Everything, as plain types."""
        return {
            "names": list(self.names),
            "not_in_optimizer": list(self.not_in_optimizer),
            "without_gradient": list(self.without_gradient),
            "zero_lr": list(self.zero_lr),
            "initialization": {name: list(pair) for name, pair in self.initialization.items()},
            "dropout": dict(self.dropout),
            "decay_per_step": self.decay_per_step,
            "backward_per_step": self.backward_per_step,
            "has_scheduler": self.has_scheduler,
            "initial_lr": self.initial_lr,
            "steps_per_epoch": self.steps_per_epoch,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ModelNotes:
        """The notes that gave `state`."""
        notes = cls(**{**state, "initialization": {}, "dropout": dict(state["dropout"])})
        for name in ("names", "not_in_optimizer", "without_gradient", "zero_lr"):
            setattr(notes, name, tuple(state[name]))
        notes.initialization = {name: (pair[0], pair[1]) for name, pair in state["initialization"].items()}
        return notes
