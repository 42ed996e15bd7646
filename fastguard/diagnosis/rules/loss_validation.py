"""Rules on the loss against the validation loss, and on losses without a lower bound."""

from __future__ import annotations

import math
from itertools import pairwise, takewhile

from ...records import TrainingHistory
from ..finding import Seen
from ..needs import ZERO_FLOORED, clips_ratios, computing, game, policy_operations, reinforces, takes_turns
from ..registry import rule
from ..signals import exp, median, signals_of

TITLE = "Loss"


@rule(
    "overfitting",
    was="overtraining",
    source="SageMaker Debugger Overfit ((val - train) / train > 0.1) and the toolkit's OVERFITTING, against the best "
    "validation so far",
    see="The validation loss has risen from {best:.4g} at step {_step} to {val_loss:.4g}, while the training loss fell "
    "from {_train:.4g} to {train_loss:.4g}.",
    remedy="Go back to the best validation loss. Get more data, or use augmentation, dropout or weight decay.",
    needs_descent=True,
)
def overfitting(history: TrainingHistory, *, ratio: float = 1.2, gap: float = 0.1) -> Seen | None:
    """The newest 5 validation losses are `ratio` times the best and a share `gap` above the training loss, which fell
    since.
    """
    known = [v for v in history.validations if math.isfinite(v.train_loss)]
    place = min(range(len(known)), key=lambda i: known[i].val_loss, default=0)
    if len(known) - 1 - place < 5:
        return None
    best, last = known[place], known[-1]
    least = min(v.val_loss for v in known[-5:])
    is_apart = least > max(ratio * best.val_loss, (1.0 + gap) * last.train_loss)
    if not is_apart or last.train_loss >= best.train_loss:
        return None
    return Seen(
        at=known[place:],
        val_loss=last.val_loss,
        best=best.val_loss,
        train_loss=last.train_loss,
        _step=best.step,
        _train=best.train_loss,
    )


_OF_POLICIES = ("Log", "Exp", "Gather", "Select", "Index", "Minimum")
_REDUCED = ("MeanBackward", "SumBackward", "DivBackward", "MulBackward", "AddBackward", "SubBackward")


def _may_fall_for_ever(history: TrainingHistory) -> bool:
    return history.model.objective in ("game", "reward") or bool(game(history)) or takes_turns(history)


@rule(
    "negated-loss",
    of="loss-without-floor",
    see="The loss is {_what}: it was {first:.4g} in the beginning, and is {level:.4g}.",
    sure=0.95,
    remedy="Remove the minus, or pass maximize=True to the optimizer and the loss as it is. If it is intended, as in "
    'an adversary or in unlearning, say objective="game".',
)
def negated_loss(history: TrainingHistory, *, min_steps: int = 20) -> Seen | None:
    """The loss is minus a cross-entropy, squared or absolute error, or a negative, and none of `min_steps` losses is
    above zero.

    Silent in a game, and if the objective is not minimised.
    """
    ops = [op for op in computing(history.model.loss_ops) if not op.startswith(_REDUCED)][:2]
    is_turned = ops[:1] in (["NegBackward0"], ["RsubBackward1"])  # the latter is a number minus it
    if len(ops) < 2 or not is_turned or not ops[1].startswith(("NegBackward0", *ZERO_FLOORED)):
        return None
    maximises = any(settings.get("maximize") for settings in history.model.optimizer_settings)
    if maximises or _may_fall_for_ever(history) or history.losses.count < min_steps or history.losses.max > 0.0:
        return None
    name = ops[1].removesuffix("Backward0")
    return Seen(
        first=history.loss_trend.first,
        level=history.loss_trend.mean,
        _what="minus a minus" if name == "Neg" else f"minus a term that is never below zero ({name})",
    )


@rule(
    "negated-policy-loss",
    of="loss-without-floor",
    see="The loss is a policy gradient without a minus: it makes chosen actions {_what}.",
    remedy="Minimise minus the log-probability times the return (or advantage), or pass maximize=True.",
)
def negated_policy_loss(history: TrainingHistory, *, min_steps: int = 10) -> Seen | None:
    """A log-probability times a return is not negated, and none of `min_steps` losses is above zero, so that returns
    are positive; or, beside a loss of values, whose sign hides that, nothing else is multiplied. Or the smaller one of
    two clipped ratios (PPO) is minimised; or the mean output of another model, whose own loss is a squared error.
    """
    outer = [*takewhile(lambda op: not op.startswith(_OF_POLICIES), policy_operations(history))]
    is_negated = any(op.startswith(("Neg", "Rsub")) for op in outer)
    maximises = any(settings.get("maximize") for settings in history.model.optimizer_settings)
    if is_negated or maximises or history.losses.count < min_steps:
        return None
    if outer == ["MeanBackward0"] and history.model.foreign_loss_ops == ("MseLossBackward0",):
        return Seen(see="The loss is the value that another model gives, without a minus: actions become worse.")
    has_entropy = {"SubBackward0", "GatherBackward0", "LogBackward0"} <= {*policy_operations(history)}
    if not reinforces(history) and not has_entropy:
        return None
    if clips_ratios(history):
        return None if "MulBackward0" in outer else Seen(_what="less likely the better they are")
    if "AddBackward0" in outer:  # beside a term of the values, whose sign says nothing of this one
        is_plain = outer.count("MulBackward0") == 1
        return Seen(sure=0.6, _what="less likely the better they are") if is_plain else None
    return Seen(_what="less likely, whatever they bring") if history.losses.max <= 0.0 else None


@rule(
    "loss-without-floor",
    severity="critical",
    see="The loss has fallen from {first:.4g} to {least:.4g}, and gradients have grown to {norm_ratio:.3g} times their "
    "first norm: nothing holds it.",
    remedy='Check the sign of each term of the loss, or say objective="game" or "reward".',
)
def loss_without_floor(history: TrainingHistory, *, norm_ratio: float = 100.0, min_steps: int = 60) -> Seen | None:
    """Each sixth of the window fell further than the one before, the last to below zero, and norms grew.

    Fires from `min_steps` losses on: norms 4-fold in one direction, by a median 0.9 of gradients, or `norm_ratio`-fold
    in any. Or a loss was below minus 1e5 times the first, or minus 1e5. Or NaN or Inf came after losses below zero that
    fell to a new least five times running, or below minus ten times the first. Critical if a loss was minus Inf, or
    anything else was not finite.
    """
    norms, trend = history.norm_trend, history.loss_trend
    has_ended = any(e.loss == -math.inf for e in history.recent) if history.num_bad_losses else False
    runs_away = history.losses.count >= min_steps and _runs_away(history, 4.0, norm_ratio, 0.9)
    runs_away = runs_away or history.losses.min < -1e5 * max(abs(trend.first), 1.0) or _falls_into_nan(history)
    if _may_fall_for_ever(history) or not (has_ended or runs_away):
        return None
    grown = exp(math.log(history.norm_max) - norms.first) if history.norm_max > 0.0 and norms.count else 0.0
    return Seen(
        severity="critical" if has_ended or history.num_nonfinite else "warning",
        first=trend.first,
        least=-math.inf if has_ended else history.losses.min,
        norm_ratio=grown,
    )


def _falls_into_nan(history: TrainingHistory) -> bool:
    losses = [loss for loss in signals_of(history).losses if math.isfinite(loss)][-5:]
    if not history.num_nonfinite or len(losses) < 5 or losses[-1] >= 0.0:
        return False
    falls = all(a > b for a, b in pairwise(losses)) and losses[-1] == history.losses.min
    return falls or max(losses) < -10.0 * max(abs(history.loss_trend.first), 1e-3)


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
