"""How to make any optimizer leave its parameters and state alone for one step."""

from __future__ import annotations

from typing import Protocol

import torch


class Undo(Protocol):
    """What was done to an optimizer for one step, and has to be undone after it."""

    def give_back(self) -> None:
        """After the step, or after one that raised."""

    def forget(self) -> None:
        """Instead, when a closure has made gradients anew within the step."""


class SetAside:
    """Gradients taken away for one step, which makes any optimizer leave its parameters and state alone.

    The groups' own entries are kept too: some optimizers advance a counter in the group whether or not there is a
    gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._gradients = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._gradients.append((p, p.grad))
                    p.grad = None

    def give_back(self) -> None:
        for p, gradient in self._gradients:
            if p.grad is None:
                p.grad = gradient
        for group, kept in self._groups:
            for key in group.keys() - kept.keys():
                del group[key]
            group.update(kept)

    def forget(self) -> None:
        """The gradients that were set aside are gone."""
