"""Rivals in turn, and what is made of their times."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import fastguard
from fastguard.commands.bench import call_ns, gc_off

NUM_SETS = 3  # of tensors: two rivals meet every set, and each set was last seen three calls ago
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "ours": fastguard.clip_grad_norm_,
    "theirs": torch.nn.utils.clip_grad_norm_,
}


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


def take_turns(
    calls: Mapping[str, Sequence[Callable[[], Any]]],
    settings: Settings,
    before: Callable[[str, int], None] | None = None,
) -> dict[str, list[float]]:
    """Times of every rival in µs, round by round: the median of its single calls in the round.

    `calls` has, by rival, its call on each set of tensors; rivals and sets alternate call by call. `before` is called
    before each, untimed, with the rival's name and the number of the set.
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
        affordable = max(3, int(settings.budget_s * 1e9 / min(call_ns(turn) for _ in range(2))))
        num_rounds = min(settings.num_rounds, affordable)
        num_turns = min(settings.max_calls, affordable // num_rounds)
        rounds = [[turn() for _ in range(num_turns)] for _ in range(num_rounds)]
    return {name: [statistics.median(t[name] for t in times) / 1e3 for times in rounds] for name in calls}


def compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Two rivals' times in µs and their ratio round by round; `ratio` is None where theirs took no time."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
    return {
        "ours_us": Spread.of(ours)._asdict(),
        "theirs_us": Spread.of(theirs)._asdict(),
        "ratio": Spread.of(ratios)._asdict() if ratios else None,
    }
