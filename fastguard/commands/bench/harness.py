"""Times calls in turn, as training makes them, each on other tensors than the one before; describes the machine."""

from __future__ import annotations

import gc
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import fastguard
from fastguard.kernels import backends

NUM_SETS = 3  # of tensors: two rivals meet every set, and each set was last seen three calls ago
_MIN_ROUNDS = 3
TOO_NOISY = "too noisy to tell"
_BUSY_LOAD = 0.5
BUSY_RATIO = 0.05
_TELLING_S = 1.0  # below that, /proc/stat is too coarse: it counts hundredths of a second


class WrongResultError(RuntimeError):
    """A result is not what float64 says; nothing is timed then."""


class Settings(NamedTuple):
    """How long to measure: about `budget_s`, in at most `num_rounds` rounds of at most `max_calls` calls each."""

    budget_s: float = 4.0
    num_rounds: int = 15
    max_calls: int = 100


QUICK = Settings(0.3, 3, 10)


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
        return self._asdict()


@contextmanager
def gc_off() -> Iterator[None]:
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


def plan(settings: Settings, turn_ns: float) -> tuple[int, int]:
    """How many rounds of how many turns the budget allows, if a turn takes `turn_ns`."""
    affordable = max(_MIN_ROUNDS, int(settings.budget_s * 1e9 / max(1.0, turn_ns)))
    num_rounds = min(settings.num_rounds, affordable)
    return num_rounds, min(settings.max_calls, affordable // num_rounds)


def take_turns(
    calls: Mapping[str, Sequence[Callable[[], Any]]],
    settings: Settings,
    before: Callable[[str, int], None] | None = None,
) -> dict[str, list[float]]:
    """Times of every rival in µs, round by round: the median of its single calls in the round.

    Args:
        calls: by rival, its call on each set of tensors. Rivals alternate call by call, and so do the sets.
        before: is called before each call, untimed, with the rival's name and the number of the set.
    """
    turns = itertools.count()

    def turn() -> dict[str, int]:
        times = {}
        for name, on_sets in calls.items():
            index = next(turns) % len(on_sets)
            if before is not None:
                before(name, index)
            times[name] = call_ns(on_sets[index])
        return times

    with gc_off():
        num_rounds, num_calls = plan(settings, min(call_ns(turn) for _ in range(2)))
        rounds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(num_rounds):
            times = [turn() for _ in range(num_calls)]
            for name, values in rounds.items():
                values.append(statistics.median(t[name] for t in times) / 1e3)
    return rounds


def compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Two rivals' times in µs, and the ratio of them round by round, as results have them; `ratio` is None where
    theirs took no time."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
    return {
        "ours_us": Spread.of(ours).to_dict(),
        "theirs_us": Spread.of(theirs).to_dict(),
        "ratio": Spread.of(ratios).to_dict() if ratios else None,
    }


def overlap(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether two spreads have values in common, so that their medians do not say which is larger.

    >>> overlap({"min": 1.0, "max": 2.0}, {"min": 1.5, "max": 3.0})
    True
    """
    return one["min"] <= other["max"] and other["min"] <= one["max"]


def number(value: float | None) -> str:
    """A ratio as text: two digits that count."""
    return "" if value is None else f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"


def duration(us: float) -> str:
    """A time in µs with its unit, to three digits."""
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= factor:
            return f"{us / factor:.3g} {unit}" if us < 1e3 * factor else f"{us / factor:,.0f} {unit}"
    return f"{us:.3g} µs"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _busy_s() -> float | None:
    """CPU seconds spent by the whole machine since it started; None if it is not known."""
    try:
        with open("/proc/stat", encoding="ascii") as lines:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, next(lines).split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Machine:
    """Describes the machine when measuring starts; `to_dict` at its end says how much others took in between."""

    def __init__(self) -> None:
        self._started = time.time()
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self._busy, self._own = _busy_s(), _own_s()

    def _others_ratio(self) -> float | None:
        """Share of the cores' time that other processes took; None if it is not known yet."""
        busy, elapsed = _busy_s(), time.time() - self._started
        if self._busy is None or busy is None or elapsed < _TELLING_S:
            return None
        others = (busy - self._busy) - (_own_s() - self._own)
        return max(0.0, others / (elapsed * (os.cpu_count() or 1)))

    def to_dict(self) -> dict[str, Any]:
        others = self._others_ratio()
        isa, kernels = None, backends()
        if kernels["cpu"].available:
            from fastguard import _C

            isa = _C.isa()
        return {
            "cpu": _cpu_model(),
            "num_cores": _num_cores(),
            "num_threads": torch.get_num_threads(),
            "isa": isa,
            "backend": kernels["cpu"].reason or kernels["cpu"].detail,
            "system": f"{platform.system()} {platform.release()}",
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "fastguard": fastguard.__version__,
            "date": time.strftime("%Y-%m-%d", time.gmtime(self._started)),
            "seconds": round(time.time() - self._started, 1),
            "load_at_start": self._load,
            "others_ratio": None if others is None else round(others, 4),
            "is_busy": (self._load or 0.0) > _BUSY_LOAD if others is None else others > BUSY_RATIO,
        }


def line(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    load = machine["load_at_start"]
    others = machine["others_ratio"]
    parts = [
        f"{machine['cpu']}, {machine['num_cores']} cores, {machine['num_threads']} threads",
        machine["isa"] or "no extension",
        f"torch {machine['torch']}, Python {machine['python']}, fastguard {machine['fastguard']}",
        "load unknown" if load is None else f"load {load:.2f} at the start",
    ]
    if others is not None:
        parts.append(f"{others:.1%} of the cores taken by others")
    return "; ".join(parts) + (" — BUSY, figures are noisy" if machine["is_busy"] else "")
