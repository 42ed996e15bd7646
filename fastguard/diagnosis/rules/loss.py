"""Rules on the course of the loss: explosions, divergence, spikes, oscillation and standstill."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Seen
from ..needs import floor_at_zero, is_lbfgs, margin, may_rise
from ..registry import rule
from ..signals import fall_of, has_had_time, is_felt_by_the_loss, median, noise, signals_of

TITLE = "Loss"


@rule(
    "loss-explosion",
    of="loss-divergence",
    severity="critical",
    source="KillLossSpike's factor of 2 over a mean and its run of spikes, taken relative to where the run began",
    see="The loss rose to {largest:.4g}, {_times:.3g} times what it was in the beginning.",
    sure=0.95,
    remedy="Divide the learning rate by 10, or warm it up, and clip at the usual norm (max_norm, Spikes).",
    needs_descent=True,
)
def loss_explosion(history: TrainingHistory, *, ratio: float = 3.0, run: int = 3, peak: float = 30.0) -> Seen | None:
    """At least `run` losses in a row are above `ratio` times the first, or one above `peak` and the next above 1.5.

    Info if the loss may rise by design, recovers from a jump to other data, or is back and has kept its gain.
    """
    s = signals_of(history)
    first = max(s.initial_loss, *history.loss_trend.firsts[:1], 0.0)  # a loss may be gone within the first ten
    if is_lbfgs(history) or not first > 0.0 or max(s.losses, default=0.0) <= ratio * first:
        return None
    high = [loss > ratio * first for loss in s.losses]
    pairs = enumerate(zip(s.losses, s.losses[1:]))
    starts = [i for i, (loss, following) in pairs if loss > peak * first and following > 1.5 * first]
    starts += [i for i in range(len(high) - run + 1) if all(high[i : i + run])]
    if not starts:
        return None
    start = min(starts)
    largest = max(s.losses[start:])
    is_over = max(s.losses[-run:]) < first and not is_felt_by_the_loss(history)
    return Seen(
        at=(s.loss_entries[start], s.loss_entries[max(i for i, is_high in enumerate(high) if is_high)]),
        severity="info" if may_rise(history) or s.recovers_from_shift or is_over else "critical",
        largest=largest,
        _times=largest / first,
    )


@rule(
    "loss-divergence",
    severity="critical",
    see="The loss is back at {level:.4g}, after an average of {best:.4g} at step {_step}: {_how}.",
    sure=0.95,
    remedy="Go back to a checkpoint from before the loss turned, and lower the learning rate (by half to a tenth).",
    needs_descent=True,
    needs_harm=True,
)
def loss_divergence(history: TrainingHistory, *, lost: float = 0.5, min_progress: float = 0.1) -> Seen | None:
    """The median of the newest 20 losses has lost more than a share `lost` of the gain, and 6 times the noise.

    Counts once the best average was `min_progress` below the first losses. Critical if all of the gain is lost. Silent
    if the loss may rise by design, or recovers from a jump to other data.
    """
    s, trend = signals_of(history), history.loss_trend
    newest, gained = s.losses[-20:], trend.first - trend.best
    if not s.fall > min_progress or len(s.losses) < 40:
        return None
    back = median(newest) - trend.best
    if back <= lost * gained or sorted(newest)[3] - trend.best <= 0.5 * lost * gained:
        return None
    calm = noise([e.loss or 0.0 for e in s.loss_entries if e.step <= trend.best_step][-64:])
    spread = s.loss_noise if math.isnan(calm) else calm
    if back <= 6.0 * spread or may_rise(history) or s.recovers_from_shift:
        return None
    return Seen(
        at=(trend.best_step, s.loss_entries[-1].step),
        severity="critical" if back >= gained else "warning",
        level=median(newest),
        best=trend.best,
        _step=trend.best_step,
        _how=f"{back / gained:.0%} of the gain is lost"
        if back < gained
        else f"above where it began, {trend.first:.4g}",
    )


@rule(
    "loss-spike",
    was="spiky-loss",
    source="SkipStep's z-score (mean + 6 sigma, OLMo), held against where the run began",
    see="The loss jumped {_often} for a step or so: to {loss:.4g} at step {_step}, from an average of {mean:.4g}.",
    remedy="Look at the batch of that step. If spikes come back, clip, lower the learning rate or Adam's beta2.",
    needs_descent=True,
    needs_harm=True,
)
def loss_spike(history: TrainingHistory, *, z: float = 8.0, ratio: float = 2.0) -> Seen | None:
    """Losses are `z` standard deviations above their average, and above `ratio` times the run's first losses.

    More than 4 steps are a new level, not a spike. Certain if there were one or two spikes in all, each of one step and
    above twice the largest of the first ten losses. Info if there are one or two that are not certain, and if the loss
    may rise by design.
    """
    trend = history.loss_trend
    high = [spike for spike in trend.spikes if spike.z > z and spike.value > ratio * trend.first]
    spikes = [spike for spike in high if spike.last_step - spike.first_step < 4]
    if trend.first <= 0.0 or not spikes:
        return None
    worst = max(spikes, key=lambda spike: spike.value / max(abs(spike.mean), 1e-300))
    is_over = len(trend.spikes) <= 2 and history.recent[-1].step > spikes[-1].last_step + 2
    limit = 2.0 * max(trend.firsts)
    is_certain = is_over and all(s.first_step == s.last_step and s.value > limit for s in spikes)
    return Seen(
        at=(spikes[0].first_step, spikes[-1].last_step),
        warn=not may_rise(history) and (is_certain or len(spikes) > 2),
        loss=worst.value,
        mean=worst.mean,
        num_spikes=len(spikes),
        is_certain=is_certain,
        _often="once" if len(spikes) == 1 else f"{len(spikes)} times",
        _step=worst.first_step,
    )


@rule(
    "loss-not-decreasing",
    was="loss-plateau",
    source="SageMaker Debugger LossNotDecreasing (10 steps), over averages, so that noise does not decide",
    see="After {_num} steps the loss is {level:.4g}; it was {first:.4g} in the beginning.",
    remedy="Look at the learning rate, then at frozen or dead layers, then at whether targets fit the inputs.",
    needs_descent=True,
)
def loss_not_decreasing(history: TrainingHistory, *, progress: float = 0.02, z: float = 1.0) -> Seen | None:
    """After 100 steps the best average of the loss is not a share `progress` below the first ten losses.

    Steps of a warm-up do not count. Silent if the newest losses are twice that share, or `z` times their noise, below
    the first. Info before 200 losses (more of small batches) unless the run has ended, and before three times as many
    while it still falls by three standard errors; if it is below the chance level, or may rise by design.
    """
    s, trend = signals_of(history), history.loss_trend
    if trend.count < 100 or s.num_full_lr < min(100, history.window // 2) or s.is_lr_rising:
        return None
    noise_of_ten = z * s.loss_noise / math.sqrt(10.0)
    has_begun = s.loss_level < trend.first - max(2 * progress * abs(trend.first), noise_of_ten)
    if not s.loss_entries or not s.fall < progress or has_begun:  # losses may have stopped coming
        return None
    is_early = not has_had_time(history, 200) or (s.still_falls and history.losses.count < 600)
    return Seen(
        at=(history.clean[0], s.loss_entries[-1]),
        warn=not (is_early or may_rise(history) or s.is_below_chance),
        level=s.loss_level,
        first=trend.first,
        _num=trend.count,
    )


@rule(
    "falls-in-a-line",
    of="loss-not-decreasing",
    see="In {_num} steps the loss has fallen by {progress:.1%} only, as fast at the end as in the beginning.",
    remedy="Raise the learning rate by 10 to 100 times: a loss that falls in a straight line can fall faster.",
    needs_descent=True,
)
def falls_in_a_line(history: TrainingHistory, *, progress: float = 0.1, min_steps: int = 300) -> Seen | None:
    """After `min_steps` losses of a run that has ended, or 1000 (more of small batches), less than `progress` of the
    first loss was gained, and the second half brought nine tenths as much as the first.
    """
    s, trend = signals_of(history), history.loss_trend
    means = [bucket.loss.mean for bucket in history.overview.buckets if bucket.loss.num]
    if trend.count < min_steps or not has_had_time(history, 1000) or len(means) < 8 or not 0.0 < s.fall < progress:
        return None
    half = len(means) // 2
    early, late = fall_of(means[:half]), fall_of(means[half:])
    is_line = late[0] > 0.9 * early[0] > 0.0 and min(early[0] - 6.0 * early[1], late[0] - 6.0 * late[1]) > 0.0
    if not is_line or s.is_lr_rising or may_rise(history):
        return None
    return Seen(at=(history.clean[0], s.loss_entries[-1]), progress=s.fall, _num=trend.count)


@rule(
    "underfitting",
    of="loss-not-decreasing",
    see="The loss has not come down from about {level:.4g} in the last {_num} steps, {_share:.0%} of where it began.",
    remedy="Look for dead units, dropout, weight decay and the learning rate first; try a larger model last.",
    needs_descent=True,
)
def underfitting(history: TrainingHistory, *, progress: float = 0.15, min_steps: int = 120) -> Seen | None:
    """Over the newest two thirds of the run the loss fell by less than 3 %, after a gain of less than `progress`.

    The fall is that of the line through the losses, plus two standard errors; 6 % is the limit if 4 validation losses
    of these steps fell by less than 3 %. Counts steps from `min_steps` on, within the window, up to a decay to a
    third. Silent if the loss rose by half, or has no floor at zero. Info before 150 losses unless the run has ended, if
    the loss is below the chance level, and if it may rise by design.
    """
    s, trend = signals_of(history), history.loss_trend
    losses = [loss for e, loss in zip(s.loss_entries, s.losses) if 3.0 * (e.lr or math.inf) >= history.lrs.max]
    has_no_floor = floor_at_zero(history) is False and not margin(history)
    if history.num_clean > history.window or trend.first <= 0.0 or has_no_floor:
        return None
    if not 0.0 <= s.fall < progress or s.is_lr_rising or len(losses) < min_steps:
        return None
    part, start = losses[len(losses) // 3 :], s.loss_entries[len(losses) // 3].step
    level, (fallen, error) = median(part), fall_of(part)
    val_losses = [v.val_loss for v in history.validations if v.step >= start and math.isfinite(v.val_loss)]
    stands = len(val_losses) >= 4 and fall_of(val_losses)[0] < 0.03 * median(val_losses)
    limit = 0.06 if stands else 0.03
    if fallen + 2.0 * error >= limit * level or level > 1.5 * trend.first:
        return None
    return Seen(
        at=(start, s.loss_entries[-1].step),
        warn=has_had_time(history, 150) and not may_rise(history) and not s.is_below_chance,
        level=level,
        _num=len(part),
        _share=level / trend.first,
    )
