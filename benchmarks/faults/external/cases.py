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
from .sound2 import agents, text
from .sound2 import densities as codes
from .sound2 import pictures as depicted
from .sound2 import settings as regimes2
from .sound2 import structures as built
from .sound2 import tabular as tables2
from .wild import architectures, densities, pairs, regimes, settings
from .wild import faulty as planted
from .wild import games as duels

_HOMES = (tabular, images, generative, sequences, games, others, autotrainer, deepfd, deepcrime, symptoms, traincheck)
_WILD = (duels, densities, pairs, regimes, architectures, settings, planted)
_AFRESH = (tables, series, pictures, loops, structures, counted, drawn, told, remaining)
_SOUND2 = (tables2, text, depicted, agents, codes, built, regimes2)
CASES: dict[str, Case] = {}
for _home in (*_HOMES, *_WILD, *_AFRESH, *_SOUND2):
    for _case in _home.CASES:
        if _case.name in CASES:
            raise ValueError(f"`name` must be new, got {_case.name!r} twice - in {_home.__name__}")
        CASES[_case.name] = _case
