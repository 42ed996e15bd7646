"""Records of steps and what a run has been so far, in bounded memory. Plain data: needs no torch."""

from __future__ import annotations

from .batches import BatchSample as BatchSample
from .batches import GradientCosine as GradientCosine
from .batches import SampledBatch as SampledBatch
from .batches import SampledBatches as SampledBatches
from .columns import COLUMNS as COLUMNS
from .columns import TensorRow as TensorRow
from .columns import fold_rows as fold_rows
from .columns import norm_of as norm_of
from .entries import Entry as Entry
from .entries import LoneElement as LoneElement
from .entries import NonFiniteEvent as NonFiniteEvent
from .history import NUM_FIRST_EVENTS as NUM_FIRST_EVENTS
from .history import NUM_LAST_EVENTS as NUM_LAST_EVENTS
from .history import NUM_LONE as NUM_LONE
from .history import TrainingHistory as TrainingHistory
from .magnitudes import MagnitudeHistogram as MagnitudeHistogram
from .model import ModelNotes as ModelNotes
from .overview import Bucket as Bucket
from .overview import Overview as Overview
from .sampled import Sampled as Sampled
from .samples import ActivationStats as ActivationStats
from .samples import ChannelStats as ChannelStats
from .table import ClippedGroup as ClippedGroup
from .table import GradientStats as GradientStats
from .table import StepStats as StepStats
from .table import TensorStats as TensorStats
from .tensors import TensorTrack as TensorTrack
from .trend import Spike as Spike
from .trend import Trend as Trend
from .updates import UpdateRatio as UpdateRatio
from .updates import UpdateRatios as UpdateRatios
