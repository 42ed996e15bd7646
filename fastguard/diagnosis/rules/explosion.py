"""Rules on gradients that are too large: spikes, growth, and clipping that never rests."""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from ...records import Entry, TrainingHistory
from ...records.running import quantiles
from ..finding import Seen
from ..needs import may_rise, steps_of_the_gradients_size
from ..registry import rule
from ..signals import exp, is_felt_by_the_loss, median, signals_of

TITLE = "Gradients too large"

_NORMALISERS = ("AdaGC(", "AGC(", "Value(", "Percentile(")  # policies, as they show themselves


@rule(
    "clip-rate-high",
    was="clipped-below-eps",
    source="our own; clipping is meant for the rare large step (Pascanu et al. 2013, section 3.2)",
    see="{_num_clipped} of the last {_num} steps were clipped; the median norm is {median_norm:.3g} and the median "
    "step was scaled by {median_coef:.3g}.",
    remedy="Raise max_norm towards the usual norm, or lower the learning rate: now the limit sets each step's size.",
)
def clip_rate_high(history: TrainingHistory, *, rate: float = 0.9, min_steps: int = 50) -> Seen | None:
    """More than a share `rate` of the newest 200 (at least `min_steps`) clean steps were clipped by more than 0.1%.

    Info: noisy small batches live with it. A warning if the median step is scaled by less than 0.15, unless half of the
    first loss was gained, or the optimizer divides by the gradient's size. Silent under a policy that clips nearly
    every step on purpose: AdaGC, AGC, Value, Percentile.
    """
    newest = list(history.clean)[-200:] if history.num_clipped else []
    num_clipped, policy = sum(entry.clip_coef < 0.999 for entry in newest), history.model.clip_policy
    if len(newest) < min_steps or num_clipped <= rate * len(newest) or policy.startswith(_NORMALISERS):
        return None
    # What clipping leaves sets the size of the steps, unless the optimizer divides by it; next to nothing is below eps.
    sets_steps = not history.model.optimizer_settings or steps_of_the_gradients_size(history)
    middle = median([entry.clip_coef for entry in newest])
    is_felt = (sets_steps or middle < 1e-5) and not signals_of(history).progress > 0.5
    return Seen(
        at=newest,
        warn=middle < 0.15 and is_felt,
        median_coef=middle,
        median_norm=median([entry.norm for entry in newest]),
        _num_clipped=num_clipped,
        _num=len(newest),
    )


@rule(
    "norm-spike",
    source="modified z-score (Iglewicz and Hoaglin 1993, section 3) of ln(norm), with the ratio of Megatron-LM's "
    "check for unexpectedly large gradients",
    see="{num_spikes:step} of the last {_num} had a gradient norm far above the usual: {norm:.3g} at step {_step}, "
    "{ratio:.0f} times the median before it.",
    sure=0.95,
    remedy="Look at the data of that step. If spikes come back, clip, lower the learning rate or Adam's beta2.",
    needs_harm=True,
)
def norm_spike(history: TrainingHistory, *, z: float = 8.0, ratio: float = 10.0, baseline: int = 128) -> Seen | None:
    """A norm has a robust z of its logarithm above `z`, and is `ratio` times the median of those before it.

    The `baseline` clean steps before it count, at least 32, so that norms that fall as training begins are no spikes.
    Info if the loss keeps its gain and did not jump with them.
    """
    steps = [entry for entry in signals_of(history).clean if entry.norm > 0.0]
    norms = [entry.norm for entry in steps]
    if len(steps) <= 32 or max(norms) <= ratio * min(norms):
        return None  # a calm window is let through without a look at each step
    spikes: list[tuple[float, float, float, Entry]] = []
    before = sorted(norms[:32])  # kept sorted while it slides: its median is then at hand
    for i in range(32, len(norms)):
        norm, middle = norms[i], before[len(before) // 2]
        if norm > ratio * middle:
            usual = math.log(middle)  # of the quotients: they may be beyond the floats
            spread = quantiles([abs(math.log(other) - usual) for other in before], (0.5,))[0]
            score = 0.6745 * (math.log(norm) - usual) / max(spread, 1e-3)
            if score > z:
                spikes.append((norm / middle, score, middle, steps[i]))
        insort(before, norm)
        if len(before) > baseline:
            del before[bisect_left(before, norms[i - baseline])]
    if not spikes:
        return None
    times, score, middle, worst = max(spikes, key=lambda spike: spike[0])
    at = [spike[3].step for spike in spikes]
    return Seen(
        at=at,
        warn=is_felt_by_the_loss(history, at),
        norm=worst.norm,
        ratio=times,
        num_spikes=len(spikes),
        _num=len(steps),
        _step=worst.step,
    )


@rule(
    "growing-norm",
    was="norm-jump layer-norm-imbalance",
    see="The gradient norm has grown to {norm:.3g}, {ratio:.3g} times what it was at step {_step}{_loss}.",
    remedy="Lower the learning rate, add warm-up, and clip at a few times the usual norm.",
    needs_descent=True,
    needs_harm=True,
)
def growing_norm(history: TrainingHistory, *, ratio: float = 10.0, ratio_alone: float = 100.0) -> Seen | None:
    """The average norm is `ratio` times its least, and the loss is not at its best; without losses, `ratio_alone`
    times.

    Fires from 100 clean steps on. Silent if the loss may rise by design, or recovers from a jump to other data.
    """
    trend, losses = history.norm_trend, history.loss_trend
    grown, has_loss = exp(trend.mean - trend.best), losses.count >= 100
    if trend.count < 100 or grown <= (ratio if has_loss else ratio_alone):
        return None
    if has_loss and losses.mean <= losses.best + 0.25 * max(losses.first - losses.best, 0.0):
        return None
    if may_rise(history) or signals_of(history).recovers_from_shift:
        return None
    return Seen(
        at=(trend.best_step, history.clean[-1].step),
        norm=exp(trend.mean),
        ratio=grown,
        _step=trend.best_step,
        _loss=", and the loss has come up from its best" if has_loss else "",
    )


@rule(
    "unscaled-accumulation",
    see="{backward_per_step} backward passes are added up for each step, and the sum is clipped to {median_coef:.2g} "
    "of itself: the losses seem not to be divided by their number.",
    sure=0.6,
    remedy="Divide the loss of each micro-batch by their number before backward(), so that the step sees the mean "
    "gradient; or raise max_norm with it, and lower the learning rate.",
)
def unscaled_accumulation(history: TrainingHistory, *, share: float = 2.0, steps: int = 20) -> Seen | None:
    """Several backward passes a step, and over the newest `steps` clean steps a median clip coefficient below `share`
    divided by their number. If nothing is clipped: updates above a share 0.033 of the weights; or, with SGD, eight
    losses or more that were not divided, after ten steps.
    """
    passes, peak, newest = history.model.backward_per_step, history.updates.peak, signals_of(history).clean[-steps:]
    num_summed = history.model.num_summed or 0
    if steps_of_the_gradients_size(history) and num_summed >= 8 and len(newest) >= 10:
        see = "The gradients of {backward_per_step} losses are added up for each step of SGD, and none was divided."
        return Seen(at=newest, sure=0.7, see=see, backward_per_step=num_summed)
    if passes is None or passes < 3 or len(newest) < steps:
        return None
    coef = median([e.clip_coef for e in newest])
    if coef < share / passes:
        return Seen(at=newest, backward_per_step=passes, median_coef=coef)
    if coef < 1.0 or peak is None or peak.ratio <= 0.033:
        return None
    see = "{backward_per_step} backward passes are added up for each step, which changed the median weight by "
    see += "{update_ratio:.2g} times its norm: the losses seem not to be divided by their number."
    return Seen(at=(peak, newest[-1]), sure=0.5, see=see, backward_per_step=passes, update_ratio=peak.ratio)
