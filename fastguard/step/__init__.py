"""The guard of an optimizer: one step, and what becomes of it."""

from .guard import Guard as Guard
from .in_backward import wrap_backward as wrap_backward
from .wrapping import wrap as wrap
