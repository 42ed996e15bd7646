"""The vocabulary: what one pass says about a list of tensors, and what one step was. Plain data, without torch."""

from .table import COLUMNS as COLUMNS
from .table import GradientStats as GradientStats
from .table import StepStats as StepStats
from .table import TensorRow as TensorRow
from .table import TensorStats as TensorStats
from .table import fold_rows as fold_rows
from .table import norm_of as norm_of
from .table import set_producer as set_producer
