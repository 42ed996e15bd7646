"""Checks of a training that has not begun."""

# Each of these registers its checks.
from . import checks as _checks
from .asking import preflight as preflight
from .registry import CHECKS as CHECKS

del _checks
