"""A few batches, learnt by heart at several learning rates."""

from __future__ import annotations

import math
from typing import Any

from ....diagnosis.finding import Seen
from ..asking import check
from ..evidence import Evidence
from ..losses import LEAST_STEPS, Attempt, Fit, has_learnt

TITLE = "Trial steps"
_OVERFIT = 'Karpathy 2019, "A recipe for training neural networks": overfit one batch'


def _ends(fit: Fit) -> dict[str, Any]:
    return {f"lr {one.lr:.3g}": one.end for one in sorted(fit.attempts.values(), key=lambda one: one.lr)}


def _steps_to_halve(one: Attempt) -> float:
    return math.inf if one.gain <= 0 else 0.5 * abs(one.start) * one.num_steps / one.gain


@check(
    "trial-steps-overshoot",
    cause="learning-rate-too-high",
    depth=3,
    severity="critical",
    see="In {_num} steps on the same batches the loss {_what}; at a learning rate of {_lr:.3g} it ends at {_end:.3g}.",
    sure=0.9,
    source=_OVERFIT + "; Smith 2017",
    remedy="Divide the learning rate by 10 or 100; fastguard.LearningRateFinder finds one. Warm it up.",
)
def trial_steps_overshoot(evidence: Evidence, *, rises: float = 1.05, peak: float = 10.0) -> Seen | None:
    """Trained on a few batches, the loss ends above `rises` times its start, rises to `peak` times it, or becomes NaN.

    With a tenth or less of the rate it ends lower by at least 1 - 0.8 of the start, without rising. Fewer than ten
    steps are not judged unless the loss becomes NaN.
    """
    fit = evidence.fit
    calm = [one for factor, one in fit.attempts.items() if factor < 1.0 and one.is_calm] if fit is not None else []
    if fit is None or not calm or (fit.given.num_steps < LEAST_STEPS and math.isfinite(fit.given.end)):
        return None
    given, start, best = fit.given, abs(fit.given.start), max(calm, key=lambda one: one.gain)
    what = f"goes from {given.start:.3g} to NaN or Inf"
    if math.isfinite(given.end):
        what = f"goes from {given.start:.3g} to {given.end:.3g}, with a peak of {given.peak:.3g}"
        is_peak = given.peak - given.start > peak * start and given.end > best.end
        is_rise = given.end > given.start + (rises - 1.0) * start
        if not (is_peak or is_rise) or best.end - given.end > -(1.0 - 0.8) * start:
            return None
    return Seen(**_ends(fit), _num=given.num_steps, _what=what, _lr=best.lr, _end=best.end)


@check(
    "trial-steps-too-short",
    cause="learning-rate-too-low",
    depth=3,
    severity="critical",
    see="At the pace of the first steps it takes {_steps} to halve the loss of the same batches; at a learning rate of "
    "{_lr:.3g}, {_best:.0f}.",
    sure=0.92,
    source=_OVERFIT + "; Smith 2017",
    remedy="Raise the learning rate by 10 to 100 times; fastguard.LearningRateFinder finds one.",
)
def trial_steps_too_short(evidence: Evidence, *, num_steps: float = 2500.0, faster: float = 50.0) -> Seen | None:
    """At the pace of the trial steps, halving the loss of the same few batches would take more than `num_steps`.

    Steps change weights by less than 5e-4 of their size, and a higher rate is at least `faster` times as fast. Or steps
    change weights by less than 1e-7 although there are gradients. Fewer than ten steps are not judged.
    """
    fit = evidence.fit
    if fit is None or fit.given.num_steps < LEAST_STEPS or not math.isfinite(fit.given.gain) or not fit.given.start:
        return None
    given, pace = fit.given, _steps_to_halve(fit.given)
    higher = [one for factor, one in fit.attempts.items() if factor > 1.0 and math.isfinite(one.end)]
    higher = [one for one in higher if one.gain > 0.02 * abs(one.start)]
    gradients = [g for g in evidence.first.gradients.values() if g is not None and g.numel()]
    if 0.0 <= given.update_ratio < 1e-7 and any(float(g.abs().max()) > 1e-6 for g in gradients):
        see = "A step changes weights by {update_ratio:.1g} of their size, which float32 can hardly represent."
        return Seen(**_ends(fit), update_ratio=given.update_ratio, see=see, sure=0.95)
    best = min(higher, key=_steps_to_halve, default=given)
    if pace < num_steps or not given.update_ratio < 5e-4 or best is given or _steps_to_halve(best) * faster > pace:
        return None
    steps = f"{pace:.0f} steps" if math.isfinite(pace) else "for ever"
    measured = {**_ends(fit), "update_ratio": given.update_ratio, "_best": _steps_to_halve(best)}
    return Seen(severity="warning", _steps=steps, _lr=best.lr, **measured)


@check(
    "nothing-is-learnt",
    cause="model-cannot-fit",
    depth=4,
    see="The loss of a few batches reaches {_least:.3g} at best, in {_num} steps; the same answer for every sample has "
    "{floor:.3g}.",
    sure=0.75,
    source=_OVERFIT,
    remedy="Look at single samples with their targets; then give the model more units, layers, or an activation.",
)
def nothing_is_learnt(evidence: Evidence, *, share: float = 0.05, least_steps: int = 60) -> Seen | None:
    """Neither the given optimizer, at a hundredth to a hundred times the rate, nor Adam learns a few batches.

    The loss stays within `share` of the best constant answer's (or of the start, if that is not known), for at least
    `least_steps` steps of Adam. A slow model, which takes fewer within the time, is not judged.
    """
    fit = evidence.fit
    if fit is None or not fit.with_adam or fit.with_adam[-1].num_steps < least_steps:
        return None
    floor = fit.given.start if evidence.baseline is None else min(fit.given.start, evidence.baseline)
    every = [*fit.attempts.values(), *fit.with_adam]
    if not abs(floor) > 1e-6 or any(has_learnt(one, floor, share) for one in every):
        return None
    least = min((one.end for one in every if math.isfinite(one.end)), default=math.nan)
    return Seen(**_ends(fit), floor=floor, _least=least, _num=fit.with_adam[0].num_steps)
