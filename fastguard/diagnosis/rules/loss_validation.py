"""Rules on the loss against the validation loss."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import dropout
from ..registry import rule
from ..signals import ends, median, signals_of

TITLE = "Loss"


@rule(
    "overfitting",
    reads="validation losses, each with the training loss of its time",
    source="SageMaker Debugger Overfit ((val - train) / train > 0.1) and the toolkit's OVERFITTING, against the best "
    "validation so far",
    remedy="Stop at the best validation loss, or go back to it. More data, augmentation, dropout or weight decay help "
    "next time.",
    needs_descent=True,
)
def overfitting(
    history: TrainingHistory,
    *,
    ratio: float = 1.2,
    share: float = 0.08,
    gap: float = 0.1,
    validations: int = 5,
    by_heart: float = 0.02,
    high: float = 0.3,
) -> Finding | None:
    """The newest `validations` validation losses are all above `ratio` times the best, the training loss fell since.

    Also by more than a `share` of the first validation loss, and by a `gap` above the training loss. A validation loss
    that dances around its best is silent.

    Or none of them is the best, which is above a share `high` of where the losses began, and the training loss is below
    `by_heart` of it.
    """
    known = [v for v in history.validations if math.isfinite(v.train_loss)]
    if len(known) <= validations:
        return None
    best = min(range(len(known)), key=lambda i: known[i].val_loss)
    newest = known[-validations:]
    if len(known) - 1 - best < validations:
        return None
    least, train = min(v.val_loss for v in newest), known[-1].train_loss
    s = signals_of(history)
    began = s.chance or s.initial_loss
    if known[best].val_loss > high * began > 0.0 and 0.0 <= train < by_heart * known[best].val_loss:
        return Finding(
            f"The validation loss has stood at {known[best].val_loss:.4g} or above since step {known[best].step}, and "
            f"the training loss is down to {train:.4g}.",
            *ends(known[best:]),
            evidence={"best": known[best].val_loss, "train_loss": train, "threshold": by_heart},
            confidence=0.8,
        )
    rise = least - known[best].val_loss
    if least <= ratio * known[best].val_loss or rise <= share * known[0].val_loss:
        return None
    if train >= known[best].train_loss or least <= (1.0 + gap) * train:
        return None
    return Finding(
        f"The validation loss has risen from {known[best].val_loss:.4g} at step {known[best].step} to "
        f"{known[-1].val_loss:.4g}, while the training loss fell from {known[best].train_loss:.4g} to {train:.4g}.",
        *ends(known[best:]),
        evidence={
            "val_loss": known[-1].val_loss,
            "best": known[best].val_loss,
            "train_loss": train,
            "threshold": ratio,
        },
        confidence=0.9,
    )


@rule(
    "overtraining",
    of="overfitting",
    severity="info",
    source="SageMaker Debugger Overtraining (patience of 10 validations)",
    remedy="Nothing has been gained on the validation set for a while: stop here, or lower the learning rate.",
    needs_descent=True,
)
def overtraining(history: TrainingHistory, *, patience: int = 10) -> Finding | None:
    """No validation loss below the best for `patience` validations."""
    known = history.validations
    if len(known) <= patience:
        return None
    best = min(range(len(known)), key=lambda i: known[i].val_loss)
    if len(known) - 1 - best < patience:
        return None
    return Finding(
        f"The best validation loss, {known[best].val_loss:.4g}, was reached {len(known) - 1 - best} validations ago.",
        known[best].step,
        known[-1].step,
        severity="info",
        evidence={"best": known[best].val_loss, "num_since": len(known) - 1 - best, "threshold": patience},
        confidence=0.8,
    )


@rule(
    "training-above-validation",
    reads="validation losses against the training losses of the steps after them",
    source="our own: what acts on training alone (dropout, augmentation, decay of the labels) makes the difference",
    remedy="Training is made much harder than validation: lower dropout or augmentation. If there is neither, look "
    "whether the two losses are summed and averaged alike.",
    needs_descent=True,
)
def training_above_validation(
    history: TrainingHistory, *, ratio: float = 1.12, validations: int = 3, high: float = 0.3, strong: float = 0.7
) -> Finding | None:
    """In `validations` in a row the training loss after a validation is `ratio` times the validation loss, and high.

    The training loss of the steps until the next validation counts, so that a loss that falls quickly is silent. High:
    above a share `high` of the first losses. Info where the model is known to drop less than a share `strong`
    anywhere: a loss may be smoothed, or summed, in training alone.
    """
    s = signals_of(history)
    known = list(history.validations)[-validations - 1 :]
    if len(known) <= validations or not s.loss_level > high * history.loss_trend.first:
        return None
    ratios = []
    for now, then in pairwise(known):
        between = [loss for e, loss in zip(s.loss_entries, s.losses) if now.step < e.step <= then.step]
        if not between or now.val_loss <= 0.0:
            return None
        ratios.append(median(between) / now.val_loss)
    if min(ratios) <= ratio:
        return None
    shares = history.model.dropout.values()
    is_usual = max(shares) < strong if shares else dropout(history) is False
    return Finding(
        f"The training loss is {min(ratios):.3g} to {max(ratios):.3g} times the validation loss.",
        *ends(known),
        severity="info" if is_usual else "warning",
        evidence={"ratio": min(ratios), "threshold": ratio},
        confidence=0.8,
    )
