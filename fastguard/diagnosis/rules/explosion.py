"""Rules on gradients that are too large: spikes, growth, jumps, and clipping that never rests."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, insort

from ...records import Entry, TrainingHistory
from ...records.running import quantiles
from ..finding import Finding, count
from ..needs import may_rise, steps_of_the_gradients_size
from ..registry import rule
from ..signals import ends, exp, is_felt_by_the_loss, median, signals_of

TITLE = "Gradients too large"


_NORMALISERS = ("AdaGC(", "AGC(", "Value(", "Percentile(")  # policies, as they show themselves
_OTHER_THAN_ZCLIP = (
    "ZClip learns from norms that it has clipped, and goes on clipping for ever once they have risen. Take Spikes, "
    "which learns from norms before clipping."
)


@rule(
    "clip-rate-high",
    reads="clip coefficients of the newest clean steps",
    source="our own; clipping is meant for the rare large step (Pascanu et al. 2013, section 3.2)",
    remedy="Clipping at nearly every step normalises the gradient and hides the learning rate's real size: raise "
    "max_norm towards the usual norm, or lower the learning rate.",
)
def clip_rate_high(
    history: TrainingHistory, *, rate: float = 0.9, min_steps: int = 50, max_steps: int = 200, coef_low: float = 0.15
) -> Finding | None:
    """More than `rate` of the newest `max_steps` (at least `min_steps`) clean steps were clipped by more than 0.1 %.

    Info: noisy small batches live with it. A warning where the median step is scaled by less than `coef_low`, unless
    half of the first loss has been gained, or the optimizer divides by the size of the gradient anyway. Silent under a
    policy that clips nearly every step on purpose: AdaGC, AGC, Value, Percentile.
    """
    if not history.num_clipped:
        return None
    newest = list(history.clean)[-max_steps:]
    num_clipped = sum(entry.clip_coef < 0.999 for entry in newest)
    if len(newest) < min_steps or num_clipped <= rate * len(newest):
        return None
    policy = history.model.clip_policy
    if policy.startswith(_NORMALISERS):
        return None  # that is what it is for
    # What clipping leaves sets the size of the steps, unless the optimizer divides by it; next to nothing is below eps.
    sets_steps = not history.model.optimizer_settings or steps_of_the_gradients_size(history)
    leaves_nothing = median([entry.clip_coef for entry in newest[-64:]]) < 1e-5
    is_felt = (sets_steps or leaves_nothing) and not signals_of(history).progress > 0.5
    middle, norm = (quantiles(values, (0.5,))[0] for values in zip(*((e.clip_coef, e.norm) for e in newest)))
    evidence = {"clip_rate": num_clipped / len(newest), "median_coef": middle, "median_norm": norm}
    return Finding(
        f"{num_clipped} of the last {len(newest)} steps were clipped; the median norm is {norm:.3g} and the median "
        f"step was scaled by {middle:.3g}.",
        *ends(newest),
        severity="warning" if middle < coef_low and is_felt else "info",
        evidence={**evidence, "threshold": rate},
        recommendation=_OTHER_THAN_ZCLIP if policy.startswith("ZClip(") else "",
        confidence=0.9,
    )


_CLIPPED_SPIKE = (
    "Look at the data of that step, which was clipped. If spikes come back, lower the learning rate, or Adam's beta2 "
    "(0.95 instead of 0.999)."
)


@rule(
    "norm-spike",
    reads="gradient norms of the clean steps in the window",
    source="modified z-score (Iglewicz and Hoaglin 1993, section 3) of ln(norm), with the ratio of Megatron-LM's "
    "check for unexpectedly large gradients",
    remedy="Look at the data of that step. Clip at a small multiple of the usual norm; if spikes come back, lower the "
    "learning rate, or Adam's beta2 (0.95 instead of 0.999).",
    needs_harm=True,
)
def norm_spike(
    history: TrainingHistory, *, z: float = 8.0, ratio: float = 10.0, baseline: int = 128, min_steps: int = 32
) -> Finding | None:
    """A norm far above those before it: robust z of its logarithm above `z`, and `ratio` times their median.

    Each is compared with the `baseline` clean steps before it (at least `min_steps`): norms that fall as training
    begins are no spikes. Info where the loss keeps what it has gained and did not jump with them.
    """
    norms, steps = signals_of(history).norms, signals_of(history).clean
    if min(norms, default=0.0) <= 0.0:
        steps = [entry for entry in steps if entry.norm > 0.0]
        norms = [entry.norm for entry in steps]
    if len(steps) <= min_steps or max(norms) <= ratio * min(norms):
        return None  # a calm window is let through without a look at each step
    spikes: list[tuple[float, float, float, Entry]] = []
    before = sorted(norms[:min_steps])  # kept sorted while it slides: its median is then at hand
    for i in range(min_steps, len(norms)):
        norm, median = norms[i], before[len(before) // 2]
        if norm > ratio * median:
            usual = math.log(median)  # of the quotients: they may be beyond the floats
            spread = quantiles([abs(math.log(other) - usual) for other in before], (0.5,))[0]
            score = 0.6745 * (math.log(norm) - usual) / max(spread, 1e-3)
            if score > z:
                spikes.append((norm / median, score, median, steps[i]))
        insort(before, norm)
        if len(before) > baseline:
            del before[bisect_left(before, norms[i - baseline])]
    if not spikes:
        return None
    times, score, median, worst = max(spikes, key=lambda spike: spike[0])
    evidence = {"norm": worst.norm, "median": median, "ratio": times, "robust_z": score, "num_spikes": len(spikes)}
    return Finding(
        f"{count(len(spikes), 'step')} of the last {len(steps)} had a gradient norm far above the usual: "
        f"{worst.norm:.3g} at step {worst.step}, {times:.0f} times the median before it.",
        spikes[0][3].step,
        spikes[-1][3].step,
        severity="warning" if is_felt_by_the_loss(history, [spike[3].step for spike in spikes]) else "info",
        evidence={**evidence, "threshold_ratio": ratio, "threshold_z": z},
        confidence=0.95,
        recommendation=_CLIPPED_SPIKE if worst.clip_coef < 1.0 else "",
    )


@rule(
    "clipped-below-eps",
    of="clip-rate-high",
    remedy="Raise the clip limit towards the usual norm, or lower the optimizer's eps: Adam's steps do not depend on "
    "the size of the gradient until eps outweighs it, and from there on they shrink.",
)
def clipped_below_eps(
    history: TrainingHistory, *, share: float = 1.0, steps: int = 64, min_steps: int = 32
) -> Finding | None:
    """The median root mean square of clipped gradients is below `share` of the eps of an Adam, and was not before.

    Over the newest `steps` clean steps, at least `min_steps`. That of all elements together: single tensors may lie
    lower.
    """
    newest = list(history.clean)[-steps:]
    if len(newest) < min_steps:
        return None
    kinds = [s for s in history.model.optimizer_settings if "Adam" in str(s.get("kind", ""))]
    known = [s["eps"] for s in kinds if isinstance(s.get("eps"), (int, float)) and s["eps"] > 0.0]
    counts = [s.get("num_parameters") for s in history.model.optimizer_settings]
    elements = sum(count for count in counts if isinstance(count, (int, float)))
    if not known or not elements:
        return None
    eps, root = max(known), math.sqrt(elements)
    before, after = (median([size / root for size in sizes]) for sizes in
                     ([e.norm for e in newest], [e.norm * e.clip_coef for e in newest]))  # fmt: skip
    if not after < share * eps or not before > share * eps:
        return None
    by = history.model.clip_policy or "Clipping"
    return Finding(
        f"{by} leaves elements of {after:.2g} (root mean square), less than the optimizer's eps of {eps:g}; "
        f"before it they were {before:.2g}.",
        *ends(newest),
        evidence={"rms": after, "rms_before": before, "eps": eps, "median_coef": median([e.clip_coef for e in newest])},
        confidence=0.9,
    )


@rule(
    "growing-norm",
    reads="the average of ln(norm) against its least, and the loss",
    source="our own, relative to the run; Megatron-LM calls 10 times the largest of the first 100 unexpectedly large",
    remedy="Lower the learning rate, add warm-up, and clip (max_norm at a few times the usual norm) before the loss "
    "follows the norm.",
    needs_descent=True,
    needs_harm=True,
)
def growing_norm(
    history: TrainingHistory, *, ratio: float = 10.0, ratio_alone: float = 100.0, min_steps: int = 100
) -> Finding | None:
    """The average norm is `ratio` times its least, and the loss is not at its best; without losses `ratio_alone` times.

    From `min_steps` clean steps on: norms that grow while the loss falls are how some models learn. Silent where the
    loss may rise by design, and while other data are being learnt: it jumped within one step, and has come down since.
    """
    trend, losses = history.norm_trend, history.loss_trend
    if trend.count < min_steps:
        return None
    grown = exp(trend.mean - trend.best)
    has_loss = losses.count >= min_steps
    if grown <= (ratio if has_loss else ratio_alone):
        return None
    if has_loss and losses.mean <= losses.best + 0.25 * max(losses.first - losses.best, 0.0):
        return None
    if may_rise(history) or signals_of(history).is_learnt_anew:
        return None
    last = history.clean[-1].step
    return Finding(
        f"The gradient norm has grown to {exp(trend.mean):.3g}, {grown:.3g} times what it was at step "
        f"{trend.best_step}" + (", and the loss has come up from its best." if has_loss else "."),
        trend.best_step,
        last,
        evidence={"norm": exp(trend.mean), "ratio": grown, "threshold": ratio},
        confidence=0.8,
    )


@rule(
    "norm-jump",
    of="growing-norm",
    remedy="Something changed at that step: the learning rate, the data, the number of accumulated batches or whether "
    "their loss is divided by it, a layer that was unfrozen or overwritten.",
    needs_harm=True,
)
def norm_jump(history: TrainingHistory, *, run: int = 10, ratio: float = 5.0, back: int = 512) -> Finding | None:
    """Norms jumped to at least `ratio` times their average within one step and stayed there for `run` steps or more.

    Of the newest `back` steps. Silent where the loss falls by a fifth in the 60 steps from there: learning has set in.
    Info where the loss keeps what it has gained, and while other data are being learnt.
    """
    newest = history.clean[-1].step if history.clean else 0
    for spike in reversed(history.norm_trend.spikes):
        grown = exp(spike.value - spike.mean)
        if spike.last_step - spike.first_step + 1 >= run and grown >= ratio and newest - spike.first_step < back:
            after = [e.norm for e in history.clean if e.step >= spike.first_step][:50]
            usual = exp(spike.mean)
            if not after or median(after) < ratio * usual or _has_begun_to_learn(history, spike.first_step):
                continue
            is_felt = is_felt_by_the_loss(history) and not signals_of(history).is_learnt_anew
            return Finding(
                f"The gradient norm jumped at step {spike.first_step} from about {usual:.3g} to {median(after):.3g}, "
                f"the median of the {len(after)} steps from there.",
                spike.first_step,
                spike.last_step,
                severity="warning" if is_felt else "info",
                evidence={"before": usual, "after": median(after), "threshold_ratio": ratio},
                confidence=0.85,
            )
    return None


def _has_begun_to_learn(history: TrainingHistory, step: int) -> bool:
    """Whether the loss falls by a fifth within the 60 steps from `step` on, against the 20 before it."""
    entries = signals_of(history).loss_entries
    before = [e.loss for e in entries if step - 20 <= e.step < step and e.loss is not None]
    after = [e.loss for e in entries if step <= e.step < step + 60 and e.loss is not None][-20:]
    return bool(before and after) and median(after) < 0.8 * median(before)


@rule(
    "layer-norm-imbalance",
    reads="each tensor's usual gradient, at first and lately",
    source="torchmortem's layer ratio of 100, taken relative to how the layers began",
    remedy="One layer's gradient runs away from the others': look at its weights and its input, give it a lower "
    "learning rate, or normalise before it.",
)
def layer_norm_imbalance(
    history: TrainingHistory, *, ratio: float = 100.0, min_tensors: int = 4, min_samples: int = 6
) -> Finding | None:
    """One tensor's gradient has grown `ratio` times more than the median tensor's has since the run began.

    With at least `min_tensors` tensors that have `min_samples` samples each. Info where the loss keeps what it has
    gained.
    """
    at_first, lately = history.tensors.column("first_log_rms"), history.tensors.column("log_rms")
    if max(map(operator.sub, lately, at_first), default=0.0) <= math.log(ratio) / 2:
        return None
    counts = history.tensors.column("num_samples")
    known = [  # NaN of what was never anything but zeros
        (now - first, now, place)
        for place, (count, first, now) in enumerate(zip(counts, at_first, lately, strict=True))
        if count >= min_samples and now == now
    ]
    if len(known) < min_tensors:
        return None
    worst, _, place = max(known)
    usual = median([growth for growth, _, _ in known])
    if worst - usual <= math.log(ratio):
        return None
    largest = max(now for _, now, _ in known)
    name = list(history.tensors)[place]
    track = history.tensors[name]
    if track.log_rms < largest - math.log(10.0):  # it began from nearly nothing, as zero-initialised layers do
        return None
    times = exp(worst - usual)
    return Finding(
        f"The gradient of {name} has grown {times:.3g} times more than the median tensor's.",
        track.first_step,
        track.last_step,
        layers=(name,),
        severity="warning" if is_felt_by_the_loss(history) else "info",
        evidence={"relative_growth": times, "norm": track.norm, "threshold": ratio},
        confidence=0.7,
    )


@rule(
    "unscaled-accumulation",
    reads="backward passes a step, clip coefficients of the newest clean steps, and sampled update ratios",
    source="our own: the sum of n gradients is n times their mean",
    remedy="Divide the loss of each micro-batch by their number before backward(), so that the step sees the mean "
    "gradient; or raise max_norm with it, and lower the learning rate.",
)
def unscaled_accumulation(
    history: TrainingHistory, *, share: float = 2.0, steps: int = 20, update: float = 0.033
) -> Finding | None:
    """Several backward passes a step, and a median clip coefficient below `share` divided by their number.

    Over the newest `steps` clean steps. Or, where nothing is clipped, updates above a share `update` of the weights,
    from 20 steps after the first sample on.
    """
    passes = history.model.backward_per_step
    newest = signals_of(history).clean[-steps:]
    if passes is None or passes < 3 or len(newest) < steps:
        return None
    coef = median([e.clip_coef for e in newest])
    peak = history.updates.peak
    if coef >= share / passes:
        if coef < 1.0 or peak is None or peak.ratio <= update:
            return None
        return Finding(
            f"{passes} backward passes are added up for each step, and step {peak.step} changed the median weight by "
            f"{peak.ratio:.2g} times its norm: it looks as if the losses were not divided by their number.",
            peak.step,
            newest[-1].step,
            evidence={"backward_per_step": passes, "update_ratio": peak.ratio, "threshold": update},
            confidence=0.5,
        )
    return Finding(
        f"{passes} backward passes are added up for each step, and the sum is clipped to {coef:.2g} of itself: it "
        "looks as if the losses were not divided by their number.",
        *ends(newest),
        evidence={"backward_per_step": passes, "median_coef": coef, "threshold": share / passes},
        confidence=0.6,
    )
