"""Rules on the learning rate itself: jumps, bounds, warm-up and the scheduler."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import TrainingHistory
from .. import needs
from ..finding import Finding
from ..needs import may_rise
from ..registry import rule
from ..signals import ends, has_had_time, jumps, noise, signals_of

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
        f"The largest learning rate so far is {lrs.max:.3g}; usual ones lie between {low:g} and {high:g}.",
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

    `within` the first so many steps, and while those are still in the window. The first loss is of weights that no step
    has changed yet; above it by twice the noise, too. Info before twice as many losses, or `within` where the run has
    ended; once the loss is below its first, where it may rise, and where it stays below a tenth of the loss of one who
    knows nothing. Silent where it jumped within one step after the first ten: the data did.
    """
    s = signals_of(history)
    losses, lrs = s.losses[:within], s.lrs
    if history.num_clean > history.window or len(losses) < run + 3 or not lrs or lrs[0] < 0.8 * history.lrs.max:
        return None
    if len(lrs) >= within and lrs[-1] < 0.5 * lrs[0]:
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

    Where it stands at the scheduler's own initial value, as before a decay, `steps_at_full` are waited for, and it is
    info. Two epochs are waited for where the steps of an epoch are known.
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
