"""Cases and rivals of benchmarks.speed in warm loops, under pytest-benchmark: `python -m pytest benchmarks`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.speed.cases import CASES
from benchmarks.speed.rivals import RIVALS
from fastguard.commands.bench.cases import Subject
from fastguard.commands.bench.harness import call_ns

_SLOW_S, _ROUND_S = 0.1, 1e-3


@functools.lru_cache(maxsize=1)  # one case at a time: the large ones hold half a gigabyte
def _subject(case: str) -> Subject:
    return Subject(CASES[case])


@pytest.fixture
def time_rival(benchmark: Any) -> Callable[[str, str], None]:
    """Checks the rival's result on that case against float64, then times it; `what` is added to the group's title."""

    def time(case: str, rival: str, what: str = "") -> None:
        chosen = RIVALS[rival]
        if (reason := chosen.missing()) is not None:
            pytest.skip(reason)
        subject = _subject(case)
        benchmark.group = CASES[case].title + what
        benchmark.name = chosen.title
        subject.fill()
        call, results = chosen.prepare(subject), []
        seconds = call_ns(lambda: results.append(call())) / 1e9
        chosen.check(results.pop(), subject)
        is_slow = seconds > _SLOW_S
        benchmark.pedantic(
            call,
            rounds=2 if is_slow else 20,
            iterations=1 if chosen.scales else max(1, int(_ROUND_S / seconds)),
            warmup_rounds=0 if is_slow else 2,
        )

    return time
