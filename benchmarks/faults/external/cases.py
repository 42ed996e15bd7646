"""All cases of the suite, by name."""

from __future__ import annotations

from . import recipes
from .tasks import sequences, tables

_HOMES = (recipes, tables, sequences)
_ALL = [case for home in _HOMES for case in home.CASES]
CASES = {case.name: case for case in _ALL}
if len(CASES) < len(_ALL):
    raise ValueError(f"names of cases must differ, got {len(CASES)} names of {len(_ALL)} cases")
