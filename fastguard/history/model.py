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
        decay_per_step: so far, the largest share by which one step shrinks a parameter for its size alone, learning
        rate
            included where the decay is decoupled from the gradient (AdamW) or plain (SGD); None if not known.
        backward_per_step: backward passes whose gradients one step takes; None if not known.
        has_scheduler: whether a learning rate scheduler was made for the optimizer; None if not known.
        initial_lr: the learning rate that the scheduler started from, if there is one.
        steps_per_epoch: if known.
        num_changes: how often a fact became another; not saved.
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
    num_changes: int = field(default=0, compare=False)

    @property
    def judged_weights(self) -> set[str] | None:
        """Weight matrices whose updates say something: not begun so small that any update is large. None: not known."""
        if not self.initialization:
            return None
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
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(f"`steps_per_epoch` must be at least 1, got {steps_per_epoch} - at `note_model`")
        given: dict[str, Any] = {
            "names": None if names is None else tuple(names),
            "not_in_optimizer": None if names_not_in_optimizer is None else tuple(names_not_in_optimizer),
            "without_gradient": None if names_without_gradient is None else tuple(names_without_gradient),
            "zero_lr": None if names_with_zero_lr is None else tuple(names_with_zero_lr),
            "initialization": None if initialization is None else _usable(initialization),
            "dropout": None if dropout is None else {name: float(share) for name, share in dropout.items()},
            "backward_per_step": backward_per_step,
            "has_scheduler": has_scheduler,
            "initial_lr": None if initial_lr is None else float(initial_lr),
            "steps_per_epoch": steps_per_epoch,
        }
        if decay_per_step is not None:  # the largest so far: a schedule brings it down with the learning rate
            given["decay_per_step"] = max(float(decay_per_step), self.decay_per_step or 0.0)
        for name, value in given.items():
            if value is not None and value != getattr(self, name):
                setattr(self, name, value)
                self.num_changes += 1

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


def _usable(initialization: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    pairs = {name: (float(actual), float(expected)) for name, (actual, expected) in initialization.items()}
    return {name: pair for name, pair in pairs.items() if math.isfinite(pair[0]) and 0.0 < pair[1] < math.inf}
