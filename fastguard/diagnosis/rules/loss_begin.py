"""The rule on where the loss begins, before anything was learnt."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import is_squared_error
from ..registry import rule
from ..signals import median, signals_of
from .output import last_layer, training_batches

TITLE = "Loss"


@rule(
    "loss-begins-high",
    reads="the first loss and the first output, against what knowing nothing of the inputs gives; the newest losses",
    source="Karpathy 2019, A Recipe for Training Neural Networks: verify the loss at initialisation",
    remedy="The first outputs are far larger than the targets ask for: look at the initialisation (embeddings and the "
    "last layer too), at normalisation before the last layer, and at the scale of the inputs.",
    needs_descent=True,
    needs_targets=True,
)
def loss_begins_high(history: TrainingHistory, *, times: float = 8.0, min_steps: int = 100) -> Finding | None:
    """The first loss was `times` that of one who knows nothing, for outputs as far too large.

    Of a cross-entropy: the outputs' standard deviation was above `times`, too, so that no sum over samples is taken for
    it. Of a squared error: their size was above the root of `times`, and of that times the targets'. Info until
    `min_steps` losses were seen, and where the newest have come below that of one who knows nothing.
    """
    notes, samples = history.model, training_batches(history)[:1]
    if not samples or not history.loss_trend.firsts or samples[0].output_width < 1:
        return None
    x, first = samples[0], history.loss_trend.firsts[0]
    size = math.hypot(x.output_mean, x.output_std)
    if is_squared_error(history):
        of_targets = math.hypot(notes.target_mean or 0.0, notes.target_std or 0.0)
        chance, is_large = (notes.target_std or 0.0) ** 2, size > math.sqrt(times) * max(of_targets, 1.0)
    elif notes.loss_kind == "cross-entropy" and x.output_width > 1:
        chance, is_large = math.log(x.output_width), x.output_std > times
    else:
        return None
    if not is_large or not times * chance < first < math.inf:
        return None
    inputs = 0.0 if x.input_is_integer else math.hypot(x.input_mean, x.input_std)
    losses = signals_of(history).losses
    level = median(losses[-64:])
    return Finding(
        f"The loss began at {first:.4g}, where knowing nothing gives {chance:.4g}: the first outputs had a size of "
        f"{size:.3g}. It is {level:.4g} now.",
        layers=last_layer(history),
        severity="warning" if len(losses) >= min_steps and level > chance else "info",
        evidence={"first": first, "chance": chance, "level": level, "size": size, "inputs": inputs},
        confidence=0.9,
    )
