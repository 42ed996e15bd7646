"""Rules on what several ranks are to have alike."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Finding, count
from ..registry import rule

TITLE = "Several ranks"


@rule(
    "replicas-differ",
    of="ranks-differ",
    leads=True,
    severity="critical",
    reads="checksums of gradients and weights that replicas are to have alike (`wrap(..., parity=True)`)",
    source="our own: after a reduction all ranks hold the same bits; other bits are a fault of code, memory or network",
    remedy="Where gradients differ: call the model through DistributedDataParallel itself and not past it, give every "
    "parameter the same part in the loss on each rank, and change no gradient on one rank alone. Where only weights "
    "do: broadcast them from one rank, load the same state on all, clip and step alike. One odd rank among several "
    "that are alike, again and again: test its memory and its network.",
)
def replicas_differ(history: TrainingHistory) -> Finding | None:
    """Replicas of a tensor were not bit for bit the same."""
    found = history.model.replica_differences
    if not found:
        return None
    more = "" if len(found) == 1 else f"; {len(found)} times in all, at last at step {found[-1]['step']}"
    ranks = sorted({rank for event in found for rank in event["ranks"]})
    first = found[0]
    odd = ", ".join(map(str, first["ranks"]))
    which = f": rank {odd} has others" if len(first["ranks"]) == 1 else f": ranks {odd} have others" if odd else ""
    return Finding(
        f"Replicas differ: at step {first['step']} the {first['what']} of {count(first['num_tensors'], 'tensor')}, "
        f"first {first['name']}, were not the same on all of {first['num_ranks']} ranks{which}{more}.",
        first["step"],
        found[-1]["step"],
        layers=(first["name"],),
        severity="critical",
        evidence={"differences": float(len(found)), "num_tensors": float(first["num_tensors"])}
        | ({"odd_rank": float(ranks[0])} if len(ranks) == 1 else {}),
        confidence=1.0,
    )


@rule(
    "odd-rank",
    of="ranks-differ",
    remedy="Look at what this rank reads: its shard of the data, its sampler's seed, lengths and masks of its batches. "
    "If the data move to another rank and the oddity stays, it is the machine: test its memory and kernels, and leave "
    "it out.",
)
def odd_rank(history: TrainingHistory, *, min_steps: int = 20) -> Finding | None:
    """The norm of one rank's own gradients lay apart from those of the others for `min_steps` steps or more.

    Of three ranks or more; more than a quarter above their median or a fifth below it, in the median over twenty steps;
    and further than five standard deviations, of the ranks' distances (by their MAD) and of what the steps' scatter
    leaves in such a median.
    """
    found = [one for one in history.model.odd_ranks if one["num_steps"] >= min_steps]
    if not found:
        return None
    worst = max(found, key=lambda one: abs(math.log(max(one["ratio"], 1e-300))))
    others = f"; {len(found)} ranks are odd in all" if len(found) > 1 else ""
    return Finding(
        f"Odd rank: the norm of rank {worst['rank']}'s own gradients was {worst['ratio']:.3g} times the median of "
        f"{worst['num_ranks']} ranks for {worst['num_steps']} steps, from {worst['step']} to {worst['last_step']}"
        f"{others}.",
        min(one["step"] for one in found),
        max(one["last_step"] for one in found),
        evidence={"odd_rank": float(worst["rank"]), "ratio": worst["ratio"], "num_odd_ranks": float(len(found))},
        confidence=0.9,
    )
