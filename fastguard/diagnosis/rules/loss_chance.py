"""The rule on a loss that stands where one stands who knows nothing of the inputs."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import is_squared_error
from ..registry import rule
from ..signals import median, signals_of
from .output import loss_and_activation, training_batches

TITLE = "Loss"

_OVER_CLASSES = ("cross-entropy", "negative log-likelihood", "log of the output")


@rule(
    "loss-at-chance",
    reads="the level of the loss against that of guessing among as many classes as the output is wide",
    source="our own: a model that knows nothing of its inputs ends at the entropy of the targets",
    remedy="Nothing of the targets is found in the inputs: look at single samples with their targets, as the model "
    "gets them. Are they shuffled against each other, or do the inputs not arrive?",
    needs_descent=True,
)
def loss_at_chance(
    history: TrainingHistory,
    *,
    tolerance: float = 0.03,
    frequent: float = 0.05,
    num_targets: int = 512,
    min_steps: int = 100,
) -> Finding | None:
    """After `min_steps` losses their median is within a share `tolerance` of ln C, and they have not moved since.

    Or within a share `frequent` of the entropy of the targets, where `num_targets` or more of them are known, and the
    newest 64 losses are no lower than those before.

    Not moved: the best average is no lower than twice that share below. Info where the loss is not known to be one over
    classes, nor began there. Or, of a squared error, the median is at least
    nine tenths of the targets' variance, and the best average eight.
    """
    samples = training_batches(history)
    s = signals_of(history)
    if not samples or len(s.losses) < min_steps:
        return None
    if samples[-1].output_width < 2 or is_squared_error(history):
        return _at_the_spread(history, median(s.losses[-64:]))
    kind = history.model.loss_kind or loss_and_activation(history.model.loss_ops)[0]
    if kind not in ("", *_OVER_CLASSES):
        return None
    width, level = samples[-1].output_width, median(s.losses[-64:])
    for chance, near, what in (
        (math.log(width), tolerance, f"guessing among {width} classes gives"),
        (_known_entropy(history, num_targets), frequent, "knowing how frequent each class is gives about"),
    ):
        if abs(level - chance) <= near * chance and history.loss_trend.best >= (1.0 - 2 * near) * chance:
            return Finding(
                f"The loss stands at {level:.4g}; {what} {chance:.4g}.",
                severity="warning" if kind or _begins_at(history, chance, near) else "info",
                evidence={"level": level, "chance": chance, "num_classes": width, "threshold": near},
                confidence=0.85,
            )
    return None


def _begins_at(history: TrainingHistory, chance: float, near: float) -> bool:
    """Whether the first loss was that of guessing, as a cross-entropy's is before anything is learnt."""
    firsts = history.loss_trend.firsts
    return bool(firsts) and abs(firsts[0] - chance) <= 2.0 * near * chance


def _known_entropy(history: TrainingHistory, num_targets: int) -> float:
    """Of the targets, where enough are known and the loss does not fall through it; else no loss stands there."""
    entropy, s = history.model.target_entropy, signals_of(history)
    is_falling = len(s.losses) > 64 and not s.stands
    are_few = (history.model.num_targets or 0) < num_targets
    return -math.inf if entropy is None or are_few or is_falling else entropy


def _at_the_spread(history: TrainingHistory, level: float) -> Finding | None:
    notes = history.model
    if not is_squared_error(history) or not notes.target_std or notes.target_mean is None:
        return None
    variance = notes.target_std**2
    is_scaled = abs(notes.target_mean) > max(10.0, 3.0 * notes.target_std)  # which is target-scale's
    s = signals_of(history)
    is_falling = len(s.losses) > 64 and not s.stands  # on the way to the mean, and on from it
    if is_scaled or is_falling or not 0.9 * variance <= level <= 1.2 * variance:
        return None
    if history.loss_trend.best < 0.8 * variance:
        return None
    return Finding(
        f"The loss stands at {level:.4g}; always giving the mean of the targets gives about {variance:.4g}.",
        evidence={"level": level, "chance": variance},
        confidence=0.75,
    )
