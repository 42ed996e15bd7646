"""Rules on the learning rate and the size of steps."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import TrainingHistory
from ..finding import Seen
from ..harm import is_harmed
from ..needs import descent, is_of_numbers, may_rise
from ..registry import rule
from ..signals import has_had_time, jumps, median, noise, signals_of

TITLE = "Learning rate"


@rule(
    "learning-rate-jump",
    see="The learning rate jumped from {before:.3g} to {lr:.3g} at step {_step}; it had never been above "
    "{largest_before:.3g}.",
    sure=0.95,
    remedy="Look for what multiplied the learning rate in the middle of the run: a scheduler resumed without its "
    "state, one that is stepped twice, or code that sets param_groups. Go back to a checkpoint from before.",
    needs_harm=True,
)
def learning_rate_jump(history: TrainingHistory, *, ratio: float = 5.0, min_steps: int = 20) -> Seen | None:
    """The learning rate became `ratio` times the largest ever in one step, after `min_steps` clean steps.

    Silent up to the scheduler's own initial value, which a warm-up by the epoch reaches in leaps.
    """
    entries = [e for e in signals_of(history).clean if e.lr is not None]
    if history.num_clean <= min_steps or history.lrs.max < ratio * history.lrs.min or len(entries) < 2:
        return None
    before = [b.lr.max for b in history.overview.buckets if b.lr.num and b.last_step < entries[0].step]
    largest, full = max(before, default=0.0), history.model.initial_lr or 0.0
    first = history.num_clean - len(entries)
    for i, (previous, entry) in enumerate(pairwise(entries), first + 1):
        largest, now = max(largest, previous.lr or 0.0), entry.lr or 0.0
        if now >= ratio * largest > 0.0 and now > 1.01 * full and i >= min_steps:
            return Seen(at=(entry, entries[-1]), lr=now, before=previous.lr, largest_before=largest, _step=entry.step)
    return None


@rule(
    "no-warm-up",
    source="our own; warm-up over the first 5 to 10% of the steps is the common remedy (Goyal et al. 2017)",
    see="The run began at its full learning rate of {lr:.3g}, and the loss rose from {first:.4g} to {largest:.4g} in "
    "its first {_num} losses.",
    remedy="Warm the learning rate up over the first hundred steps or 5% of the run, whichever is more.",
    needs_descent=True,
    needs_harm=True,
)
def no_warm_up(history: TrainingHistory, *, rise: float = 1.3, run: int = 5, within: int = 60) -> Seen | None:
    """The run began at its full learning rate, and its loss rose above `rise` times its first for `run` steps in a row.

    The first `within` steps count; the rise must exceed twice the noise. Info before twice as many losses, or `within`
    if the run has ended; if the loss is below its first, may rise by design, or is below a tenth of the chance level.
    Silent if the loss jumped to other data.
    """
    s = signals_of(history)
    losses, lrs = s.losses[:within], s.lrs
    if history.num_clean > history.window or len(losses) < run + 3 or not lrs or lrs[0] < 0.8 * history.lrs.max:
        return None
    first, usual = losses[0], noise(losses)
    limit = max(rise * first, 0.0 if math.isnan(usual) else first + 2.0 * usual)
    high = [loss > limit for loss in losses]
    start = next((i for i in range(len(high) - run + 1) if all(high[i : i + run])), None)
    if first <= 0.0 or start is None or jumps(s.loss_entries[:within]):
        return None
    is_harmless = s.loss_level < first or may_rise(history) or max(losses) < 0.1 * s.chance
    return Seen(
        at=(s.loss_entries[start], s.loss_entries[start + run - 1]),
        warn=not is_harmless and len(losses) == within and has_had_time(history, 2 * within),
        first=first,
        largest=max(losses),
        lr=lrs[0],
        _num=len(losses),
    )


@rule(
    "scheduler-not-stepping",
    of="learning-rate-schedule",
    see="A scheduler was made, but the learning rate has been {lr:.3g} at each of {num_steps} steps{_initial}.",
    remedy="Call scheduler.step() after each optimizer.step(), or after each epoch if it counts epochs.",
    cause=("scheduler-not-stepped", "The scheduler is never stepped, so the learning rate stays at its first value."),
    weight=0.98,
    explains="update-ratio-low standstill",
)
def scheduler_not_stepping(history: TrainingHistory, *, steps: int = 50, steps_at_full: int = 1000) -> Seen | None:
    """A scheduler exists, but the learning rate has been the same for all of `steps` clean steps or more.

    Info, after `steps_at_full` steps and two epochs, if it is the scheduler's own initial value, as before a decay.
    """
    notes, lrs = history.model, history.lrs
    at_full = notes.initial_lr is None or math.isclose(lrs.max, notes.initial_lr, rel_tol=1e-6)
    need = max(steps_at_full, 2 * (notes.steps_per_epoch or 0)) if at_full else steps
    if not notes.has_scheduler or lrs.count < need or lrs.min != lrs.max:
        return None
    share = lrs.max / (notes.initial_lr or 1.0)
    return Seen(
        at=history.clean,
        warn=not at_full,
        lr=lrs.max,
        num_steps=lrs.count,
        _initial="" if at_full else f", {share:.2g} of the rate that the optimizer was made with",
    )


# Optimizers whose first steps move an element by about the learning rate, whatever the gradient.
_NORMALISING = frozenset(["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "SparseAdam", "Adagrad", "Lion",
                          "SignSGD"])  # fmt: skip
_LEAST_STD, _LEAST_SHARE = 1e-3, 0.2  # of the spread that the fan-in asks for


def estimated_update_ratio(history: TrainingHistory, *, at_first: bool = False, lr: float = 0.0) -> float | None:
    """Estimates by what share a step changes the median weight matrix: lately, `at_first`, or at `lr`.

    None if unknown. Initial weights stand for the weights; matrices below a fifth of the usual spread count only if all
    are, as a fifth. Optimizers that divide by the gradient's size move an element by the learning rate (Adagrad by ever
    less), SGD by that times the gradient over one minus the momentum.
    """
    s, notes = signals_of(history), history.model
    kinds = {str(settings.get("kind", "")) for settings in notes.optimizer_settings}
    if len(kinds) != 1 or not s.lrs:
        return None
    lr = lr or (s.lrs[0] if at_first else max(s.lrs[-64:]))
    began = {name: pair for name, pair in notes.initialization.items() if pair[0] > _LEAST_STD}
    spreads = {name: std for name, (std, usual) in began.items() if std > _LEAST_SHARE * usual}
    spreads = spreads or {name: _LEAST_SHARE * usual for name, (_, usual) in began.items()}
    if kinds <= _NORMALISING:
        slowed = math.sqrt(max(history.num_clean, 1)) if kinds == {"Adagrad"} else 1.0
        ratios = [lr / slowed / std for std in spreads.values()]
    elif kinds == {"SGD"}:
        coefficient = median([entry.clip_coef for entry in s.clean[-64:]]) if s.clean else 1.0
        momentum = max((float(group.get("momentum") or 0.0) for group in notes.optimizer_settings), default=0.0)
        gain = lr * coefficient / max(1.0 - momentum, 1e-3)
        tracks = {name: history.tensors[name] for name in spreads if name in history.tensors}
        sizes = {name: track.first_log_rms if at_first else track.log_rms for name, track in tracks.items()}
        known = {name: log_rms for name, log_rms in sizes.items() if not math.isnan(log_rms)}
        ratios = [gain * math.exp(min(log_rms, 300.0)) / spreads[name] for name, log_rms in known.items()]
    else:
        return None
    return median(ratios) if ratios else None


@rule(
    "steps-too-large",
    of="update-ratio-high",
    see="At a rate of {_lr:.3g} a step changes the median weight by about {update_ratio:.2g} of its first size.",
    remedy="Divide the learning rate by 10 to 100; fastguard.LearningRateFinder finds one.",
)
def steps_too_large(history: TrainingHistory, *, ratio: float = 0.3, whole: float = 0.7) -> Seen | None:
    """A step changes the median weight by an estimated share `ratio` or more, and 80 losses gained less than 0.1 of the
    first.

    Or by a share `whole` or more, whatever the loss does, in a model of several layers: no working program was seen to
    do that. With less than 80 losses, this waits for the end of the run.
    """
    s, lr = signals_of(history), history.lrs.max  # a schedule may have begun there
    value = estimated_update_ratio(history, lr=lr) or 0.0
    if not has_had_time(history, 80):
        return None
    if value < whole or len(history.model.initialization) < 2:
        value, lr = estimated_update_ratio(history) or 0.0, max(s.lrs[-64:], default=0.0)
        if value < ratio or descent(history) is False or len(s.losses) < 80 or s.progress >= 0.1:
            return None
    return Seen(at=history.clean, sure=0.9 if value > 3 * ratio else 0.75, update_ratio=value, _lr=lr)


@rule(
    "steps-too-small",
    of="update-ratio-low",
    see="A step changes the median weight by an estimated {update_ratio:.2g} of its first size, {_moved:.2g} over the "
    "{_num} steps of the run if all went one way.",
    remedy="Raise the learning rate by 10 to 100 times, or look for what holds it down: schedule, clipping, scaling.",
    needs_descent=True,
)
def steps_too_small(history: TrainingHistory, *, ratio: float = 5e-4, progress: float = 0.1) -> Seen | None:
    """A step changes the median weight by an estimated share below `ratio`, and little was learnt.

    Little: 40 losses at half of the largest learning rate gained less than a share `progress` of the first, or the
    weights moved by less than 0.05 of themselves in all. Fires from 100 losses on, and at the end; from 200 on, and at
    the end or from 1000 on below twice `ratio`, if the loss falls steadily with half of it left.
    """
    value, s = estimated_update_ratio(history), signals_of(history)
    if value is None or value >= 2.0 * ratio or s.num_full_lr < 40 or (s.is_lr_rising and not history.has_ended):
        return None
    moved = value * history.num_clean
    is_slow = value < ratio and (s.progress < progress or (moved < 0.05 and s.progress < 0.5))
    is_late = history.losses.count >= (200 if value < ratio or history.has_ended else 1000)
    is_slow = is_slow or (s.progress < 0.5 and is_late and s.falls_steadily)
    if history.loss_trend.count < 40 or not is_slow or not has_had_time(history, 100):
        return None
    return Seen(
        at=history.clean,
        update_ratio=value,
        _moved=moved,
        _num=history.num_clean,
    )


_USUAL = {  # from the least to the largest learning rate that people use
    "SGD": (1e-5, 3.0),
    "Adadelta": (0.03, 30.0),
    "Adagrad": (1e-4, 1.0),
    "Lion": (1e-7, 3e-3),
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "SparseAdam"), (1e-6, 0.05)),
}


@rule(
    "learning-rate-unusual",
    was="learning-rate-out-of-bounds",
    see="{_kind} runs with a learning rate of {lr:.3g}, outside of the usual {_low:g} to {_high:g}.",
    remedy="Begin with a usual rate: Adam 1e-5 to 1e-2, SGD 1e-3 to 1, Adadelta about 1, Adagrad 1e-2.",
    needs_harm=True,
)
def learning_rate_unusual(history: TrainingHistory, *, low: float = 0.0, high: float = 0.0) -> Seen | None:
    """The largest learning rate so far is outside the usual range of this kind of optimizer.

    Or outside of `low` to `high`, where those are not 0. From 80 steps on, once it no longer rises. Info; a warning if
    the losses gained less than a share 0.1 of the first, or if half of the loss is left after 200 while it falls
    steadily at a low rate, while a high rate changes the median weight by a third a step, or, where that is not known,
    while the rate is 4 times the largest usual one. Whatever the loss does, a warning for a rate 4 times the largest
    usual one, and larger than the targets, that changes the median weight by a third a step; for one 4 times the
    largest usual in a run that has come to harm; and for a high rate in a run that was NaN before 80 steps. Mixed and
    unknown optimizers have no usual range.
    """
    kinds = {str(settings.get("kind", "")) for settings in history.model.optimizer_settings}
    kind = kinds.pop() if len(kinds) == 1 else ""
    s, largest, usual = signals_of(history), history.lrs.max, _USUAL.get(kind, (0.0, math.inf))
    low, high = low or usual[0], high or usual[1]
    is_over = largest > high and history.num_nonfinite_applied > 0 and 0 < history.num_clean < 80
    if (history.lrs.count < 80 and not is_over) or s.is_lr_rising or low <= largest <= high:
        return None
    is_slow = history.losses.count >= 80 and not s.fall >= 0.1
    size = estimated_update_ratio(history)
    is_large = largest > high and (size or 0.0) > 0.3
    is_late = history.losses.count >= 200 and s.progress < 0.5
    is_long = largest < low and is_late and s.falls_steadily
    is_slow = is_slow or is_long or (is_late and (is_large or (size is None and largest > 4.0 * high)))
    is_harmful = largest > 4.0 * high and is_harmed(history) is True
    # Targets that are numbers say how far the weights have to go.
    targets = history.model.target_mean or 0.0, history.model.target_std or 0.0
    is_far = is_large and largest > 4.0 * high * max(1.0, math.hypot(*targets) if is_of_numbers(history) else 0.0)
    return Seen(
        warn=(is_slow and descent(history) is not False) or is_far or is_over or is_harmful,
        lr=largest,
        is_high=largest > high,
        _low=low,
        _high=high,
        is_certain=is_long or (is_far and kind in _NORMALISING),
        _kind=kind or "The optimizer",
    )
