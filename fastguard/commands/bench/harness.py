"""Times rivals against one another: in alternating rounds, each proved right before."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from .cases import Case
from .rivals import RIVALS, Rival
from .subject import Subject

_SLOW_NS = 100_000_000  # such a call takes part in few rounds, once in each
_SETTLE_S = 0.1


@dataclass(frozen=True)
class Settings:
    """How long to measure: `num_rounds` turns for each rival, of about `turn_ns` and at least three calls."""

    num_rounds: int = 15
    num_slow_rounds: int = 5
    turn_ns: int = 40_000_000
    max_calls: int = 200


QUICK = Settings(num_rounds=5, num_slow_rounds=1, turn_ns=10_000_000, max_calls=50)


class Spread(NamedTuple):
    """The median of several measurements, and how far they lie apart."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def to_dict(self) -> dict[str, float]:
        return {"median": self.median, "min": self.min, "max": self.max}


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """As timeit has it: a collection that one rival's garbage starts would be booked on another."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def call_ns(call: Callable[[], Any]) -> int:
    """How long one call takes."""
    started = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - started


class Turns:
    """One rival's part in the rounds: its call, and the median of each turn."""

    def __init__(self, rival: Rival, subject: Subject, settings: Settings) -> None:
        self.rival = rival
        self.call = rival.prepare(subject)
        if rival.scales:
            subject.fill()
        self.norm_error = rival.check(self.call(), subject)
        estimate = min(call_ns(self.call) for _ in range(2))
        self.is_slow = estimate > _SLOW_NS
        self.calls_a_turn = 1 if self.is_slow else max(3, min(settings.max_calls, settings.turn_ns // max(1, estimate)))
        self.rounds_us: list[float | None] = []
        self.num_calls = 0

    def take(self) -> None:
        """One turn: a call to warm up, then those that count."""
        if not self.is_slow:
            self.call()
        times = [call_ns(self.call) for _ in range(self.calls_a_turn)]
        self.num_calls += len(times)
        self.rounds_us.append(statistics.median(times) / 1e3)
        if self.rival.other_threads:
            time.sleep(_SETTLE_S)

    def to_dict(self) -> dict[str, Any]:
        times = Spread.of(us for us in self.rounds_us if us is not None)
        return {
            "title": self.rival.title,
            "median_us": times.median,
            "min_us": times.min,
            "max_us": times.max,
            "num_calls": self.num_calls,
            "norm_error": self.norm_error,
            "rounds_us": self.rounds_us,
        }


def _alternate(turns: Sequence[Turns], subject: Subject, settings: Settings) -> None:
    every = -(-settings.num_rounds // settings.num_slow_rounds)
    with garbage_collector_off():
        for index in range(settings.num_rounds):
            start = index % max(1, len(turns))
            for turn in (*turns[start:], *turns[:start]):
                if turn.is_slow and index % every:
                    turn.rounds_us.append(None)
                    continue
                subject.freshen()
                turn.take()


def measure_case(case: Case, settings: Settings, rivals: Iterable[str] = tuple(RIVALS)) -> dict[str, Any]:
    """Times of every rival on one case; those that only read first, those that change the gradients after them.

    Raises:
        WrongResultError: a rival's result is not what float64 says.
    """
    subject = Subject(case)
    timings: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    chosen = []
    for name in rivals:
        reason = RIVALS[name].missing()
        if reason is None:
            chosen.append(RIVALS[name])
        else:
            left_out[name] = reason
    for scales in (False, True):
        turns = [Turns(rival, subject, settings) for rival in chosen if rival.scales is scales]
        _alternate(turns, subject, settings)
        timings |= {turn.rival.name: turn.to_dict() for turn in turns}
    return {
        "title": case.title,
        "num_tensors": case.num_tensors,
        "num_elements": case.num_elements,
        "dtype": str(case.dtype).removeprefix("torch."),
        "timings": timings,
        "left_out": left_out,
    }


def ratio(measured: dict[str, Any], ours: str, theirs: str) -> Spread | None:
    """Time of one rival over that of another, round by round; None if one of them was not measured."""
    timings = measured["timings"]
    if ours not in timings or theirs not in timings:
        return None
    pairs = zip(timings[ours]["rounds_us"], timings[theirs]["rounds_us"], strict=True)
    quotients = [a / b for a, b in pairs if a is not None and b is not None]
    return Spread.of(quotients) if quotients else None
