"""All cases of the suite, by name."""

from __future__ import annotations

from .case import Case
from .faulty import autotrainer, deepfd
from .sound import generative, images, sequences, tabular

_HOMES = (tabular, images, generative, sequences, autotrainer, deepfd)
CASES: dict[str, Case] = {}
for _home in _HOMES:
    for _case in _home.CASES:
        if _case.name in CASES:
            raise ValueError(f"`name` must be new, got {_case.name!r} twice - in {_home.__name__}")
        CASES[_case.name] = _case
