"""A rule on clipping that somebody else did before the guard saw the gradients."""

from __future__ import annotations

from typing import Any

from ...records import Entry, TrainingHistory
from ...records.updates import is_bias
from ..finding import Finding, listed
from ..needs import half_precision
from ..registry import rule
from ..signals import Signals, median, signals_of

TITLE = "Gradients too large"

_CLIPS_TWICE = (
    "Something seems to clip before the guard (a Trainer's max_grad_norm, Lightning's gradient_clip_val, a call of "
    "clip_grad_norm_ or clip_grad_value_): its norm is what is recorded, and all that {} ever sees. Turn it off."
)
_DIGITS = 1e-4  # how near to a round number what float32 was clipped to is; half precision rounds the factor, too
_DIGITS_OF_HALF = 4e-3


@rule(
    "already-clipped",
    severity="info",
    reads="norms of the clean steps in the window; sum and largest element of their gradients, and the tensors that "
    "have it, where those were looked at",
    source="our own: where gradients change and their norm does not, something holds the norm",
    remedy="Something seems to clip before the guard (a Trainer's max_grad_norm, Lightning's gradient_clip_val, a "
    "call of clip_grad_norm_ or clip_grad_value_): its norm is what is recorded. Turn it off, and give the guard "
    "max_norm.",
)
def already_clipped(
    history: TrainingHistory, *, run: int = 10, few: int = 5, share: float = 0.1, samples: int = 4, change: float = 0.01
) -> Finding | None:
    """The norms of the last `run` clean steps or more lie within 1e-3 of one another and of a round number.

    Or, as where a limit is reached now and then, `few` of the window's lie within 1e-5 of the largest, that is a round
    number, and next to none lie just below; in half precision `run`, and a `share` of them, within 2e-2. Or, as where
    each element is clipped, the largest element is the same round number in a quarter of the samples, `samples` at
    least, in several tensors, not all of them biases: that of the last layer may be a constant.

    Round means at most two significant digits, as people choose a clip threshold. The gradients must have changed all
    the same: their sum or their largest element by more than a share `change` of what it can be. A gradient that stays
    as it is keeps its norm by itself. Where no two of them were looked at, norms that differ at all will do.
    """
    said: tuple[str, Entry | None, Entry | None, dict[str, Any]] | None = _at_each_step(history, run, change)
    said = said or _now_and_then(history, few, run, change, share)
    said = said or _each_element(history, samples, change)
    if said is None:
        return None
    summary, first, last, evidence = said
    by = history.model.clip_policy
    return Finding(
        f"{summary}, before the guard's own {by or 'clipping'} saw it.",
        None if first is None else first.step,
        None if last is None else last.step,
        severity="info",
        evidence=evidence,
        recommendation=_CLIPS_TWICE.format(by) if by else "",
        confidence=0.8,
    )


def _is_round(value: float, within: float) -> bool:
    threshold = float(f"{value:.1e}")
    return abs(value - threshold) <= within * threshold


def _at_each_step(history: TrainingHistory, run: int, change: float) -> Any:
    norm = history.equal_norm
    if history.equal_run < run or not norm or not _is_round(norm, 1e-3):
        return None
    entries = list(history.clean)[-history.equal_run :]
    if not _has_changed(history, entries, change):
        return None
    return (
        f"The gradient norm was {float(f'{norm:.1e}'):g} at each of the last {history.equal_run} steps",
        entries[0],
        entries[-1],
        {"norm": norm, "num_steps": history.equal_run, "threshold": run},
    )


def _has_changed(history: TrainingHistory, entries: list[Entry], change: float) -> bool:
    totals = history.totals_since(entries[0].step)
    if len(totals) < 2:
        return any(entry.norm != entries[0].norm for entry in entries)
    sums, largest = [one.sum for one in totals], [one.largest for one in totals]
    moved = max(sums) - min(sums) > change * max(one.bound for one in totals)
    return moved or max(largest) - min(largest) > change * max(largest)


def _now_and_then(history: TrainingHistory, few: int, run: int, change: float, share: float) -> Any:
    s = signals_of(history)
    entries, top = s.clean, max(s.norms, default=0.0)
    if not top:
        return None
    at_top = _held_below(s, top, max(1e-5, 2e-6 / top), few, _DIGITS)  # torch divides by norm + 1e-6
    if not at_top and half_precision(history) is True:
        at_top = _held_below(s, top, 2e-2, max(run, share * len(entries)), _DIGITS_OF_HALF)
    if not at_top or not _has_changed(history, at_top, change):
        return None
    norms = [entry.norm for entry in at_top]
    return (
        f"The gradient norm was {float(f'{median(norms):.1e}'):g} at {len(at_top)} of the last {len(entries)} steps, "
        "and never larger",
        at_top[0],
        at_top[-1],
        {"norm": median(norms), "num_steps": len(at_top), "threshold_few": few},
    )


def _held_below(s: Signals, top: float, width: float, least: float, digits: float) -> list[Entry]:
    """Those within `width` of the largest norm, if it is held: it is round, they are enough, next to none lie below."""
    limit = top * (1.0 - width)
    norms = [norm for norm in s.norms if norm >= limit]
    if len(norms) < least or not _is_round(median(norms), digits):
        return []
    rest = {norm for norm in s.norms if norm < limit}
    below = sum(norm >= top * (1.0 - 3.0 * width) for norm in s.norms) - len(norms)
    differ = 2 * len({*norms}) > len(norms)  # else the same data came again
    is_held = 5 * below <= len(norms) and len(rest) >= 5 and differ
    return [entry for entry in s.clean if entry.norm >= limit] if is_held else []


def _each_element(history: TrainingHistory, samples: int, change: float) -> Any:
    totals = history.totals_since(0)
    top = max([one.largest for one in totals], default=0.0)
    at_top = [one for one in totals if one.largest == top]
    if not top or len(at_top) < max(samples, 0.25 * len(totals)):
        return None
    names = dict.fromkeys(name for one in at_top for name in one.names)
    if len(names) < 2 or all(map(is_bias, names)):
        return None
    sums = [one.sum for one in at_top]
    has_changed = max(sums) - min(sums) > change * max(one.bound for one in at_top)
    if not has_changed or not _is_round(top, _DIGITS_OF_HALF if half_precision(history) is True else _DIGITS):
        return None
    entries = {entry.step: entry for entry in history.clean}
    return (
        f"The largest element of the gradients was {top:.3g} at {len(at_top)} of {len(totals)} steps looked at, in "
        f"{listed([*names])}, and never larger",
        entries.get(at_top[0].step),
        entries.get(at_top[-1].step),
        {"largest": top, "num_samples": len(at_top), "threshold_samples": samples},
    )
