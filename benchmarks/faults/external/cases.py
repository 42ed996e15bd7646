"""All cases of the suite, by name."""

from __future__ import annotations

from .afresh import loops, pictures, structures, tables
from .afresh import sequences as series
from .afresh2 import others as remaining
from .afresh2 import pictures as drawn
from .afresh2 import sequences as told
from .afresh2 import tables as counted
from .case import Case
from .faulty import autotrainer, deepcrime, deepfd, symptoms, traincheck
from .sound import games, generative, images, others, sequences, tabular
from .wild import architectures, densities, pairs, regimes, settings
from .wild import faulty as planted
from .wild import games as duels

_HOMES = (tabular, images, generative, sequences, games, others, autotrainer, deepfd, deepcrime, symptoms, traincheck)
_WILD = (duels, densities, pairs, regimes, architectures, settings, planted)
_AFRESH = (tables, series, pictures, loops, structures, counted, drawn, told, remaining)
CASES: dict[str, Case] = {}
for _home in (*_HOMES, *_WILD, *_AFRESH):
    for _case in _home.CASES:
        if _case.name in CASES:
            raise ValueError(f"`name` must be new, got {_case.name!r} twice - in {_home.__name__}")
        CASES[_case.name] = _case
