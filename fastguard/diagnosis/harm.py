"""Whether a run has come to harm, whatever the cause: rules that are often wrong warn only then."""

from __future__ import annotations

import math

from ..records import TrainingHistory
from . import needs
from .signals import signals_of

_LEAST_FALL = 0.1  # of the first loss
_LOST = 0.25  # of what was gained
_JUMP = 8.0  # times the first losses
_WORSE = 1.0 / 3.0  # of the best validation loss


def is_harmed(history: TrainingHistory) -> bool | None:
    """Whether something was not finite, or losses show that the run does badly.

    One loss jumped to eight times the first; or both of the newest two blocks of 20 losses are no lower than the first
    (by a tenth of it, or noise), or a quarter of the gain above the best; or the newest two validation losses are a
    third above the best. Losses of games and rewards do not count. None if no loss is known.
    """
    if history.num_nonfinite or history.first_bad_loss_step >= 0:
        return True
    if not history.losses.count and not history.validations:
        return None
    return _is_loss_bad(history) or _is_validation_worse(history)


def _is_loss_bad(history: TrainingHistory) -> bool:
    s, trend = signals_of(history), history.loss_trend
    first, levels = s.initial_loss, s.loss_levels
    if math.isnan(first) or needs.descent(history) is False or needs.may_rise(history):
        return False
    if any(spike.value > _JUMP * first > 0.0 for spike in trend.spikes):
        return True
    spread = 0.0 if math.isnan(s.loss_noise) else s.loss_noise
    if len(levels) > 2:
        now = min(levels[-2:])
    elif history.has_ended and trend.count >= 20:
        now = trend.mean
    else:
        return False
    has_not_fallen = now >= first - max(_LEAST_FALL * abs(first), spread)
    return has_not_fallen or now > trend.best + max(_LOST * (first - trend.best), spread)


def _is_validation_worse(history: TrainingHistory) -> bool:
    losses = [v.val_loss for v in history.validations if math.isfinite(v.val_loss)]
    if len(losses) < 3:
        return False
    best = min(losses)
    return min(losses[-2:]) > best + max(_WORSE * abs(best), 0.02 * abs(losses[0] - best))
