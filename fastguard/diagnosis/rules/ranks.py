"""Rules on what several ranks are to have alike."""

from __future__ import annotations

from ...history import TrainingHistory
from ...history.replicas import sentence
from ..finding import Finding
from ..registry import rule

TITLE = "Several ranks"


@rule(
    "replicas-differ",
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
    return Finding(
        f"Replicas differ: {sentence(found[0])}{more}.",
        found[0]["step"],
        found[-1]["step"],
        layers=(found[0]["name"],),
        severity="critical",
        evidence={"differences": float(len(found)), "num_tensors": float(found[0]["num_tensors"])}
        | ({"odd_rank": float(ranks[0])} if len(ranks) == 1 else {}),
        confidence=1.0,
    )
