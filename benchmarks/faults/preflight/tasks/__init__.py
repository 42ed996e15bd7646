"""Sound set-ups for `fastguard.preflight`: data, model, optimizer and loss of many kinds, before the first step."""

from __future__ import annotations

from . import other_losses, other_trainings, sequences, sets_a_b, tabular
from .planned import TASKS, Planned

__all__ = ["TASKS", "Planned", "other_losses", "other_trainings", "sequences", "sets_a_b", "tabular"]
