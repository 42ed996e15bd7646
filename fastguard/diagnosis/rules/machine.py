"""Rules on what the machine costs the run, on what ranks should have alike, and on what recovery did."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ...records.events import describe_recovery
from ..finding import Finding, count
from ..registry import rule

TITLE = "Machine, ranks and recovery"

_READS = "`getrusage` of the process, over the newest two windows of 32 steps or more; the smaller value counts"


@rule(
    "page-faults",
    of="memory-pressure",
    severity="info",
    remedy="Call `fastguard.tools.keep_memory()` before training, or set FASTGUARD_KEEP_MEMORY=1. Results do not "
    "change; the resident set grows.",
)
def page_faults(history: TrainingHistory, *, faults: float = 1000.0, share: float = 0.1) -> Finding | None:
    """A step takes `faults` page faults or more, and the kernel `share` of the CPU time; with glibc's allocator."""
    used = history.model.resources
    if not used.get("is_glibc") or used["page_faults"] < faults or used["system_share"] < share:
        return None
    return Finding(
        f"Each step takes {used['page_faults']:,.0f} page faults, and the kernel uses {used['system_share']:.0%} of "
        "the CPU time: memory that one step returns is handed out again in the next.",
        severity="info",
        evidence={"page_faults": used["page_faults"], "system_share": used["system_share"], "threshold": faults},
        confidence=0.8,
    )


@rule(
    "swapping",
    of="memory-pressure",
    leads=True,
    reads=_READS + "; the swapped part of the process from /proc (Linux)",
    source="our own: a page that must be read back from disk takes thousands of times as long as one in memory",
    remedy="Reduce the batch size, the number of workers or what is kept of the data, or use a machine with more "
    "memory.",
)
def swapping(history: TrainingHistory, *, faults: float = 1.0) -> Finding | None:
    """A step reads `faults` pages or more from disk while part of the process is swapped out."""
    used = history.model.resources
    if used.get("major_faults", 0.0) < faults or not used["swapped_bytes"]:
        return None
    return Finding(
        f"The machine is out of memory: {used['swapped_bytes'] / 2**20:,.0f} MiB of this process are swapped out, and "
        f"each step reads {used['major_faults']:,.0f} pages from disk.",
        evidence={"major_faults": used["major_faults"], "swapped_bytes": used["swapped_bytes"], "threshold": faults},
        confidence=0.9,
    )


@rule(
    "starved-of-cores",
    severity="info",
    reads="how long the training thread waited for a core (/proc/thread-self/schedstat, Linux), over the newest two "
    "windows of 32 steps or more; the smaller value counts",
    source="our own; waiting is time in which the thread could run, so that waiting for data is not counted",
    remedy="End what else runs, set fewer threads (`torch.set_num_threads`, OMP_NUM_THREADS) or fewer data loader "
    "workers, or ask for more cores. In a container, look at its CPU limit.",
)
def starved_of_cores(history: TrainingHistory, *, share: float = 0.2) -> Finding | None:
    """The training thread waits for a core for `share` of the time or more."""
    waited = history.model.resources.get("core_wait_share", 0.0)
    if waited < share:
        return None
    return Finding(
        f"The training thread waits for a core {waited:.0%} of the time: other threads or processes use them.",
        severity="info",
        evidence={"core_wait_share": waited, "threshold": share},
        confidence=0.8,
    )


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


_MOST_TOLD = 3


@rule(
    "rolled-back",
    severity="critical",
    reads="what recovery was told to have done (`TrainingHistory.model.recoveries`)",
    source="our own: a rollback is told, never silent",
    remedy="Look at the batches that were left out, and at learning rate, warm-up and clipping: a run that goes back "
    "often needs one of them changed.",
)
def rolled_back(history: TrainingHistory) -> Finding | None:
    """The run was put back to a snapshot, or given up. A warning; critical where it was given up."""
    done = [event for event in history.model.recoveries if event["kind"] != "recomputed"]
    if not done:
        return None
    is_failed = any(event["kind"] == "failed" for event in done)
    told = "; ".join(describe_recovery(event) for event in done[-_MOST_TOLD:])
    more = "" if len(done) <= _MOST_TOLD else f"{len(done)} times, at last: "
    return Finding(
        f"Recovery acted: {more}{told}.",
        done[0]["step"],
        done[-1]["step"],
        severity="critical" if is_failed else "warning",
        evidence={"rollbacks": float(sum(event["kind"] == "rollback" for event in done))},
        confidence=1.0,
    )


@rule(
    "hardware-fault",
    severity="critical",
    reads="gradients that were computed once more from the same random state, in logs of 0.2",
    source="Megatron-LM's rerun state machine: the same bits again speak for the data, other bits for the machine",
    remedy="Run the machine's own memory and GPU tests, and take it out of the pool; or make the model's operations "
    "deterministic (torch.use_deterministic_algorithms), so that other bits mean what they seem to.",
)
def hardware_fault(history: TrainingHistory) -> Finding | None:
    """Gradients that were not finite had other bits when they were computed once more."""
    faults = [e for e in history.model.recoveries if e["kind"] == "recomputed" and e.get("num_tensors")]
    if not faults:
        return None
    num_asked = sum(event["kind"] == "recomputed" for event in history.model.recoveries)
    return Finding(
        f"A transient fault of the machine: {describe_recovery(faults[-1])} ({len(faults)} of {num_asked} times).",
        faults[0]["step"],
        faults[-1]["step"],
        severity="critical",
        evidence={"faults": float(len(faults)), "recomputed": float(num_asked)},
        confidence=0.9,
    )
