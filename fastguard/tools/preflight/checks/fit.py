"""A few batches learnt by heart, with the learning rate varied."""

from __future__ import annotations

import math

from ....diagnosis import Finding
from ..evidence import Evidence
from ..fitting import LEAST_STEPS, Attempt, Fit, has_learnt
from ..registry import check

TITLE = "Trial steps"
_OVERFIT = 'Karpathy 2019, "A recipe for training neural networks": overfit one batch'


def _floor(evidence: Evidence, fit: Fit) -> float:
    """What an attempt has to come below for having learnt something: the best constant answer, or the start."""
    start = fit.given.start
    return start if evidence.baseline is None else min(start, evidence.baseline)


def _evidence(fit: Fit) -> dict[str, object]:
    return {f"lr {one.lr:.3g}": one.end for one in sorted(fit.attempts.values(), key=lambda one: one.lr)}


def _is_judged(fit: Fit | None) -> bool:
    """Whether the given rate was tried for long enough, or broke."""
    return fit is not None and (fit.given.num_steps >= LEAST_STEPS or not math.isfinite(fit.given.end))


def _steps_to_halve(one: Attempt) -> float:
    return math.inf if one.gain <= 0 else 0.5 * abs(one.start) * one.num_steps / one.gain


@check(
    "trial-steps-overshoot",
    cause="learning-rate-too-high",
    depth=3,
    severity="critical",
    reads="the loss of a few batches, trained for some steps at the given learning rate and at others",
    source=_OVERFIT + "; Smith 2017",
    remedy="Divide the learning rate by 10 or 100; fastguard.LearningRateFinder finds one. Warm it up.",
)
def trial_steps_overshoot(
    evidence: Evidence,
    *,
    rises: float = 1.05,
    peak: float = 10.0,
    better: float = 0.8,
    update_ratio: float = 0.4,
    far: float = 100.0,
) -> Finding | None:
    """Trained on a few batches the loss ends above `rises` times its start, or rises to `peak` times, or is lost.

    And with a tenth or less of the rate it ends lower, by 1 - `better` of the start at least, without rising. Fewer
    than ten steps are not judged unless the loss is lost.
    Or the first steps change weights by more than `update_ratio` of their size, the loss rises by half, and a lower
    rate ends lower; or the loss rises to `far` times its start, wherever it ends by luck.
    """
    fit = evidence.fit
    if fit is None or not _is_judged(fit):
        return None
    given = fit.given
    calm = [one for factor, one in fit.attempts.items() if factor < 1.0 and one.is_calm]
    if not calm:
        return None
    best = max(calm, key=lambda one: one.gain)
    start = abs(given.start)
    what = f"goes from {given.start:.3g} to {given.end:.3g}, with a peak of {given.peak:.3g}"
    is_rough = given.update_ratio > update_ratio and given.peak - given.start > 0.5 * start
    is_rough &= given.end > best.end or given.peak - given.start > far * start
    if math.isfinite(given.end) and not is_rough:
        is_above = given.end > given.start + (rises - 1.0) * start
        is_peak = given.peak - given.start > peak * start and given.end > best.end
        if not (is_above or is_peak) or best.end - given.end > -(1.0 - better) * start:
            return None
    elif not math.isfinite(given.end):
        what = f"goes from {given.start:.3g} to NaN or Inf"
    return Finding(
        f"In {given.num_steps} steps on the same batches the loss {what}; at a learning rate of {best.lr:.3g} it comes "
        f"to {best.end:.3g}.",
        severity="warning" if is_rough else "critical",
        evidence={**_evidence(fit), "update_ratio": given.update_ratio},
        confidence=0.75 if is_rough else 0.9,
    )


def _has_gradient(evidence: Evidence) -> bool:
    return any(g is not None and g.numel() and float(g.abs().max()) > 1e-6 for g in evidence.first.gradients.values())


@check(
    "trial-steps-too-short",
    cause="learning-rate-too-low",
    depth=3,
    severity="critical",
    reads="the loss of a few batches, trained for some steps at the given learning rate and at others",
    source=_OVERFIT + "; Smith 2017",
    remedy="Raise the learning rate by 10 to 100 times; fastguard.LearningRateFinder finds one.",
)
def trial_steps_too_short(
    evidence: Evidence,
    *,
    num_steps: float = 2500.0,
    faster: float = 50.0,
    update_ratio: float = 5e-4,
    smallest: float = 1e-7,
) -> Finding | None:
    """At the pace of the trial steps, halving the loss of the same few batches would take more than `num_steps`.

    Steps change weights by less than `update_ratio` of their size, and a higher rate is `faster` times as fast or more.
    Or steps change weights by less than `smallest`, where there are gradients. Fewer than ten steps are not judged.
    """
    fit = evidence.fit
    if fit is None or not _is_judged(fit) or not math.isfinite(fit.given.end) or not abs(fit.given.start) > 0:
        return None
    given = fit.given
    higher = [one for factor, one in fit.attempts.items() if factor > 1.0 and math.isfinite(one.end)]
    higher = [one for one in higher if one.gain > 0.02 * abs(one.start)]
    pace = _steps_to_halve(given)
    if 0.0 <= given.update_ratio < smallest and _has_gradient(evidence):
        return Finding(
            f"A step changes weights by {given.update_ratio:.1g} of their size: less than float32 tells apart, or "
            "hardly more.",
            severity="critical",
            evidence={**_evidence(fit), "update_ratio": given.update_ratio, "threshold": smallest},
            confidence=0.95,
        )
    if not higher or pace < num_steps or not given.update_ratio < update_ratio:
        return None
    best = min(higher, key=_steps_to_halve)
    if _steps_to_halve(best) * faster > pace:
        return None
    return Finding(
        "At the pace of the first steps it would take "
        + (f"{pace:.0f} steps" if math.isfinite(pace) else "for ever")
        + f" to halve the loss of the same batches; at a learning rate of {best.lr:.3g}, {_steps_to_halve(best):.0f}.",
        evidence={**_evidence(fit), "update_ratio": given.update_ratio},
        confidence=0.92,
    )


@check(
    "optimizer-cannot-fit",
    cause="wrong-optimizer-settings",
    depth=4,
    reads="the loss of a few batches, trained with the given optimizer at all rates, and with a plain Adam",
    source=_OVERFIT,
    remedy="Begin with torch.optim.Adam(lr=1e-3), which learns these batches; then change one setting at a time.",
)
def optimizer_cannot_fit(evidence: Evidence, *, share: float = 0.5, least_steps: int = 60) -> Finding | None:
    """With the given optimizer nothing is learnt at any rate, and with Adam the loss falls by more than `share`.

    Of at least `least_steps` steps with either.
    """
    fit = evidence.fit
    if fit is None or not fit.with_adam or fit.with_adam[0].num_steps < least_steps:
        return None
    best = max(fit.with_adam, key=lambda one: one.gain)
    if not has_learnt(best, _floor(evidence, fit), share):
        return None
    return Finding(
        f"At rates from {min(a.lr for a in fit.attempts.values()):.3g} to "
        f"{max(a.lr for a in fit.attempts.values()):.3g} the loss of a few batches stays at {fit.best.end:.3g} or "
        f"above; Adam brings it to {best.end:.3g}.",
        evidence={**_evidence(fit), "with_adam": best.end},
        confidence=0.6,
    )


@check(
    "nothing-is-learnt",
    cause="model-cannot-fit",
    depth=4,
    reads="the loss of a few batches, trained with the given optimizer at all rates, and with a plain Adam",
    source=_OVERFIT,
    remedy="Look at single samples with their targets; then give the model more: units, layers, an activation between.",
)
def nothing_is_learnt(evidence: Evidence, *, share: float = 0.05, least_steps: int = 60) -> Finding | None:
    """Neither the given optimizer, at rates from a hundredth to a hundred times, nor Adam learns a few batches.

    The loss stays within `share` of that of the best constant answer (where that is not known: of the start), for at
    least `least_steps` steps of Adam: a slow model, which takes fewer within the time, is not judged.
    """
    fit = evidence.fit
    if fit is None or not fit.with_adam or fit.with_adam[-1].num_steps < least_steps:
        return None
    floor = _floor(evidence, fit)
    if not abs(floor) > 1e-6:
        return None
    if any(has_learnt(one, floor, share) for one in (*fit.attempts.values(), *fit.with_adam)):
        return None
    least = min(
        (one.end for one in (*fit.attempts.values(), *fit.with_adam) if math.isfinite(one.end)), default=math.nan
    )
    return Finding(
        f"The loss of a few batches comes to {least:.3g} at best, in {fit.with_adam[0].num_steps} steps; the same "
        f"answer for every sample has {floor:.3g}.",
        evidence={**_evidence(fit), "floor": floor},
        confidence=0.75,
    )
