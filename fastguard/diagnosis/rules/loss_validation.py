"""Rules on the loss against the validation loss, and on losses without a lower bound."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import ZERO_FLOORED, computing, dropout, game, takes_turns
from ..registry import rule
from ..signals import ends, exp, median, signals_of

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
    history: TrainingHistory, *, ratio: float = 1.2, share: float = 0.08, gap: float = 0.1, by_heart: float = 0.02
) -> Finding | None:
    """The newest 5 validation losses are all above `ratio` times the best, the training loss fell since.

    Also by more than a `share` of the first validation loss, and by a `gap` above the training loss. Or none of them is
    the best, which is above 0.3 of where the losses began, and the training loss is below `by_heart` of it.
    """
    known = [v for v in history.validations if math.isfinite(v.train_loss)]
    if len(known) <= 5:
        return None
    best = min(range(len(known)), key=lambda i: known[i].val_loss)
    newest = known[-5:]
    if len(known) - 1 - best < 5:
        return None
    least, train = min(v.val_loss for v in newest), known[-1].train_loss
    s = signals_of(history)
    began = s.chance or s.initial_loss
    if known[best].val_loss > 0.3 * began > 0.0 and 0.0 <= train < by_heart * known[best].val_loss:
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


_REDUCED = ("MeanBackward", "SumBackward", "DivBackward", "MulBackward")


@rule(
    "negated-loss",
    of="loss-without-floor",
    remedy="Take the minus away, or pass maximize=True to the optimizer and the loss as it is. If it is meant "
    'so, as in an adversary or in unlearning, say objective="game".',
)
def negated_loss(history: TrainingHistory, *, min_steps: int = 20) -> Finding | None:
    """The loss is minus a cross-entropy, a squared or an absolute error, and of `min_steps` losses none is above zero.

    Or it is minus a negative, or one of these times a number, always below zero, and has doubled. Silent in a game, and
    where the objective is not to be minimised.
    """
    ops = [op for op in computing(history.model.loss_ops) if not op.startswith(_REDUCED)]
    is_floored = ops[:2] == ["NllLossBackward0", "LogSoftmaxBackward0"] or ops[:1] == ["MseLossBackward0"]
    is_doubled = history.losses.count and history.losses.min < 2.0 * history.loss_trend.first < 0.0
    if is_floored and is_doubled and history.model.loss_ops[0] == "MulBackward0":
        ops.insert(0, "NegBackward0")
    if len(ops) < 2 or ops[0] != "NegBackward0" or not ops[1].startswith(("NegBackward0", *ZERO_FLOORED)):
        return None
    if history.model.objective in ("game", "reward") or game(history) or takes_turns(history):
        return None
    if any(settings.get("maximize") for settings in history.model.optimizer_settings):
        return None
    if history.losses.count < min_steps or history.losses.max > 0.0:
        return None
    name = ops[1].removesuffix("Backward0")
    what = "minus a minus" if name == "Neg" else f"minus what is never below zero ({name})"
    return Finding(
        f"The loss is {what}: it was {history.loss_trend.first:.4g} in the beginning, and is "
        f"{history.loss_trend.mean:.4g}.",
        evidence={"operation": ops[1], "first": history.loss_trend.first, "level": history.loss_trend.mean},
        confidence=0.95,
    )


@rule(
    "loss-without-floor",
    severity="critical",
    reads="the least loss, norms against where the run began, how the newest losses fall, and cosines of gradients",
    source="our own: the gradients of a likelihood shrink as it is learnt; those of what has no floor grow with it",
    remedy="Check the sign of each term of the loss: one of them is unbounded below. If that is intended, say "
    'objective="game" or "reward".',
)
def loss_without_floor(
    history: TrainingHistory, *, times: float = 1e4, norm_ratio: float = 100.0, min_steps: int = 60, cosine: float = 0.9
) -> Finding | None:
    """The loss is below zero by `times` its first size, and norms have grown `norm_ratio`-fold since the run began.

    From `min_steps` losses on. Or each sixth of the window has fallen further than the one before, the last to below
    zero, while norms grew 4-fold in one direction, by a median `cosine` of gradients, or `norm_ratio`-fold in any.
    Critical where a loss was minus Inf, or anything else was not finite.
    """
    if history.model.objective in ("game", "reward") or game(history) or takes_turns(history):
        return None
    has_ended = history.num_bad_losses > 0 and any(e.loss == -math.inf for e in history.recent)
    norms, trend = history.norm_trend, history.loss_trend
    first = max((abs(loss) for loss in trend.firsts), default=0.0)
    grown = exp(math.log(history.norm_max) - norms.first) if history.norm_max > 0.0 and norms.count else 0.0
    is_far = first > 0.0 and history.losses.min < -times * first and grown > norm_ratio
    runs_away = is_far or _runs_away(history, 4.0, norm_ratio, cosine)
    if not has_ended and (history.losses.count < min_steps or not runs_away):
        return None
    least = -math.inf if has_ended else history.losses.min
    return Finding(
        f"The loss has fallen from {trend.first:.4g} to {least:.4g}, and gradients have grown to "
        f"{grown:.3g} times their first norm: nothing holds it.",
        severity="critical" if has_ended or history.num_nonfinite else "warning",
        evidence={"first": trend.first, "least": least, "norm_ratio": grown, "threshold_times": times},
        confidence=0.9,
    )


def _runs_away(history: TrainingHistory, norms_grow: float, norm_ratio: float, cosine: float) -> bool:
    s = signals_of(history)
    part = len(s.losses) // 6
    if part < 10 or not s.losses[-1] < 0.0:
        return False
    levels = [median(s.losses[i * part : (i + 1) * part]) for i in range(6)]
    falls = [a - b for a, b in pairwise(levels)]
    turns = [found.cosine for found in history.grad_cosines][-8:]
    before, now = median(s.norms[:part]), median(s.norms[-part:])
    is_growing = now > norm_ratio * before > 0.0 or (now > norms_grow * before and median(turns) > cosine)
    return is_growing and falls[0] > 0.0 and all(a < b for a, b in pairwise(falls))
