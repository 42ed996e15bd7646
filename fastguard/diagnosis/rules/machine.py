"""Rules on what the machine costs the run, and on what recovery did."""

from __future__ import annotations

from ...records import TrainingHistory
from ...records.events import describe_recovery
from ..finding import Seen
from ..registry import rule

TITLE = "Machine and recovery"


@rule(
    "page-faults",
    of="memory-pressure",
    leads=True,
    severity="info",
    see="Each step takes {page_faults:,.0f} page faults, and the kernel uses {system_share:.0%} of the CPU time: "
    "memory that one step returns is handed out again in the next.",
    remedy="Call `fastguard.tools.keep_memory()` before training, or set FASTGUARD_KEEP_MEMORY=1.",
)
def page_faults(history: TrainingHistory, *, faults: float = 1000.0, share: float = 0.1) -> Seen | None:
    """A step takes `faults` page faults or more, and the kernel `share` of the CPU time; with glibc's allocator."""
    used = history.model.resources
    if not used.get("is_glibc") or used["page_faults"] < faults or used["system_share"] < share:
        return None
    return Seen(page_faults=used["page_faults"], system_share=used["system_share"])


@rule(
    "starved-of-cores",
    severity="info",
    see="The training thread waits for a core {core_wait_share:.0%} of the time: other threads or processes use them.",
    sure=0.8,
    remedy="End other processes, set fewer threads (`torch.set_num_threads`, OMP_NUM_THREADS) or fewer data loader "
    "workers, or ask for more cores. In a container, look at its CPU limit.",
)
def starved_of_cores(history: TrainingHistory, *, share: float = 0.2) -> Seen | None:
    """The training thread waits for a core for `share` of the time or more."""
    waited = history.model.resources.get("core_wait_share", 0.0)
    return Seen(core_wait_share=waited) if waited >= share else None


_MOST_TOLD = 3


@rule(
    "rolled-back",
    severity="critical",
    see="Recovery acted: {_more}{_done}.",
    sure=1.0,
    remedy="Look at the batches that were left out, and at learning rate, warm-up and clipping.",
)
def rolled_back(history: TrainingHistory) -> Seen | None:
    """The run was put back to a snapshot, or given up. A warning; critical where it was given up."""
    done = history.model.recoveries
    if not done:
        return None
    return Seen(
        at=(done[0]["step"], done[-1]["step"]),
        severity="critical" if any(event["kind"] == "failed" for event in done) else "warning",
        _more="" if len(done) <= _MOST_TOLD else f"{len(done)} times, last: ",
        _done="; ".join(describe_recovery(event) for event in done[-_MOST_TOLD:]),
    )
