"""Brings a run through what would ruin it: snapshots, when to go back and how far, when to give up."""

from .recompute import Recomputation as Recomputation
from .settings import Recovery as Recovery
from .settings import as_recovery as as_recovery
from .slowed import Slowed as Slowed

__all__ = ["Recomputation", "Recovery", "Slowed", "as_recovery"]
