"""Rules on what recovery has done."""

from __future__ import annotations

from ...records import TrainingHistory
from ...records.events import describe_recovery
from ..finding import Finding
from ..registry import rule

TITLE = "Recovery"
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
    reads="gradients that were computed once more from the same random state (`Guard.recompute`)",
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
