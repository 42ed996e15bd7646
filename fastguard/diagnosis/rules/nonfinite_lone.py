"""A rule on single elements far out of range, as a flipped bit leaves them."""

from __future__ import annotations

import math

from ...records import NonFiniteEvent, TrainingHistory
from ..finding import Finding, count
from ..registry import rule
from ..signals import median, signals_of

TITLE = "NaN and Inf"


@rule(
    "lone-element",
    of="hardware-fault",
    severity="critical",
    source="the exponent signature of bit flips (He et al., ISCA 2023; Wang et al. 2025), as a lone element",
    remedy="Arithmetic spreads what is wrong with a batch or a weight over many elements; one element alone looks like "
    "a flipped bit. Take the step again from a checkpoint: if the element is fine then, test memory and device.",
)
def lone_element(
    history: TrainingHistory,
    *,
    times: float = 100.0,
    most: int = 3,
    numel: int = 64,
    loss_ratio: float = 3.0,
    min_steps: int = 20,
) -> Finding | None:
    """At `most` steps or fewer one element of a gradient was at least `times` its tensor's usual norm, and all others
    together less than a tenth of it; or it was the only one that is not finite.

    In a tensor of at least `numel` elements, after `min_steps` clean steps; and the loss of that step was below
    `loss_ratio` times the usual, so that neither batch nor weights were bad before. Critical where several of the ten
    steps after it were not finite, or had losses ten times as large.
    """
    lone = [(one.step, one.name, one.value) for one in history.lone_elements if 0.0 < times * one.usual <= one.value]
    lone += [(event.step, event.names[0], math.inf) for event in _single(history)]
    if len(history.lone_elements) > most or not 0 < len(lone) <= most:
        return None
    known = history.tensors
    lone = [one for one in lone if one[1] in known and known[one[1]].numel >= numel]
    lone = [one for one in lone if _is_amid_calm(history, one[0], loss_ratio, min_steps)]
    if not lone:
        return None
    step, name, value = max(lone, key=lambda one: one[2])
    usual = next((one.usual for one in history.lone_elements if one.step == step), known[name].norm)
    what = f"{value:.3g}, where the whole tensor's usual norm is {usual:.3g}" if value < math.inf else "not finite"
    return Finding(
        f"At {count(len(lone), 'step')} a single element of {known[name].numel} in the gradient of {name} was far out "
        f"of range, and no other: at step {step} it was {what}.",
        min(one[0] for one in lone),
        max(one[0] for one in lone),
        severity="critical" if any(_is_the_end(history, one[0]) for one in lone) else "warning",
        layers=tuple(dict.fromkeys(one[1] for one in lone)),
        evidence={"value": value, "usual": usual, "num_steps": len(lone), "threshold_times": times},
        confidence=0.9,
    )


def _single(history: TrainingHistory) -> list[NonFiniteEvent]:
    """The first non-finite steps, as long as each had one bad element: later ones may come of these."""
    events = []
    for event in history.first_events:
        if event.num_tensors != 1 or event.num_nans + event.num_infs != 1 or not event.names:
            break
        events.append(event)
    return events


def _is_amid_calm(history: TrainingHistory, step: int, ratio: float, min_steps: int) -> bool:
    """Whether enough steps came before, and the loss of `step` was as theirs; where losses are known."""
    if sum(e.step < step for e in history.clean) < min_steps:
        return False
    losses = [e.loss for e in history.recent if e.step == step and e.loss is not None]
    before = [abs(e.loss) for e in signals_of(history).loss_entries if e.step < step and e.loss is not None][-50:]
    return not losses or not before or abs(losses[0]) <= ratio * median(before)


def _is_the_end(history: TrainingHistory, step: int) -> bool:
    """Whether the steps after it are lost: several not finite, or losses ten times those before."""
    after = [e for e in history.recent if step < e.step <= step + 10]
    before = [abs(e.loss) for e in signals_of(history).loss_entries if e.step < step and e.loss is not None][-50:]
    if before and sum(e.loss is not None and abs(e.loss) > 10.0 * median(before) for e in after) > 2:
        return True
    return sum(e.skipped or not math.isfinite(e.norm) for e in after) > 2
