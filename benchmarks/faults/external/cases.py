"""All cases of the suite, by name."""

from __future__ import annotations

from .case import Case
from .faulty import autotrainer, deepcrime, deepfd, symptoms, traincheck
from .sound import games, generative, images, others, sequences, tabular

_HOMES = (tabular, images, generative, sequences, games, others, autotrainer, deepfd, deepcrime, symptoms, traincheck)
CASES: dict[str, Case] = {}
for _home in _HOMES:
    for _case in _home.CASES:
        if _case.name in CASES:
            raise ValueError(f"`name` must be new, got {_case.name!r} twice - in {_home.__name__}")
        CASES[_case.name] = _case
