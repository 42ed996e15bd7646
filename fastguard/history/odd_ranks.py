"""Ranks whose own gradients are of another size than the others': facts that no record shows, as plain dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..stats import values

MAX_RANKS = 16
_NUMBERS = ("rank", "num_ranks", "step", "last_step", "num_steps")


def odd_ranks_of(plain: Any) -> tuple[dict[str, Any], ...]:
    """A list of ranks as they were told, sixteen at most; a MisfitError for anything else.

    Each has the rank, of how many, the first and the last step of oddity, how many steps these are, and the ratio of
    its norm to the ranks' median, as the median over the last twenty of them.
    """
    reads = {**dict.fromkeys(_NUMBERS, values.count), "ratio": lambda ratio: float(values.number(ratio))}
    return values.dicts(reads, plain)[:MAX_RANKS]


def sentence(odd: Mapping[str, Any]) -> str:
    """One of them in words.

    >>> sentence({"rank": 3, "num_ranks": 4, "step": 22, "last_step": 45, "num_steps": 24, "ratio": 4.0})
    "the norm of rank 3's own gradients was 4 times the median of 4 ranks for 24 steps, from 22 to 45"
    """
    steps = f"for {odd['num_steps']} steps, from {odd['step']} to {odd['last_step']}"
    return (
        f"the norm of rank {odd['rank']}'s own gradients was {odd['ratio']:.3g} times the median of "
        f"{odd['num_ranks']} ranks {steps}"
    )
