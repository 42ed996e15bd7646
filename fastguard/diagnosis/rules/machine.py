"""Rules on what the machine costs the run: page faults, swapping, too few cores."""

from __future__ import annotations

from ...records import TrainingHistory
from ..finding import Finding
from ..registry import rule

TITLE = "The machine"
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
