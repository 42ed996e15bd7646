"""The guard of an optimizer: one step, and what becomes of it."""

from .guard import Guard as Guard
from .wrapping import wrap as wrap

__all__ = ["Guard", "wrap"]
