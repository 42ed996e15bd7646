"""Rules on losses that fall where there is no floor: of the wrong sign, or with a term that outweighs."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import ZERO_FLOORED, computing, game, takes_turns
from ..registry import rule
from ..signals import exp, median, signals_of

TITLE = "Loss"

_REDUCED = ("MeanBackward", "SumBackward", "DivBackward", "MulBackward")


@rule(
    "negated-loss",
    of="loss-without-floor",
    remedy="Take the minus away, or pass maximize=True to the optimizer and the loss as it is. If it is meant "
    'so, as in an adversary or in unlearning, say objective="game".',
)
def negated_loss(history: TrainingHistory, *, min_steps: int = 20) -> Finding | None:
    """The loss is minus a cross-entropy, a squared or an absolute error, and of `min_steps` losses none is above zero.

    Or it is minus what has a minus of its own. Or it is a mean cross-entropy or squared error times something, always
    below zero, and has doubled: nothing holds it. Silent in a game, and where an objective was told that is not to be
    minimised.
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
    history: TrainingHistory,
    *,
    times: float = 1e4,
    norm_ratio: float = 100.0,
    min_steps: int = 60,
    norms_grow: float = 4.0,
    cosine: float = 0.9,
) -> Finding | None:
    """The loss is below zero by `times` its first size, and norms have grown `norm_ratio`-fold since the run began.

    From `min_steps` losses on. First size: the largest of the first ten. Norms: the largest against the tenth. Or of
    the window's sixths each has fallen further below the one before, the last to below zero, while norms grew
    `norms_grow`-fold and gradients kept their direction: a median `cosine`; or, whatever the direction, `norm_ratio`-
    fold. Critical where a loss was minus Inf, or anything else was not finite.
    """
    if history.model.objective in ("game", "reward") or game(history) or takes_turns(history):
        return None
    has_ended = history.num_bad_losses > 0 and any(e.loss == -math.inf for e in history.recent)
    norms, trend = history.norm_trend, history.loss_trend
    first = max((abs(loss) for loss in trend.firsts), default=0.0)
    grown = exp(math.log(history.norm_max) - norms.first) if history.norm_max > 0.0 and norms.count else 0.0
    is_far = first > 0.0 and history.losses.min < -times * first and grown > norm_ratio
    runs_away = is_far or _runs_away(history, norms_grow, norm_ratio, cosine)
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
