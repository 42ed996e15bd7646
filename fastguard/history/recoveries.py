"""What was done to bring a run through: facts that no record shows, as plain dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..stats import values

_TEXTS = {"kind": values.text, "reason": values.text}
_NUMBERS = ("step", "to", "num_batches", "until", "num_tensors")


def recoveries_of(plain: Any) -> tuple[dict[str, Any], ...]:
    """A list of events as they were told; a MisfitError for anything else."""

    def event(one: Any) -> dict[str, Any]:
        given = values.mapping(one)
        found: dict[str, Any] = {name: values.entry(given, name, read) for name, read in _TEXTS.items()}
        found.update((name, values.entry(given, name, values.count)) for name in _NUMBERS if name in given)
        found["step"] = values.entry(given, "step", values.count)
        if "lr_factor" in given:
            found["lr_factor"] = values.entry(given, "lr_factor", values.number)
        return found

    return tuple(values.each(event, plain))


def sentence(event: Mapping[str, Any]) -> str:
    """An event in words.

    >>> sentence({"kind": "rollback", "step": 9, "to": 5, "reason": "the loss was NaN", "num_batches": 5})
    'rolled back from 9 to 5 because the loss was NaN; 5 batches skipped'
    """
    step, kind = event["step"], event["kind"]
    if kind == "recomputed":
        same = "gave the same bits: it is the data or the model"
        other = f"gave other bits in {event.get('num_tensors', 0)} tensors: a transient fault of the machine"
        return f"the gradients of step {step}, computed once more, {other if event.get('num_tensors') else same}"
    if kind == "new-level":
        return f"at step {step} the loss was taken to have a new level, after {event['num_batches']} batches left out"
    if kind == "failed":
        return f"given up at step {step} because {event['reason']}" + (
            f"; put back to step {event['to']}" if "to" in event else ""
        )
    said = f"rolled back from {step} to {event['to']} because {event['reason']}; {event['num_batches']} batches skipped"
    factor = event.get("lr_factor", 1.0)
    return said if factor == 1.0 else f"{said}; learning rate x {factor:g} at first, until {event['until']}"
