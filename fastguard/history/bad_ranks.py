"""Which ranks of a sharded run held gradients that were not finite: facts that no record shows, as plain dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..stats import values

MAX_RANKS = 16
_NUMBERS = ("rank", "num_ranks", "step", "num_nans", "num_infs", "num_steps")


def bad_ranks_of(plain: Any) -> tuple[dict[str, Any], ...]:
    """A list of ranks as they were told; a MisfitError for anything else."""
    return values.dicts({**dict.fromkeys(_NUMBERS, values.count), "name": values.text}, plain)


def with_step(
    known: Sequence[Mapping[str, Any]], step: int, num_ranks: int, told: Iterable[tuple[int, str, int, int]]
) -> tuple[dict[str, Any], ...]:
    """`known` after a bad step; of `told` (rank, tensor, NaNs, Infs) the first of each rank counts.

    >>> with_step([], 12, 4, [(3, "w2", 5, 0), (3, "w1", 1, 0)])
    ({'rank': 3, 'num_ranks': 4, 'step': 12, 'num_nans': 5, 'num_infs': 0, 'num_steps': 1, 'name': 'w2'},)
    """
    found = {one["rank"]: dict(one) for one in known}
    first: dict[int, tuple[int, str, int, int]] = {}
    for one in told:
        first.setdefault(one[0], one)
    for rank, name, num_nans, num_infs in first.values():
        if rank in found:
            found[rank]["num_steps"] += 1
        elif len(found) < MAX_RANKS:
            numbers = (rank, num_ranks, step, num_nans, num_infs, 1)
            found[rank] = {**dict(zip(_NUMBERS, numbers)), "name": name}
    return tuple(found.values())


def sentence(bad: Sequence[Mapping[str, Any]]) -> str:
    """Who held what, in words.

    >>> print(sentence(with_step([], 12, 4, [(3, "layers.7.w2", 5, 0)])))
    rank 3 alone of 4 held NaN, first at step 12 in layers.7.w2
    """
    first = min(bad, key=lambda one: (one["step"], one["rank"]))
    num_ranks = max(one["num_ranks"] for one in bad)  # another number of them may have resumed it
    nans, infs = (any(one[name] for one in bad) for name in ("num_nans", "num_infs"))
    what = " and ".join(name for name, is_there in (("NaN", nans), ("Inf", infs)) if is_there)
    if len(bad) == 1:
        who, which = f"rank {first['rank']} alone of {num_ranks}", ""
    else:
        which = f"rank {first['rank']} "
        most = "or more " if len(bad) == MAX_RANKS < num_ranks else ""
        who = f"all {num_ranks} ranks" if len(bad) == num_ranks else f"{len(bad)} {most}of {num_ranks} ranks"
    return f"{who} held {what}, {which}first at step {first['step']} in {first['name']}"
