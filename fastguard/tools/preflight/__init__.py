"""Checks of a training that has not begun."""

# Each of these registers its checks.
from . import checks as _checks
from .asking import CHECKS as CHECKS
from .asking import preflight as preflight

del _checks
