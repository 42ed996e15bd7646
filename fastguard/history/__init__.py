"""What a run has been so far, in bounded memory. Needs no torch."""

from __future__ import annotations

from .batches import GradientCosine as GradientCosine
from .batches import SampledBatch as SampledBatch
from .batches import SampledBatches as SampledBatches
from .core import NUM_DEFERRED as NUM_DEFERRED
from .core import NUM_FIRST_EVENTS as NUM_FIRST_EVENTS
from .core import NUM_LAST_EVENTS as NUM_LAST_EVENTS
from .core import NUM_LONE as NUM_LONE
from .core import TrainingHistory as TrainingHistory
from .entries import Entry as Entry
from .entries import LoneElement as LoneElement
from .entries import NonFiniteEvent as NonFiniteEvent
from .model import ModelNotes as ModelNotes
from .overview import Bucket as Bucket
from .overview import Overview as Overview
from .sampled import Sampled as Sampled
from .tensors import TensorTrack as TensorTrack
from .trend import Spike as Spike
from .trend import Trend as Trend
from .updates import UpdateRatio as UpdateRatio
from .updates import UpdateRatios as UpdateRatios
