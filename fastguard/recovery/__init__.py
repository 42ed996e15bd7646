"""Recovers a run that goes wrong: snapshots, when to roll back and how far, when to give up."""

from .ladder import Slowed as Slowed
from .ladder import check_state as check_state
from .rescue import Rescue as Rescue
from .settings import Recovery as Recovery
from .settings import as_recovery as as_recovery
