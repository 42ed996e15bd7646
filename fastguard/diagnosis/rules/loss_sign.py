"""Rules on losses that fall where there is no floor: of the wrong sign, or with a term that outweighs."""

from __future__ import annotations

import math

from ...history import TrainingHistory
from ..finding import Finding
from ..needs import ZERO_FLOORED, game, takes_turns
from ..registry import rule
from ..signals import exp

TITLE = "Loss"

_REDUCED = ("MeanBackward", "SumBackward", "DivBackward", "MulBackward", "View", "Squeeze", "ToCopy")


@rule(
    "negated-loss",
    reads="the operations from the loss down, and the loss",
    source="our own: what is never below zero, taken with the sign turned, has no floor",
    remedy="Take the minus away, or pass maximize=True to the optimizer and the loss as it is. If it is meant "
    'so, as in an adversary or in unlearning, say objective="game".',
)
def negated_loss(history: TrainingHistory, *, min_steps: int = 20) -> Finding | None:
    """The loss is minus a cross-entropy, a squared or an absolute error, and of `min_steps` losses none is above zero.

    Or it is minus what has a minus of its own. Silent in a game, and where an objective was told that is not to be
    minimised.
    """
    ops = [op for op in history.model.loss_ops if not op.startswith(_REDUCED)]
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
        history.recent[0].step,
        history.recent[-1].step,
        evidence={"operation": ops[1], "first": history.loss_trend.first, "level": history.loss_trend.mean},
        confidence=0.95,
    )


@rule(
    "loss-without-floor",
    reads="the least loss and the largest norm, against where the run began",
    source="our own: the gradients of a likelihood shrink as it is learnt; those of what has no floor grow with it",
    remedy="Look at the sign of each term of the loss: one of them can be made as small as one likes. If it is meant "
    'so, say objective="game" or "reward".',
)
def loss_without_floor(
    history: TrainingHistory, *, times: float = 1e4, norm_ratio: float = 100.0, min_steps: int = 60
) -> Finding | None:
    """The loss is below zero by `times` its first size, and norms have grown `norm_ratio`-fold since the run began.

    From `min_steps` losses on. First size: the largest of the first ten. Norms: the largest against the tenth.
    """
    norms, trend = history.norm_trend, history.loss_trend
    first = max((abs(loss) for loss in trend.firsts), default=0.0)
    if history.losses.count < min_steps or not first > 0.0 or not history.losses.min < -times * first:
        return None
    if history.model.objective in ("game", "reward") or game(history):
        return None
    grown = exp(math.log(history.norm_max) - norms.first) if history.norm_max > 0.0 else 0.0
    if not norms.count or not grown > norm_ratio:
        return None
    return Finding(
        f"The loss has fallen from {trend.first:.4g} to {history.losses.min:.4g}, and gradients have grown to "
        f"{grown:.3g} times their first norm: nothing holds it.",
        history.recent[0].step,
        history.recent[-1].step,
        evidence={"first": trend.first, "least": history.losses.min, "norm_ratio": grown, "threshold_times": times},
        confidence=0.9,
    )
