"""How a step of one optimizer is left out: not taken, or taken with what changes nothing that lasts."""

from __future__ import annotations

import logging
from typing import Any

import torch

from .backup import Preparations
from .detour import Junction, junction_of, may_communicate
from .undo import Both, Rehearsal, SetAside, Undo, is_content_without_gradients

_log = logging.getLogger("fastguard")


class Omission:
    """What leaving out steps of an optimizer takes.

    Attributes:
        preparations: for a step that has to be undone; None where that is never needed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, can_skip: bool) -> None:
        self._is_content = is_content_without_gradients(optimizer)
        self.preparations = None if self._is_content or not can_skip else Preparations()
        self._told: set[str] = set()

    def junction(self, optimizer: torch.optim.Optimizer) -> Junction | None:
        """Where the step can be passed by; None where it has to be taken, as others wait for it."""
        return junction_of(optimizer) if self._is_content or not may_communicate() else None

    def change(self, optimizer: torch.optim.Optimizer, repairs: Undo | None) -> Undo:
        """What, applied, has a step that is taken change nothing that is not undone after it."""
        change: Undo | None = None
        if self.preparations is not None:
            try:
                change = Rehearsal(optimizer, self.preparations.backup(optimizer))
            except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is one
                self.tell(optimizer, "no-copy", "a skipped step could not be undone for want of a copy (%s)", error)
            if self.preparations.is_late:
                self.tell(optimizer, "late", "a skipped step had moved parameters or state before its closure was done")
        if change is None:
            change = SetAside(optimizer)
        return change if repairs is None else Both(repairs, change)

    def tell(self, optimizer: torch.optim.Optimizer, what: str, text: str, *values: Any) -> None:
        """Warns of `what`, once."""
        if what not in self._told:
            self._told.add(what)
            _log.warning("%s: " + text, type(optimizer).__name__, *values)
