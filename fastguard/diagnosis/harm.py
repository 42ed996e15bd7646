"""Whether a run has come to harm, whatever may be behind it: what alarms that are often false are held against."""

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
    """Whether something not finite was seen, or losses tell, over more than one look, that all is not well.

    That is: one jumped to eight times where the run began; or both of the newest two blocks of 20 losses lie no lower
    than that (by a tenth of it, or noise), or above the best by a quarter of what was gained; or the newest two
    validation losses by a third of the best. Losses that may rise, of games and rewards, do not tell. None where no
    loss is known.
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
