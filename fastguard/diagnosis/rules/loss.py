"""Rules on the course of the loss: explosions, divergence, spikes, oscillation and standstill."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import asks_itself, floor_at_zero, is_lbfgs, may_rise, rewarded
from ..registry import rule
from ..signals import ends, fall_of, has_had_time, jumps, median, noise, signals_of, slow_noise

TITLE = "Loss"


@rule(
    "loss-explosion",
    of="loss-divergence",
    severity="critical",
    source="KillLossSpike's factor of 2 over a mean and its run of spikes, taken relative to where the run began",
    remedy="Divide the learning rate by 10, or warm it up, and clip at the usual norm (max_norm, Spikes).",
    needs_descent=True,
)
def loss_explosion(
    history: TrainingHistory, *, ratio: float = 3.0, run: int = 3, peak: float = 30.0, peak_ratio: float = 1.5
) -> Finding | None:
    """At least `run` losses in a row above `ratio` times the first, or one above `peak` and the next `peak_ratio`.

    Or, of a loss whose floor is zero, ten times the first two: it rose before there were ten losses. Info where a term
    of the loss is to grow, such as a reward; below 1000 times the first where the model gives its own targets; and
    where other data are being learnt: it jumped within one step, less than 20 steps ago or coming down since.
    """
    if is_lbfgs(history):
        return None
    s = signals_of(history)
    begin = max(history.loss_trend.firsts[:2], default=0.0)
    first = max(s.initial_loss, *history.loss_trend.firsts[:1], 0.0)  # a loss may be gone within the first ten
    if s.loss_level > 10.0 * begin > 0.0 and floor_at_zero(history):
        first = begin
    if not first > 0.0 or not s.losses or max(s.losses) <= ratio * first:
        return None
    entries, losses = s.loss_entries, s.losses
    in_a_row, where = 0, None
    for i, loss in enumerate(losses):
        in_a_row = in_a_row + 1 if loss > ratio * first else 0
        is_peak = loss > peak * first and i + 1 < len(losses) and losses[i + 1] > peak_ratio * first
        if in_a_row >= run or is_peak:
            where = i
            break
    if where is None:
        return None
    start = where - in_a_row + 1
    largest = max(losses[start:])
    is_moved = largest < 1000.0 * first and asks_itself(history)
    return Finding(
        f"The loss rose to {largest:.4g}, {largest / first:.3g} times what it was in the beginning.",
        entries[start].step,
        next(e.step for e, loss in zip(reversed(entries), reversed(losses)) if loss > ratio * first),
        severity="info" if rewarded(history) or is_moved or s.comes_down_anew(patience=20) else "critical",
        evidence={"largest": largest, "first": first, "threshold_ratio": ratio},
        confidence=0.95,
    )


@rule(
    "loss-divergence",
    severity="critical",
    reads="the newest losses against where the run began and its best average",
    source="our own: what the run has gained, and how much of it is lost again",
    remedy="Go back to a checkpoint from before the loss turned, and lower the learning rate (by half to a tenth).",
    needs_descent=True,
    needs_harm=True,
)
def loss_divergence(
    history: TrainingHistory, *, lost: float = 0.5, min_progress: float = 0.1, z: float = 6.0
) -> Finding | None:
    """The median of the newest 20 losses has lost more than a share `lost` of the way down, and `z` times the noise.

    Once the best average was `min_progress` below the first losses. Critical when all of the way is lost. Silent where
    the loss may rise by design, and while other data are being learnt: it jumped within one step, and has come down
    since.
    """
    s = signals_of(history)
    trend = history.loss_trend
    if not s.fall > min_progress or len(s.losses) < 40:
        return None
    gained = trend.first - trend.best
    newest = s.losses[-20:]
    back = median(newest) - trend.best
    if back <= lost * gained or sorted(newest)[3] - trend.best <= 0.5 * lost * gained:
        return None
    calm = slow_noise([e.loss for e in s.loss_entries if e.step <= trend.best_step and e.loss is not None][-64:])
    spread = calm if not math.isnan(calm) else s.loss_noise
    if back <= z * spread:
        return None
    if may_rise(history) or s.is_learnt_anew:
        return None
    return Finding(
        f"The loss is back at {median(newest):.4g}, after an average of {trend.best:.4g} at step {trend.best_step}: "
        + (
            f"above where it began, {trend.first:.4g}."
            if back >= gained
            else f"{back / gained:.0%} of the gain is lost."
        ),
        trend.best_step,
        s.loss_entries[-1].step,
        severity="critical" if back >= gained else "warning",
        evidence={"level": median(newest), "best": trend.best, "first": trend.first, "lost": back / gained},
        confidence=0.95,
    )


@rule(
    "loss-spike",
    reads="spikes of the loss over the whole run",
    source="SkipStep's z-score (mean + 6 sigma, OLMo), held against where the run began",
    remedy="Look at the batch of that step: its inputs, targets and scale. If spikes come back elsewhere, clip at the "
    "usual norm, and lower the learning rate or Adam's beta2.",
    needs_descent=True,
    needs_harm=True,
)
def loss_spike(
    history: TrainingHistory, *, z: float = 8.0, ratio: float = 2.0, norm_ratio: float = 8.0, max_run: int = 4
) -> Finding | None:
    """Losses `z` standard deviations above their average, and above `ratio` times the run's first losses.

    Or, at any height, with a norm `norm_ratio` times its average at the same step. What lasts longer than `max_run`
    steps is a new level, not a spike. Info where the loss may rise, as one with a reward in it. Certain, whatever
    became of the run, where there were one or two spikes in all, each of one step and above twice the largest of the
    first ten losses: the weights before and after it are the same, so it was the batch.
    """
    trend = history.loss_trend
    confirmed = {s.first_step for s in history.norm_trend.spikes if s.value - s.mean > math.log(norm_ratio)}
    spikes = [
        spike
        for spike in trend.spikes
        if spike.z > z
        and (spike.value > ratio * trend.first or spike.first_step in confirmed)
        and spike.last_step - spike.first_step < max_run
    ]
    entries = signals_of(history).loss_entries if spikes else []
    anew = {entries[place].step for place in jumps(entries, history)}
    spikes = [spike for spike in spikes if spike.first_step not in anew]
    if not spikes or trend.first <= 0.0:
        return None
    worst = max(spikes, key=lambda spike: spike.value / max(abs(spike.mean), 1e-300))
    limit = max(2.0 * max(trend.firsts), 0.0)
    is_certain = len(trend.spikes) <= 2 and history.recent[-1].step > spikes[-1].last_step + 2
    is_certain = is_certain and all(s.first_step == s.last_step and s.value > limit for s in spikes)
    evidence = {"loss": worst.value, "mean": worst.mean, "z": worst.z, "num_spikes": len(spikes), "threshold_z": z}
    often = "once" if len(spikes) == 1 else f"{len(spikes)} times"
    return Finding(
        f"The loss jumped {often} for a step or so: to {worst.value:.4g} at step {worst.first_step}, from an average "
        f"of {worst.mean:.4g}.",
        spikes[0].first_step,
        spikes[-1].last_step,
        severity="info" if may_rise(history) else "warning",
        evidence={**evidence, "is_certain": is_certain},
        confidence=0.9,
    )


@rule(
    "spiky-loss",
    of="loss-spike",
    severity="info",
    source="SkipStep's z-score (mean + 6 sigma, OLMo), counted",
    remedy="Small or uneven batches make a loss spiky; larger ones, or accumulation, calm it. It need not be wrong.",
    needs_descent=True,
)
def spiky_loss(history: TrainingHistory, *, num_spikes: int = 8, steps: int = 1000) -> Finding | None:
    """At least `num_spikes` spikes of 6 standard deviations within the newest `steps` steps."""
    newest = history.recent[-1].step if history.recent else 0
    spikes = [spike for spike in history.loss_trend.spikes if newest - spike.last_step < steps]
    if len(spikes) < num_spikes:
        return None
    return Finding(
        f"The loss had {len(spikes)} spikes of 6 standard deviations or more in the last "
        f"{min(steps, history.num_steps)} steps.",
        spikes[0].first_step,
        spikes[-1].last_step,
        severity="info",
        evidence={"num_spikes": len(spikes), "threshold": num_spikes},
        confidence=0.7,
    )


@rule(
    "loss-oscillation",
    reads="the loss from step to step, lately and at its calmest",
    source="our own, relative to the run; the toolkit calls a spread of 10 over 10 steps unstable",
    remedy="Steps overshoot: lower the learning rate (by half to a tenth), or take larger batches.",
    needs_descent=True,
    needs_harm=True,
)
def loss_oscillation(
    history: TrainingHistory, *, ratio: float = 4.0, share: float = 0.1, min_steps: int = 120
) -> Finding | None:
    """The loss's noise is `ratio` times what it was at its calmest, above a `share` of the first losses, and rising.

    Over blocks of 40 steps of the window, from `min_steps` losses on; silent near the best loss. Info where the loss
    may rise by design, and while other data are being learnt.
    """
    s = signals_of(history)
    trend = history.loss_trend
    if len(s.losses) < min_steps or trend.first <= 0.0:
        return None
    if median(s.losses[-40:]) - trend.best <= 0.2 * max(trend.first - trend.best, 0.0):
        return None
    start = len(s.losses) % 40
    blocks = [noise(s.losses[i : i + 40]) for i in range(start, len(s.losses), 40)]
    calmest = min(range(len(blocks)), key=blocks.__getitem__)
    now = min(blocks[-2:])
    if calmest >= len(blocks) - 2 or now <= ratio * blocks[calmest] or now <= share * trend.first:
        return None
    return Finding(
        f"The loss changes by {now:.3g} from step to step, {now / max(blocks[calmest], 1e-300):.3g} times as much as "
        "at its calmest, and has come up from its best.",
        *ends(s.loss_entries[-80:]),
        severity="info" if may_rise(history) or s.is_learnt_anew else "warning",
        evidence={"noise": now, "calmest": blocks[calmest], "threshold_ratio": ratio},
        confidence=0.75,
    )


@rule(
    "loss-not-decreasing",
    reads="the best average of the loss against the run's first losses; the learning rate",
    source="SageMaker Debugger LossNotDecreasing (10 steps), over averages, so that noise does not decide",
    remedy="The model does not learn: look at the update ratio and the learning rate first, then at frozen, dead or "
    "vanishing layers, then at whether inputs and targets belong together.",
    needs_descent=True,
)
def loss_not_decreasing(
    history: TrainingHistory, *, progress: float = 0.02, z: float = 1.0, min_steps: int = 100, patience: int = 200
) -> Finding | None:
    """After `min_steps` steps the best average of the loss is not a share `progress` below the run's first ten losses.

    Steps of a warm-up do not count: those below half of the largest learning rate, and all while it rises. Silent where
    the newest losses are twice that share, or `z` times their noise, below the first: the fall has just begun. Info
    before `patience` losses unless the run has ended; where the newest two thirds fall by three standard errors; where
    the loss is below chance, or far below the first; and where it may rise by design.
    """
    s = signals_of(history)
    trend = history.loss_trend
    if trend.count < min_steps or s.num_full_lr < min(min_steps, history.window // 2) or s.is_lr_rising:
        return None
    if not s.loss_entries or not s.fall < progress:  # losses may have stopped coming
        return None
    noise_of_ten = z * s.loss_noise / math.sqrt(10.0)
    if s.loss_level < trend.first - max(2 * progress * abs(trend.first), noise_of_ten):
        return None
    fallen, error = fall_of(s.losses[len(s.losses) // 3 :])
    may_be_fine = s.is_at_a_floor(progress) or fallen > 3.0 * error > 0.0 or not has_had_time(history, patience)
    return Finding(
        f"After {trend.count} steps the loss is {s.loss_level:.4g}; it was {trend.first:.4g} in the beginning.",
        history.clean[0].step,
        s.loss_entries[-1].step,
        severity="info" if may_be_fine or may_rise(history) else "warning",
        evidence={"level": s.loss_level, "first": trend.first, "progress": s.fall, "threshold": progress},
        confidence=0.85,
    )


@rule(
    "underfitting",
    of="loss-not-decreasing",
    remedy="The loss stopped falling early and high: look for dead units, too much dropout or weight decay, a learning "
    "rate too high or too low, or targets that do not follow from the inputs. A larger model comes last.",
    needs_descent=True,
)
def underfitting(
    history: TrainingHistory, *, progress: float = 0.15, min_steps: int = 120, flat: float = 0.03, validations: int = 4
) -> Finding | None:
    """Over the newest two thirds of the run the loss has fallen by less than `flat` of it, and it is still high.

    High: less than a share `progress` of the first losses has been gained. Fallen: by the line through the losses, plus
    two standard errors. Less than 0.06 is enough where `validations` validation losses of these steps fell by less than
    `flat`. From `min_steps` steps on, within the window, up to a decay to a third. Silent where the loss rose by half,
    or is known to have no floor at zero. Info before 150 losses unless the run has ended; where the loss is below
    chance, or far below the first; and where it may rise by design.
    """
    s = signals_of(history)
    trend = history.loss_trend
    if history.num_clean > history.window or trend.first <= 0.0 or floor_at_zero(history) is False:
        return None
    losses = [loss for e, loss in zip(s.loss_entries, s.losses) if e.lr is None or 3.0 * e.lr >= history.lrs.max]
    if not 0.0 <= s.fall < progress or s.is_lr_rising or len(losses) < min_steps:
        return None
    part = losses[len(losses) // 3 :]
    fallen, error = fall_of(part)
    start = s.loss_entries[len(losses) // 3].step
    val_losses = [v.val_loss for v in history.validations if v.step >= start and math.isfinite(v.val_loss)]
    stands = len(val_losses) >= max(validations, 2) and fall_of(val_losses)[0] < flat * median(val_losses)
    limit = 0.06 if stands else flat
    if fallen + 2.0 * error >= limit * median(part) or median(part) > 1.5 * trend.first:
        return None
    may_be_fine = s.is_at_a_floor(progress) or may_rise(history) or not has_had_time(history, 150)
    return Finding(
        f"The loss has not come down from about {median(part):.4g} in the last {len(part)} steps, "
        f"{median(part) / trend.first:.0%} of where it began.",
        start,
        s.loss_entries[-1].step,
        severity="info" if may_be_fine else "warning",
        evidence={"level": median(part), "first": trend.first, "fallen": fallen, "threshold_flat": limit},
        confidence=0.8,
    )


@rule(
    "loss-plateau",
    of="loss-not-decreasing",
    severity="info",
    source="the toolkit's LOSS_PLATEAU (spread below 0.1 % of the mean over 50 steps)",
    remedy="If the loss is not good enough yet, raise the learning rate or change its schedule; if it is, stop.",
    needs_descent=True,
)
def loss_plateau(
    history: TrainingHistory, *, spread: float = 0.001, steps: int = 50, min_steps: int = 100
) -> Finding | None:
    """The newest `steps` losses lie within a share `spread` of their mean; from `min_steps` losses on."""
    s = signals_of(history)
    newest = s.losses[-steps:]
    if history.loss_trend.count < min_steps or len(newest) < steps:
        return None
    mean = sum(newest) / len(newest)
    if not mean or (max(newest) - min(newest)) / abs(mean) >= spread:
        return None
    return Finding(
        f"The last {steps} losses are within {spread:.1%} of {mean:.4g}.",
        *ends(s.loss_entries[-steps:]),
        severity="info",
        evidence={"mean": mean, "spread": (max(newest) - min(newest)) / abs(mean), "threshold": spread},
    )
