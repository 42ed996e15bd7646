"""Records of steps and what a run has been so far, in bounded memory. Plain data: needs no torch."""

from __future__ import annotations

from .columns import COLUMNS as COLUMNS
from .columns import TensorRow as TensorRow
from .columns import fold_rows as fold_rows
from .events import Entry as Entry
from .history import TrainingHistory as TrainingHistory
from .model import ModelNotes as ModelNotes
from .running import Overview as Overview
from .running import Trend as Trend
from .samples import ActivationStats as ActivationStats
from .samples import BatchSample as BatchSample
from .samples import ChannelStats as ChannelStats
from .series import NUM_FIRST_EVENTS as NUM_FIRST_EVENTS
from .series import NUM_LAST_EVENTS as NUM_LAST_EVENTS
from .series import NUM_LONE as NUM_LONE
from .table import ClippedGroup as ClippedGroup
from .table import GradientStats as GradientStats
from .table import StepStats as StepStats
from .table import TensorStats as TensorStats
