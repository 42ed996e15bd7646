"""A rule on the weight decay as it was set."""

from __future__ import annotations

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import penalty
from ..registry import rule
from ..signals import has_had_time, signals_of
from .output import training_batches

TITLE = "Weights and updates"

_COUPLED = frozenset(["SGD", "ASGD", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"])


@rule(
    "large-weight-decay",
    reads="weight decay of each parameter group, the first gradients and weights, samples of the output, and the loss",
    source="the usual 1e-4 to 1e-2 of SGD and Adam, 1e-2 to 0.3 of AdamW, and a decade beyond",
    remedy="Divide weight_decay by 100 or more, and leave biases and norms out of it.",
    needs_descent=True,
    needs_harm=True,
)
def large_weight_decay(
    history: TrainingHistory,
    *,
    coupled: float = 0.05,
    decoupled: float = 1.0,
    progress: float = 0.4,
    progress_coupled: float = 0.6,
    min_steps: int = 100,
) -> Finding | None:
    """A decay of `coupled` or more that goes through the gradient, or of `decoupled` or more in AdamW.

    Info; a warning if after `min_steps` losses, or forty at the end of a run, less than a share `progress` of the first
    has been gained; where the decay goes through the gradient, `progress_coupled` from twice that on, a quarter below.
    Or a term of the loss takes |w| or w² and is nearly all of the gradient, and the output has come to be the same for
    all inputs of a batch: a warning after as many losses.
    """
    largest, least = 0.0, progress
    for settings in history.model.optimizer_settings:
        value = settings.get("weight_decay")
        limit = coupled if settings.get("kind") in _COUPLED else decoupled
        if isinstance(value, (int, float)) and value >= limit:
            largest = max(largest, float(value))
            if limit == coupled:
                least = progress_coupled if value >= 2.0 * coupled else 0.25 * progress
    flat = [x.output_spread <= 1e-4 * max(x.output_abs_max, 1e-12) for x in training_batches(history)]
    term = "" if largest or flat[-2:] != [True, True] or flat[0] else penalty(history)
    if not (largest or term) or not history.num_clean:
        return None
    is_bad = bool(term) or not signals_of(history).progress >= least
    is_slow = history.losses.count >= 40 and has_had_time(history, min_steps) and is_bad
    what = f"penalty of {term} in the loss left one output for all inputs" if term else f"weight decay is {largest:g}"
    return Finding(
        f"The {what}.",
        severity="warning" if is_slow else "info",
        evidence={"weight_decay": largest, "term": term, "threshold": coupled},
        confidence=0.85,
    )
