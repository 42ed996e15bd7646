"""Records of steps and what a run has been so far, in bounded memory. Plain data: needs no torch."""

from __future__ import annotations

from .columns import COLUMNS, TensorRow, fold_rows
from .events import Entry
from .history import TrainingHistory
from .model import ModelNotes
from .running import Overview, Trend
from .samples import ActivationStats, BatchSample
from .series import NUM_FIRST_EVENTS, NUM_LAST_EVENTS, NUM_LONE
from .table import ClippedGroup, GradientStats, StepStats, TensorStats

__all__ = ["COLUMNS", "NUM_FIRST_EVENTS", "NUM_LAST_EVENTS", "NUM_LONE", "ActivationStats", "BatchSample",
           "ClippedGroup", "Entry", "GradientStats", "ModelNotes", "Overview", "StepStats", "TensorRow",
           "TensorStats", "TrainingHistory", "Trend", "fold_rows"]  # fmt: skip
