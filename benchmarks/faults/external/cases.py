"""All cases of the suite, by name."""

from __future__ import annotations

from .bases import maker
from .case import Case
from .faulty import autotrainer, deepcrime, deepfd, symptoms, traincheck
from .tasks import changing, densities, likenesses, pictures, rewards, sequences, structures, tables

_RECIPES = {"A": autotrainer, "B": deepfd, "C": deepcrime, "E": symptoms, "F": traincheck}
_TASKS = (tables, pictures, sequences, structures, likenesses, densities, changing, rewards)
_ALL = [
    *(
        Case(f"{name}/{base}", name, base, f"{base}, sound", maker(recipe), home.__name__)
        for name, home in _RECIPES.items()
        for base, recipe in home.BASES.items()
    ),
    *(case for home in (*_RECIPES.values(), *_TASKS) for case in home.CASES),
]
CASES = {case.name: case for case in _ALL}
if len(CASES) < len(_ALL):
    raise ValueError(f"names of cases must differ, got {len(CASES)} names of {len(_ALL)} cases")
