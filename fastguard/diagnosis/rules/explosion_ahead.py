"""Rules on a slow divergence while most of the progress is still there, and on clipping before the guard."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ...records import Entry, TrainingHistory
from ..finding import Seen
from ..needs import may_rise
from ..registry import rule
from ..signals import BLOCK, is_stuck, median, noise, signals_of

TITLE = "Gradients too large"

_norm_of = operator.attrgetter("norm")
_NUM_STEPS = 240  # that are looked at: it is asked often
_LEAST = 0.02  # of the first loss: what is below it is nothing
_OVER = 3.0  # times the first loss: it has exploded, and nothing is ahead any more


@rule(
    "divergence-ahead",
    of="loss-divergence",
    see="The loss has turned: from {best:.4g} around step {_began} to {level:.4g}, while the gradient norm has become "
    "{norm_ratio:.3g} times what it was then{_rate}.",
    remedy="Lower the learning rate now, by half to a tenth, and keep the checkpoint from before the turn.",
    needs_descent=True,
)
def divergence_ahead(history: TrainingHistory, *, ratio: float = 1.1, norm_ratio: float = 1.5) -> Seen | None:
    """The median loss of the newest 20 steps is `ratio` times that of the best 20, the median norm `norm_ratio` times,
    and the loss still rises.

    The rise must exceed 0.2 of the gain and 5 times the uncertainty of the medians. At a learning rate 1.05 times the
    highest up to the best, 1.05 and a norm that has not fallen are enough. Fires from 60 losses on. Silent above three
    times the first loss, if the loss may rise by design, or if it recovers from a jump to other data.
    """
    if history.loss_trend.count < 60:
        return None
    s, first = signals_of(history), history.loss_trend.first
    near = s.newest_loss_entries(2 * BLOCK)
    if len(near) == 2 * BLOCK and _comes_down(near):
        return None  # most times that it is asked
    entries = [e for e in s.newest_loss_entries(_NUM_STEPS) if e.norm > 0.0]
    if len(entries) < 60 or not first > 0.0:
        return None
    start = len(entries) % BLOCK
    blocks = [entries[i : i + BLOCK] for i in range(start, len(entries), BLOCK)]
    levels = [_middle([e.loss or 0.0 for e in block]) for block in blocks]
    best = min(range(len(levels)), key=levels.__getitem__)
    now, low = levels[-1], levels[best]
    if best == len(levels) - 1 or now < levels[-2] or not first > low or now > _OVER * first:
        return None
    grown = max(now, _LEAST * first) / max(low, _LEAST * first)
    is_new, lr = _is_new_rate(history, entries, start + BLOCK * (best + 1))
    if grown <= (1.05 if is_new else ratio):
        return None
    of_best, of_now = ([e.loss or 0.0 for e in block] for block in (blocks[best], blocks[-1]))
    # Noise may go with the level, and the best of many blocks is one of little noise; a slope is none.
    noises = 1.48 * median([abs(loss - low) for loss in of_best]), noise(of_now)
    spread = max(noises) * math.sqrt(2.0 * 1.57 / BLOCK)  # of two medians
    norms = _middle([e.norm for e in blocks[-1]]) / _middle([e.norm for e in blocks[best]])
    is_clear = norms > norm_ratio and now - low > max(0.2 * (first - low), 5.0 * spread)
    is_at_rate = is_new and norms >= 1.0 and now - low > spread
    if not is_at_rate and (not is_clear or grown <= ratio):
        return None
    if may_rise(history) or s.recovers_from_shift:  # last, for it costs most
        return None
    return Seen(
        at=(blocks[best][-1], entries[-1]),
        norm_ratio=norms,
        is_at_new_rate=is_new,
        level=now,
        best=low,
        _began=blocks[best][0].step,
        _rate=f", and the learning rate, now {lr:.3g}, has never been so high before" if is_new else "",
    )


def _comes_down(near: list[Entry]) -> bool:
    """Whether the newest block of losses is below the one before it, where each step of the two has a gradient."""
    if not min(map(_norm_of, near)) > 0.0:
        return False
    before, now = (_middle([e.loss or 0.0 for e in part]) for part in (near[:BLOCK], near[BLOCK:]))
    return now < before


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _is_new_rate(history: TrainingHistory, entries: list[Entry], end: int) -> tuple[bool, float]:
    """Whether the rate is 1.05 times the highest one up to the entry `end`, and in the run before them; and it."""
    lr = entries[-1].lr
    known = [e.lr for e in entries[:end] if e.lr is not None]
    if lr is None or not known or lr <= 1.05 * max(known):
        return False, lr or 0.0
    before = [b.lr.max for b in history.overview.buckets if b.lr.num and b.last_step < entries[0].step]
    return lr > 1.05 * max(before, default=0.0), lr


_CLIPS_TWICE = (
    "Turn off what clips before the guard (a Trainer's max_grad_norm, Lightning's gradient_clip_val, a call of "
    "clip_grad_norm_ or clip_grad_value_){}"
)
_Held = tuple[Sequence[Entry], float, str] | None  # steps whose norm was held, that norm, and a sentence


@rule(
    "already-clipped",
    see="{_what}, before the guard's own {_by} saw it.",
    remedy=_CLIPS_TWICE.format(", and give the guard max_norm."),
)
def already_clipped(history: TrainingHistory, *, run: int = 10, few: int = 5) -> Seen | None:
    """The norms of the last `run` clean steps or more are within 1e-3 of one another and of a round number.

    Or, as where a limit is reached now and then, `few` of the window's are within 1e-5 of the largest, which is a round
    number, with next to none just below. A round number has at most two significant digits. The gradients must have
    changed all the same: their sum or their largest element by more than a share 0.01.

    A warning if the norm is at most 1e-5; at most 1e-3, if 80 losses gained less than a share 0.1 of the first. Else
    info.
    """
    found = _at_each_step(history, run) or _now_and_then(history, few)
    if found is None:
        return None
    entries, norm, what = found
    by = history.model.clip_policy
    do = _CLIPS_TWICE.format(f": {by} sees only clipped norms.") if by else ""
    is_nothing = norm <= 1e-5 or (norm <= 1e-3 and is_stuck(history, 0.1, 80))
    return Seen(at=entries, do=do, warn=is_nothing, norm=norm, num_steps=len(entries), _what=what, _by=by or "clipping")


def _is_round(value: float, within: float) -> bool:
    rounded = float(f"{value:.1e}")
    return abs(value - rounded) <= within * rounded


def _at_each_step(history: TrainingHistory, run: int) -> _Held:
    norm, num = history.equal_norm, history.equal_run
    entries = list(history.clean)[-num:]
    if num < run or not norm or not _is_round(norm, 1e-3) or not _has_changed(history, entries):
        return None
    return entries, norm, f"The gradient norm was {float(f'{norm:.1e}'):g} at each of the last {num} steps"


def _now_and_then(history: TrainingHistory, few: int) -> _Held:
    """The steps at the largest norm, if it is held: it is round, they are enough, and next to none lie below."""
    s = signals_of(history)
    top = max(s.norms, default=0.0)
    width = max(1e-5, 2e-6 / top) if top else 0.0  # torch divides by norm + 1e-6
    at_top = [entry for entry in s.clean if entry.norm >= top * (1.0 - width)]
    held = [entry.norm for entry in at_top]
    num_below = sum(norm >= top * (1.0 - 3.0 * width) for norm in s.norms) - len(held)
    differ = 2 * len({*held}) > len(held) and len({*s.norms} - {*held}) >= 5  # else the same data came again
    if not top or len(held) < few or 5 * num_below > len(held) or not differ or not _is_round(median(held), 1e-4):
        return None
    if not _has_changed(history, at_top):
        return None
    limit = float(f"{median(held):.1e}")
    what = f"The gradient norm was {limit:g} at {len(held)} of the last {len(s.norms)} steps, and never larger"
    return at_top, median(held), what


def _has_changed(history: TrainingHistory, entries: list[Entry]) -> bool:
    """Whether gradients did; where no two of them were looked at, norms that differ are enough."""
    totals = history.totals_since(entries[0].step)
    if len(totals) < 2:
        return any(entry.norm != entries[0].norm for entry in entries)
    largest, sums = [one.largest for one in totals], [one.sum for one in totals]
    has_moved = max(sums) - min(sums) > 0.01 * max(one.bound for one in totals)
    return has_moved or max(largest) - min(largest) > 0.01 * max(largest)
