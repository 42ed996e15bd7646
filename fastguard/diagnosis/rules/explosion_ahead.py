"""A rule that sees a slow divergence coming, while most of what was learnt is still there."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ...records import Entry, TrainingHistory
from ..finding import Finding
from ..needs import may_rise
from ..registry import rule
from ..signals import BLOCK, median, noise, signals_of

TITLE = "Gradients too large"

_norm_of = operator.attrgetter("norm")
_NUM_STEPS = 240  # that are looked at: it is asked often
_LEAST = 0.02  # of the first loss: what is below it is nothing
_OVER = 3.0  # times the first loss: it has exploded, and nothing is ahead any more


@rule(
    "divergence-ahead",
    of="loss-divergence",
    remedy="The loss has turned, and gradients grow with it. Lower the learning rate now (by half to a tenth), end the "
    "warm-up where it is, and clip at the usual norm; look for weights or inputs that grow. Keep the checkpoint from "
    "before the turn.",
    needs_descent=True,
)
def divergence_ahead(
    history: TrainingHistory,
    *,
    ratio: float = 1.1,
    norm_ratio: float = 1.5,
    share: float = 0.2,
    z: float = 5.0,
    rate_ratio: float = 1.05,
    ratio_at_new_rate: float = 1.05,
    z_at_new_rate: float = 1.0,
    min_steps: int = 60,
) -> Finding | None:
    """The median loss of the newest 20 steps is `ratio` times that of the best 20, the median norm `norm_ratio` times
    theirs, and the loss still rises.

    By more than a share `share` of what was gained, and `z` times the uncertainty of the medians. At a learning rate
    `rate_ratio` times the highest one up to the best, `ratio_at_new_rate` and `z_at_new_rate` will do, and a norm that
    has not fallen. From `min_steps` losses on; losses below a fiftieth of the first count as that. Silent above three
    times the first, where it has come; where a term of the loss is to grow, or targets with what is learnt; and where
    other data are being learnt: the loss jumped within one step, and has been coming down since.
    """
    if history.loss_trend.count < min_steps:
        return None
    s, first = signals_of(history), history.loss_trend.first
    near = s.newest_loss_entries(2 * BLOCK)
    if len(near) == 2 * BLOCK and _comes_down(near):
        return None  # most times that it is asked
    entries = [e for e in s.newest_loss_entries(_NUM_STEPS) if e.norm > 0.0]
    if len(entries) < min_steps or not first > 0.0:
        return None
    start = len(entries) % BLOCK
    blocks = [entries[i : i + BLOCK] for i in range(start, len(entries), BLOCK)]
    levels = [_middle([e.loss or 0.0 for e in block]) for block in blocks]
    best = min(range(len(levels)), key=levels.__getitem__)
    now, low = levels[-1], levels[best]
    if best == len(levels) - 1 or now < levels[-2] or not first > low or now > _OVER * first:
        return None
    grown = max(now, _LEAST * first) / max(low, _LEAST * first)
    if may_rise(history) or s.is_learnt_anew:
        return None
    is_new, lr = _is_new_rate(history, entries, start + BLOCK * (best + 1), rate_ratio)
    if grown <= (ratio_at_new_rate if is_new else ratio):
        return None
    of_best, of_now = ([e.loss or 0.0 for e in block] for block in (blocks[best], blocks[-1]))
    # Noise may go with the level, and the best of many blocks is one of little noise; a slope is none.
    noises = 1.48 * median([abs(loss - low) for loss in of_best]), noise(of_now)
    spread = max(noises) * math.sqrt(2.0 * 1.57 / BLOCK)  # of two medians
    norms = _middle([e.norm for e in blocks[-1]]) / _middle([e.norm for e in blocks[best]])
    is_clear = norms > norm_ratio and now - low > max(share * (first - low), z * spread)
    is_at_rate = is_new and norms >= 1.0 and now - low > z_at_new_rate * spread
    if not is_at_rate and (not is_clear or grown <= ratio):
        return None
    evidence = {"loss_ratio": grown, "norm_ratio": norms, "is_at_new_rate": is_new}
    return Finding(
        f"The loss has turned: from {low:.4g} around step {blocks[best][0].step} to {now:.4g}, while the gradient norm "
        f"has become {norms:.3g} times what it was then"
        + (f", and the learning rate, now {lr:.3g}, was never so high before." if is_new else ".")
        + _forecast(levels, low),
        blocks[best][-1].step,
        entries[-1].step,
        evidence={**evidence, "level": now, "best": low, "threshold_ratio": ratio_at_new_rate if is_new else ratio},
        confidence=0.85 if norms > 2.0 * norm_ratio else 0.75,
    )


def _comes_down(near: list[Entry]) -> bool:
    """Whether the newest block of losses is below the one before it, where each step of the two has a gradient."""
    if not min(map(_norm_of, near)) > 0.0:
        return False
    before, now = (_middle([e.loss or 0.0 for e in part]) for part in (near[:BLOCK], near[BLOCK:]))
    return now < before


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _is_new_rate(history: TrainingHistory, entries: list[Entry], end: int, ratio: float) -> tuple[bool, float]:
    """Whether the rate is `ratio` times the highest one up to the entry `end`, and in the run before them; and it."""
    lr = entries[-1].lr
    known = [e.lr for e in entries[:end] if e.lr is not None]
    if lr is None or not known or lr <= ratio * max(known):
        return False, lr or 0.0
    before = [b.lr.max for b in history.overview.buckets if b.lr.num and b.last_step < entries[0].step]
    return lr > ratio * max(before, default=0.0), lr


def _forecast(levels: list[float], low: float) -> str:
    """When the loss is three times its best, if it goes on as in the newest two blocks."""
    before, now = levels[-2:]
    if not 0.0 < before < now < 3.0 * low:
        return ""
    steps = BLOCK * math.log(3.0 * low / now) / math.log(now / before)
    return f" At this pace it is three times its best in about {steps:.0f} steps." if steps < 500 else ""
