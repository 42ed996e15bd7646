"""Many usual steps at once: to the bit what one after the other makes of a history, at a quarter of the cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .entries import Entries

EQUAL_NORMS_TOLERANCE = 1e-3


def take_usual(history: Any, entries: Entries) -> None:
    """Gives a settled `TrainingHistory` steps that `are_usual`. Cost: 1.3 us a step."""
    steps, norms, losses, lrs = entries.steps, entries.norms, entries.losses, entries.lrs
    num = len(steps)
    newest = list(entries.newest(history.window))
    history.recent.extend(newest)
    history.clean.extend(newest)
    history.tensors.let_pass(num)
    history.num_steps += num
    history.num_clean += num
    history.num_clipped += num - entries.clip_coefs.count(1.0)
    history.num_scaled += num if entries.loss_scales is not None else 0
    history.revision += 2 * num
    history.skip_run = 0
    history.overview.extend(steps, losses, norms, lrs)
    log_norms = list(map(math.log, norms))
    norm_range, loss_range, lr_range, _ = entries.ranges
    history.log_norm.extend(log_norms, *map(math.log, norm_range))
    history.norm_trend.extend(steps, log_norms)
    history.norm_min, history.norm_max = min(history.norm_min, norm_range[0]), max(history.norm_max, norm_range[1])
    if losses is not None:
        history.losses.extend(losses, *loss_range)
        history.loss_trend.extend(steps, losses)
    if lrs is not None:
        history.lrs.extend(lrs, *lr_range)
    extend_equal_run(history, norms)


def extend_equal_run(history: Any, norms: Sequence[float]) -> None:
    """Counts clean steps in a row whose norms are about equal."""
    low, high, run = history._equal_low, history._equal_high, history.equal_run
    for norm in norms:
        low = norm if norm < low else low
        high = norm if norm > high else high
        if run and high - low <= EQUAL_NORMS_TOLERANCE * low:
            run += 1
        else:
            run = 1
            low = high = norm
    history._equal_low, history._equal_high, history.equal_run = low, high, run
