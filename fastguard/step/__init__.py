"""The guard of an optimizer: one step, and what becomes of it."""

from .guard import Guard as Guard
from .wrapping import wrap as wrap
from .wrapping_backward import wrap_backward as wrap_backward
