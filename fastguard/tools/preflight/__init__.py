"""Checks of a training that has not begun."""

from . import checks as _checks  # each of these registers its checks
from .asking import CHECKS as CHECKS
from .asking import preflight as preflight

del _checks
