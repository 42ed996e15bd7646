"""Rules on the second moments of Adam and its kin, as they are sampled with the weights."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import TrainingHistory
from ...records.updates import MIN_NUMEL, is_bias
from ..finding import Finding, count, listed
from ..registry import rule
from ..signals import is_felt_by_the_loss

TITLE = "Weights and updates"


@rule(
    "second-moment-collapse",
    of="second-moment-out-of-range",
    remedy="The optimizer has forgotten how large gradients can be, and steps too far when they come back: lower beta2 "
    "(0.95), clip the update (StableAdamW, or AdaGC), warm up again after a pause; in half precision keep its state in "
    "float32.",
    cause=(
        "second-moment-collapse",
        "Adam's second moment has decayed: ordinary gradients now make too large steps.",
    ),
    weight=0.9,
    explains="norm-spike loss-spike growing-norm update-ratio-high loss-divergence loss-oscillation",
)
def second_moment_collapse(
    history: TrainingHistory, *, times: float = 5.0, fallen: float = 0.1, share: float = 0.5
) -> Finding | None:
    """In a `share` of the weights the gradient is `times` what the moment remembers, after that fell below `fallen`.

    Of what it was at most, at an earlier sample. Or the moment of a weight is all zeros while its gradient is not, as
    where half precision rounds it away. A warning for zeros, and where the loss shows it; else info.
    """
    coefs: dict[int, float] = {}  # made when one is wanted
    num: dict[int, int] = {}
    met: dict[int, list[str]] = {}
    zero: dict[str, int] = {}
    for name, window in history.weights.current():
        if is_bias(name) or window.last.value.numel < MIN_NUMEL:
            continue
        peak = before = window.first.value.moment_rms or 0.0
        for point in window.recent:
            step, value = point.step, point.value
            rms, norm = value.moment_rms, value.grad_norm
            if rms is None or norm is None or not math.isfinite(rms) or not math.isfinite(norm):
                continue
            num[step] = num.get(step, 0) + 1
            if value.moment_max == 0.0 and norm > 0.0 and value.update_norm:
                zero[name] = step
            if before < fallen * peak:
                coefs = coefs or {entry.step: entry.clip_coef for entry in history.clean}
                if norm * coefs.get(step, 1.0) / math.sqrt(value.numel) > times * rms:
                    met.setdefault(step, []).append(name)
            peak, before = max(peak, rms), rms
    steps = [step for step, names in met.items() if len(names) >= share * num[step] and num[step] > 1]
    if not steps and not zero:
        return None
    names = list(zero) if zero else met[steps[-1]]
    text = (
        f"The second moment of {count(len(names), 'weight')} is all zeros, though the gradient is not: {listed(names)}."
        if zero
        else f"At step {steps[-1]} the gradients of {len(names)} of {num[steps[-1]]} weights were more than {times:g} "
        f"times what the second moment remembers, which had fallen to less than {fallen:g} of itself."
    )
    return Finding(
        text,
        max(zero.values()) if zero else steps[0],
        history.weights.last_step,
        severity="warning" if zero or is_felt_by_the_loss(history) else "info",
        layers=tuple(names[:8]),
        evidence={"num_weights": len(names), "threshold_times": times, "threshold_fallen": fallen},
        confidence=0.9 if zero else 0.7,
    )


@rule(
    "moment-out-of-bounds",
    of="second-moment-out-of-range",
    leads=True,
    severity="critical",
    reads="sampled weights: the largest second moment at two samples in a row, and the largest norm of all steps",
    source="He et al., ISCA 2023: faults that harm leave values in the optimizer's state that no training makes",
    remedy="An average of squares is larger than the largest square: something other than the optimizer has written "
    "to its state, or memory is faulty. Go back to a checkpoint from before; where it comes again on one machine, test "
    "its memory.",
)
def moment_out_of_bounds(history: TrainingHistory, *, margin: float = 1.1) -> Finding | None:
    """A second moment rose above `margin` times the square of the largest norm, to which weight decay is added.

    From one sample to the next, so that what was there before the guard does not count. Critical where one is not
    finite; silent after a step with NaN or Inf was taken, which explains that.
    """
    if history.num_nonfinite_applied or not history.norm_max > 0.0:
        return None
    decays = [group.get("weight_decay") for group in history.model.optimizer_settings]
    decay = max((abs(d) for d in decays if isinstance(d, (int, float))), default=0.0)
    worst: dict[str, tuple[int, float]] = {}
    for name, window in history.weights.current():
        for earlier, later in pairwise(window.recent):
            before, after = earlier.value.moment_max, later.value.moment_max
            if before is None or after is None or not math.isfinite(before):
                continue
            if after > margin * max(before, (history.norm_max + decay * later.value.abs_max) ** 2):
                worst[name] = later.step, after
                break
    if not worst:
        return None
    names = sorted(worst, key=lambda name: -worst[name][1])
    step, largest = worst[names[0]]
    return Finding(
        f"The second moment of {count(len(names), 'parameter')} came to {largest:.3g}, above the square of the largest "
        f"norm, {history.norm_max**2:.3g}: {listed(names)}.",
        step,
        history.weights.last_step,
        severity="critical" if largest == math.inf else "warning",
        layers=tuple(names[:8]),
        evidence={"moment_max": largest, "norm_max": history.norm_max, "threshold_margin": margin},
        confidence=0.9,
    )
