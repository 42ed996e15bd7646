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
from .fresh3 import makers, pieces, rewards, scans
from .fresh3 import regimes as manners
from .fresh3 import series as spoken
from .fresh3 import tables as sheets
from .fresh4 import changing
from .fresh4 import codes as codings
from .fresh4 import pictures as views
from .fresh4 import rewards as gains
from .fresh4 import sequences as orders
from .fresh4 import tables as rows
from .fresh5 import changing as turning
from .fresh5 import pictures as scenes
from .fresh5 import sequences as streams
from .fresh5 import structures as made
from .fresh5 import tables as ledgers
from .fresh5 import tuned
from .fresh5.case import GROUP as FIFTH
from .fresh6 import changing as shifting
from .fresh6 import densities as likelihoods
from .fresh6 import likenesses
from .fresh6 import pictures as sights
from .fresh6 import rewards as prizes
from .fresh6 import sequences as rows_of
from .fresh6 import structures as bodies
from .fresh6 import tables as columns
from .fresh6.case import GROUP as LATEST
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
from .wild.case import GROUPS as EARLIER

_HOMES = (tabular, images, generative, sequences, games, others, autotrainer, deepfd, deepcrime, symptoms, traincheck)
_WILD = (duels, densities, pairs, regimes, architectures, settings, planted)
_AFRESH = (tables, series, pictures, loops, structures, counted, drawn, told, remaining)
_SOUND2 = (tables2, text, depicted, agents, codes, built, regimes2)
_FRESH3 = (sheets, rewards, scans, pieces, spoken, makers, manners)
_FRESH4 = (rows, views, orders, codings, changing, gains)
_FRESH5 = (ledgers, scenes, streams, made, tuned, turning)
_FRESH6 = (columns, sights, rows_of, bodies, likenesses, likelihoods, shifting, prizes)
GROUPS = (*EARLIER, FIFTH, LATEST)  # what stands beside the halves; wild/case.py is in the hash of its own runs
CASES: dict[str, Case] = {}
for _home in (*_HOMES, *_WILD, *_AFRESH, *_SOUND2, *_FRESH3, *_FRESH4, *_FRESH5, *_FRESH6):
    for _case in _home.CASES:
        if _case.name in CASES:
            raise ValueError(f"`name` must be new, got {_case.name!r} twice - in {_home.__name__}")
        CASES[_case.name] = _case
