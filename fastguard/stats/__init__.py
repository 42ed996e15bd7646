"""The vocabulary: what one pass says about a list of tensors, and what one step was. Plain data, without torch."""

from .batches import BatchSample as BatchSample
from .columns import COLUMNS as COLUMNS
from .columns import TensorRow as TensorRow
from .columns import fold_rows as fold_rows
from .columns import norm_of as norm_of
from .table import ClippedGroup as ClippedGroup
from .table import GradientStats as GradientStats
from .table import StepStats as StepStats
from .table import TensorStats as TensorStats
