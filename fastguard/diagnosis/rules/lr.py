"""Rules on the learning rate and the size of steps."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import TrainingHistory
from .. import needs
from ..finding import Finding
from ..needs import descent, is_of_numbers, may_rise
from ..registry import rule
from ..signals import ends, has_had_time, jumps, median, noise, signals_of

TITLE = "Learning rate"


@rule(
    "learning-rate-jump",
    reads="learning rates of the window, and the whole run's before it",
    source="our own: warm-ups climb, and restarts return to where they were",
    remedy="Something multiplied the learning rate in the middle of the run: a scheduler resumed without its state, "
    "one that is stepped twice, or code that sets param_groups. Go back to a checkpoint from before.",
    needs_harm=True,
)
def learning_rate_jump(history: TrainingHistory, *, ratio: float = 5.0, min_steps: int = 20) -> Finding | None:
    """The learning rate became `ratio` times the largest ever in one step, after `min_steps` clean steps.

    Not where it rose no higher than the scheduler's own initial value, which a warm-up by the epoch reaches in leaps.
    """
    if history.num_clean <= min_steps or history.lrs.max < ratio * history.lrs.min:
        return None
    s = signals_of(history)
    entries = [e for e in s.clean if e.lr is not None]
    if len(entries) < 2:
        return None
    before = [b.lr.max for b in history.overview.buckets if b.lr.num and b.last_step < entries[0].step]
    largest = max(before, default=0.0)
    full = history.model.initial_lr or 0.0
    offset = history.num_clean - len(entries)
    for i, (previous, entry) in enumerate(pairwise(entries), 1):
        largest = max(largest, previous.lr or 0.0)
        now = entry.lr or 0.0
        if now >= ratio * largest > 0.0 and now > 1.01 * full and offset + i >= min_steps:
            return Finding(
                f"The learning rate jumped from {previous.lr:.3g} to {now:.3g} at step {entry.step}; it had never been "
                f"above {largest:.3g}.",
                entry.step,
                entries[-1].step,
                evidence={"lr": now, "before": previous.lr, "largest_before": largest, "threshold_ratio": ratio},
                confidence=0.95,
            )
    return None


@rule(
    "learning-rate-out-of-bounds",
    of="learning-rate-unusual",
    source="the toolkit's bounds [1e-8, 1e-2], the upper one wider: SGD is used with 0.1 and more",
    remedy="Is the learning rate what you meant? Adam wants 1e-5 to 1e-2, SGD 1e-3 to 1.",
    needs_harm=True,
)
def learning_rate_out_of_bounds(
    history: TrainingHistory, *, low: float = 1e-8, high: float = 10.0, min_steps: int = 20, progress: float = 0.1
) -> Finding | None:
    """The learning rate is above `high`, or was never above `low` in at least `min_steps` clean steps.

    Info where a share `progress` of the first loss has been gained: it then suits the loss's scale.
    """
    lrs = history.lrs
    if lrs.count < min_steps or (lrs.max <= high and lrs.max >= low):
        return None
    return Finding(
        f"The largest learning rate so far is {lrs.max:.3g}; usual ones are between {low:g} and {high:g}.",
        *ends(history.clean),
        severity="info" if signals_of(history).fall >= progress else "warning",
        evidence={"largest": lrs.max, "threshold_low": low, "threshold_high": high},
        confidence=0.9,
    )


@rule(
    "no-warm-up",
    reads="the first learning rates, losses and norms of the run",
    source="our own; warm-up over the first 5 to 10 % of the steps is the common remedy (Goyal et al. 2017)",
    remedy="Warm the learning rate up over the first hundred steps or 5 % of the run, whichever is more.",
    needs_descent=True,
    needs_harm=True,
)
def no_warm_up(history: TrainingHistory, *, rise: float = 1.3, run: int = 5, within: int = 60) -> Finding | None:
    """The run began at its full learning rate, and its loss rose above `rise` times its first for `run` steps in a row.

    In the first `within` steps, and by twice the noise. Info before twice as many losses, or `within` where the run has
    ended; once the loss is below its first; where it may rise; and below a tenth of the chance level. Silent where it
    jumped within one step after the first ten: the data did.
    """
    s = signals_of(history)
    losses, lrs = s.losses[:within], s.lrs
    if history.num_clean > history.window or len(losses) < run + 3 or not lrs or lrs[0] < 0.8 * history.lrs.max:
        return None
    first, usual, has_lasted = losses[0], noise(losses), len(losses) == within and has_had_time(history, 2 * within)
    is_harmless = s.loss_level < first or may_rise(history) or max(losses, default=0.0) < 0.1 * s.chance
    limit = max(rise * first, 0.0 if math.isnan(usual) else first + 2.0 * usual)
    in_a_row = 0
    for i, loss in enumerate(losses):
        in_a_row = in_a_row + 1 if loss > limit else 0
        if first > 0.0 and in_a_row >= run:
            if jumps(s.loss_entries[:within], history):
                return None
            return Finding(
                f"The run began at its full learning rate of {lrs[0]:.3g}, and the loss rose from {first:.4g} to "
                f"{max(losses):.4g} in its first {len(losses)} losses.",
                s.loss_entries[i - run + 1].step,
                s.loss_entries[i].step,
                severity="info" if is_harmless or not has_lasted else "warning",
                evidence={"first": first, "largest": max(losses), "lr": lrs[0], "threshold_rise": rise},
                confidence=0.8,
            )
    return None


@rule(
    "scheduler-not-stepping",
    of="learning-rate-schedule",
    remedy="Call scheduler.step() after each optimizer.step(), or after each epoch if it counts epochs.",
    cause=("scheduler-not-stepped", "The scheduler is never stepped, so the learning rate stays at its first value."),
    weight=0.98,
    explains="update-ratio-low standstill",
    cause_needs=(needs.scheduler,),
)
def scheduler_not_stepping(history: TrainingHistory, *, steps: int = 50, steps_at_full: int = 1000) -> Finding | None:
    """There is a scheduler, but the learning rate has been the same from the first step on, for `steps` clean steps.

    Info, after `steps_at_full` steps and two epochs, where it is the scheduler's own initial value, as before a decay.
    """
    notes, lrs = history.model, history.lrs
    if not notes.has_scheduler or lrs.count < steps or lrs.min != lrs.max:
        return None
    at_full = notes.initial_lr is None or abs(lrs.max - notes.initial_lr) <= 1e-6 * abs(notes.initial_lr)
    need = max(steps_at_full, 2 * (notes.steps_per_epoch or 0)) if at_full else steps
    if lrs.count < need:
        return None
    initial = "" if at_full else f", {lrs.max / (notes.initial_lr or 1.0):.2g} of what the optimizer was made with"
    return Finding(
        f"A scheduler was made, but the learning rate has been {lrs.max:.3g} at each of {lrs.count} steps{initial}.",
        *ends(history.clean),
        severity="info" if at_full else "warning",
        evidence={"lr": lrs.max, "num_steps": lrs.count, "threshold_steps": need},
        confidence=0.6 if at_full else 0.9,
    )


# Optimizers whose first steps move an element by about the learning rate, whatever the gradient.
_NORMALISING = frozenset(["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Lion", "SignSGD"])
_LEAST_STD = 1e-3


def estimated_update_ratio(history: TrainingHistory, *, at_first: bool = False) -> float | None:
    """By which share of itself the median weight matrix is changed a step, lately or `at_first`; None if not known.

    Weights are taken as large as they began. Of optimizers that divide by the size of the gradient an element moves by
    the learning rate (of Adagrad by ever less); of SGD by that times the gradient, over one minus the momentum.
    """
    s, notes = signals_of(history), history.model
    kinds = {str(settings.get("kind", "")) for settings in notes.optimizer_settings}
    if len(kinds) != 1 or not s.lrs:
        return None
    lr = s.lrs[0] if at_first else max(s.lrs[-64:])
    spreads = {name: std for name, (std, usual) in notes.initialization.items() if std > max(_LEAST_STD, 0.2 * usual)}
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
    remedy="Divide the learning rate by 10 to 100; fastguard.LearningRateFinder finds one.",
    needs_descent=True,
)
def steps_too_large(
    history: TrainingHistory, *, ratio: float = 0.3, progress: float = 0.1, min_steps: int = 80
) -> Finding | None:
    """A step changes the median weight by an estimated share `ratio` or more, and little has been learnt.

    Little: from `min_steps` losses on, less than a share `progress` of the first has been gained; three times that
    where a step is as large as the weight.
    """
    value, s = estimated_update_ratio(history), signals_of(history)
    least = progress * (3.0 if (value or 0.0) >= 1.0 else 1.0)
    if value is None or value < ratio or len(s.losses) < min_steps or s.progress >= least:
        return None
    return Finding(
        f"At a learning rate of {max(s.lrs[-64:]):.3g} a step changes the median weight by an estimated {value:.2g} "
        "times its first size.",
        *ends(history.clean),
        evidence={"update_ratio": value, "threshold": ratio},
        confidence=0.9 if value > 3 * ratio else 0.75,
    )


@rule(
    "steps-too-small",
    of="update-ratio-low",
    remedy="Raise the learning rate by 10 to 100 times; fastguard.LearningRateFinder finds one. Look for a scheduler, "
    "a clip limit or a loss scale that holds the steps down.",
    needs_descent=True,
)
def steps_too_small(
    history: TrainingHistory, *, ratio: float = 5e-4, progress: float = 0.1, still: float = 0.02, min_steps: int = 40
) -> Finding | None:
    """A step changes the median weight by an estimated share of less than `ratio`, and little has been learnt.

    Little: from `min_steps` losses at half of the largest learning rate on, less than a share `progress` of the first;
    or weights that moved by less than `still` of themselves in all. From 100 losses on, and at the end. Or, from 200
    on, less than twice `ratio`, and a loss that falls steadily with half of it left.
    """
    value, s = estimated_update_ratio(history), signals_of(history)
    if value is None or value >= 2.0 * ratio or s.num_full_lr < min_steps or (s.is_lr_rising and not history.has_ended):
        return None
    moved = value * history.num_clean
    is_slow = value < ratio and (s.progress < progress or (moved < still and s.progress < 0.5))
    is_slow = is_slow or (s.progress < 0.5 and history.losses.count >= 200 and s.falls_steadily)
    if history.loss_trend.count < min_steps or not is_slow or not has_had_time(history, 100):
        return None
    return Finding(
        f"A step changes the median weight by an estimated {value:.2g} of its first size, {moved:.2g} over the "
        f"{history.num_clean} steps of the run if all went one way.",
        *ends(history.clean),
        evidence={"update_ratio": value, "threshold": ratio, "progress": s.progress},
        confidence=0.9 if moved < 0.1 else 0.6,
    )


_USUAL = {  # from the least to the largest learning rate that people use
    "SGD": (1e-5, 3.0),
    "Adadelta": (0.03, 30.0),
    "Adagrad": (1e-4, 1.0),
    "Lion": (1e-7, 3e-3),
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"), (1e-6, 0.05)),
}


@rule(
    "learning-rate-unusual",
    reads="learning rates of the whole run, and the optimizer's kind",
    source="our own: the defaults of torch.optim, and what is used in practice around them, with room to spare",
    remedy="Begin with what is usual: Adam 1e-5 to 1e-2, SGD 1e-3 to 1, Adadelta about 1, Adagrad 1e-2.",
    needs_harm=True,
)
def learning_rate_unusual(
    history: TrainingHistory, *, progress: float = 0.1, min_steps: int = 80, far: float = 4.0, moved: float = 2e-3
) -> Finding | None:
    """The largest learning rate so far is outside of what optimizers of this kind are used with.

    From `min_steps` steps on, once it no longer rises. Info. A warning if as many losses gained less than a share
    `progress` of the first, or the loss is three times the first two; if a high rate changes the median weight by a
    third a step, and half of the loss is left after 200; and, certainly: if at a low rate the loss falls steadily after
    200 with half of it left, if 200 steps can change the median weight by a share `moved` at most, or if a rate `far`
    times the largest usual one, and larger than the targets, changes the median weight by a third a step. In games and
    with rewards only what is certain warns. Silent for mixed or unknown optimizers.
    """
    kinds = {str(settings.get("kind", "")) for settings in history.model.optimizer_settings}
    kind = kinds.pop() if len(kinds) == 1 else ""
    if kind not in _USUAL or history.lrs.count < min_steps or signals_of(history).is_lr_rising:
        return None
    low, high = _USUAL[kind]
    largest = history.lrs.max
    if low <= largest <= high:
        return None
    s, begin = signals_of(history), max(history.loss_trend.firsts[:2], default=0.0)
    descends, ratio = descent(history) is not False, estimated_update_ratio(history)
    is_slow = history.losses.count >= min_steps and (not s.fall >= progress or s.loss_level > 3.0 * begin > 0.0)
    is_large = largest > high and (ratio or 0.0) > 0.3 and history.losses.count >= 200 and s.progress < 0.5
    is_long = largest < low and s.progress < 0.5 and history.losses.count >= 200 and s.falls_steadily
    # Targets that are numbers say how far the weights have to go.
    targets = history.model.target_mean or 0.0, history.model.target_std or 0.0
    size = math.hypot(*targets) if is_of_numbers(history) else 0.0
    is_far = largest > far * high * max(1.0, size) and (ratio or 0.0) > 0.3
    is_still = largest < low and ratio is not None and ratio * history.num_clean < moved and has_had_time(history, 200)
    evidence = {"lr": largest, "is_high": largest > high, "threshold_low": low, "threshold_high": high}
    return Finding(
        f"{kind} runs with a learning rate of {largest:.3g}, outside of the usual {low:g} to {high:g}.",
        severity="warning" if (descends and (is_slow or is_large or is_long)) or is_far or is_still else "info",
        evidence={**evidence, "is_certain": is_long or is_still or (is_far and kind in _NORMALISING)},
        confidence=0.9,
    )
