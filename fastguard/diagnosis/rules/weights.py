"""Rules on the weights: updates too large or too small for them, parameters that never learn, initialisation, decay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import takewhile

from ...records import TrainingHistory
from ..finding import Finding, Severity, count, listed
from ..registry import rule
from ..signals import has_had_time, is_felt_by_the_loss, is_stuck, signals_of
from .units_experts import idle_branches

TITLE = "Weights and updates"

_FELT = 0.04  # of the first losses: noise below that is none of large steps
_FRESH = (6.0**-0.5, 0.5**0.5, 1.0)  # of He's spread: torch's own for linear layers, LeCun's and Xavier's, He's


@rule(
    "update-ratio-high",
    reads="sampled weights: norm of the update over norm of the weights",
    source="torchmortem's bound of 0.1; the usual 1e-3 is Karpathy's. First steps are larger, so the bound is too",
    remedy="Each step changes the weights by a large part of themselves: divide the learning rate by 10, or warm it "
    "up.",
    needs_harm=True,
)
def update_ratio_high(
    history: TrainingHistory, *, first: float = 0.5, grown: float = 0.06, growth: float = 2.0, restless: float = 0.5
) -> Finding | None:
    """The median weight's update is above `first` of it at the first sample, or above 0.048 from 20 steps later on.

    Or, in between, above `grown` and `growth` times the first, at the learning rate of the first. From 15 steps after
    the first sample on; silent if the learning rate has come down by then, or still rises. A warning where the loss
    rises; where 80 losses gained less than 0.3 of the first, or lost it again; where they change from step to step by
    more than a share `restless` of their level; and, certainly, where more than half of the units of a module are dead.
    Else info.
    """
    updates = history.updates
    first_sample, early, peak = updates.first, updates.early, updates.peak
    if first_sample is None or not history.clean or history.clean[-1].step - first_sample.step < 15:
        return None
    lrs, is_rising = signals_of(history).lrs, signals_of(history).is_lr_rising
    has_come_down = bool(lrs) and lrs[-1] < 0.7 * lrs[0] and len(lrs) == history.num_clean
    grows = early is not None and early.ratio > max(grown, growth * first_sample.ratio)
    is_at_first_lr = early is not None and (early.lr or math.inf) <= 1.02 * (first_sample.lr or 0.0)
    if first_sample.ratio > first and not has_come_down:
        sample, limit = first_sample, first
    elif early is not None and grows and is_at_first_lr and not has_come_down:
        sample, limit = early, grown
    elif peak is None or peak.ratio <= 0.048:
        return None
    elif peak.lr is None or (2.0 * peak.lr >= history.lrs.max and not is_rising):
        sample, limit = peak, 0.048
    else:
        return None
    have_died = any(window.last.value.dead_unit_ratio > 0.5 for _, window in history.activations.items())
    is_hurt = have_died or _is_hurt(history, restless)
    return Finding(
        f"Step {sample.step} changed the median weight by {sample.ratio:.2g} times its norm.",
        sample.step,
        history.weights.last_step,
        severity="warning" if is_hurt else "info",
        evidence={
            "update_ratio": sample.ratio,
            "threshold": limit,
            "num_samples": updates.count,
            "is_certain": have_died,
        },
        confidence=0.9 if sample.ratio > 2 * limit else 0.75,
    )


def _is_hurt(history: TrainingHistory, restless: float) -> bool:
    """Whether the loss says that steps are too large: it rises, or has not gained and kept much in 80 steps."""
    trend = history.loss_trend
    if not trend.count or (trend.count >= 10 and trend.mean > 1.2 * trend.first > 0.0):
        return True
    if trend.count < 80 and not history.has_ended:
        return False
    s = signals_of(history)
    is_near_zero = s.loss_noise <= _FELT * trend.first or s.progress >= 0.85  # where any loss is restless
    if s.loss_noise > restless * s.loss_level and not is_near_zero:
        return True
    goes_on = len(s.loss_levels) >= 3 and s.loss_levels[-1] < 0.95 * s.loss_levels[-3] - 0.5 * s.loss_noise
    return not (s.progress >= 0.3 or goes_on) or is_felt_by_the_loss(history)


@rule(
    "update-ratio-low",
    reads="sampled weights: norm of the update over norm of the weights; and the loss",
    source="torchmortem's bound of 1e-5, asked with a loss that stands still, and so less strict",
    remedy="The steps are too small to learn from: raise the learning rate by 10 to 100 times; look for a scheduler "
    "that holds it down, and for gradients that are divided twice.",
)
def update_ratio_low(
    history: TrainingHistory, *, ratio: float = 5e-4, ratio_alone: float = 1e-7, progress: float = 0.03
) -> Finding | None:
    """The median weight changes by less than `ratio` of itself a step, and the loss has fallen by less than `progress`.

    Without losses, by less than `ratio_alone`. In all samples (two at least), after 30 steps at half of the largest
    learning rate or more, once it no longer rises.
    """
    s = signals_of(history)
    updates = history.updates
    if updates.count < 2 or s.num_full_lr < 30 or s.is_lr_rising or history.num_clean < 30:
        return None
    known = history.loss_trend.count >= 30
    if known and not s.fall < progress:
        return None
    value = max(sample.ratio for sample in (updates.first, updates.peak) if sample is not None)
    if value >= (ratio if known else ratio_alone) or value == 0.0:
        return None
    return Finding(
        f"The median weight changes by no more than {value:.2g} of itself a step"
        + (f", and the loss has come down by {max(s.fall, 0.0):.1%} only." if known else "."),
        history.clean[0].step,
        history.weights.last_step,
        evidence={"update_ratio": value, "threshold": ratio, **({"progress": s.fall} if known else {})},
        confidence=0.9,
    )


@rule(
    "unchanged-weights",
    of="untrained-parameters",
    source="SageMaker Debugger UnchangedTensor (3 steps)",
    remedy="These parameters never change: are they frozen by mistake, missing from the optimizer, in a group with a "
    "learning rate of 0, or cut off by detach() or no_grad()?",
)
def unchanged_weights(history: TrainingHistory, *, samples: int = 3, share: float = 0.5) -> Finding | None:
    """Weights that were the same in `samples` samples, while others changed, though they have a gradient.

    Not frozen ones. Info if they are more than a `share`, and where the gradient is zero or missing: other rules say
    what that means.
    """
    same, num_known = [], 0
    frozen = {*history.model.without_gradient}
    for name, window in history.weights.current():
        if len(window.recent) < samples or name in frozen:
            continue
        num_known += 1
        last = window.last.value
        if last.update_norm or last.norm != window.recent[0].value.norm:  # nearly all are let through here
            continue
        values = [s.value for s in window.recent]
        first = values[0]
        if all(v.norm == first.norm and v.std == first.std and not v.update_norm for v in values) and first.norm:
            same.append((name, window.first.step))
    if not same or len(same) == num_known:
        return None
    names = [name for name, _ in same]
    tracks = [history.tensors[name] for name in names if name in history.tensors]
    total = history.tensors.num_samples
    has_gradient = any(track.norm > 0.0 and not track.num_zero and track.num_samples == total for track in tracks)
    return Finding(
        f"{count(len(same), 'parameter')} of {num_known} did not change at all: {listed(names)}.",
        min(step for _, step in same),
        history.weights.last_step,
        severity="info" if len(same) > share * num_known or not has_gradient else "warning",
        layers=tuple(names[:8]),
        evidence={"num_unchanged": len(same), "num_parameters": num_known, "threshold_samples": samples},
        confidence=0.9,
    )


def _severity_of_share(num: int, total: int, share: float) -> Severity:
    return "info" if total and num > share * total else "warning"


@rule(
    "parameters-not-in-optimizer",
    of="untrained-parameters",
    leads=True,
    reads="parameters of the model against those of the optimizer",
    source="our own: what no optimizer holds never changes",
    remedy="Make the optimizer after the model is complete and on its device, or add them with add_param_group. If "
    "another optimizer trains them, guard both together: wrap([a, b], model).",
)
def parameters_not_in_optimizer(history: TrainingHistory, *, share: float = 0.75) -> Finding | None:
    """Trainable parameters that the optimizer does not have; info if they are more than a `share` of the model's.

    Unless after a hundred losses hardly anything was learnt. Critical if it has none of them.
    """
    names = history.model.not_in_optimizer
    if not names or not history.num_steps:
        return None
    total = len(history.model.names)
    share = 1.0 if is_stuck(history, 0.15, 100) else share
    return Finding(
        f"{count(len(names), 'trainable parameter')} of the model "
        f"{'is' if len(names) == 1 else 'are'} not in the optimizer: {listed(names)}.",
        severity="critical" if len(names) == total > 1 else _severity_of_share(len(names), total, share),
        layers=tuple(names[:8]),
        evidence={"num_missing": len(names), "num_parameters": total, "threshold_share": share},
        confidence=0.95,
    )


@rule(
    "frozen-parameters",
    of="untrained-parameters",
    remedy="If that is intended, remove them from the optimizer to silence this. Otherwise set requires_grad_(True) "
    "before the optimizer is made.",
)
def frozen_parameters(history: TrainingHistory, *, share: float = 0.5, near: float = 0.1) -> Finding | None:
    """Parameters that cannot learn; a warning unless they are more than a `share` of the model, or its first layers.

    First layers are at least four parameters from the beginning of the model on, or fewer whose spread differs by more
    than a share `near` from an initialisation. Info, too, where the optimizer was given none of them, for the first 100
    losses, and where 0.8 of the first loss was gained, unless the optimizer holds fresh weights that never had a
    gradient. No excuse counts for fresh weights where a run ends with less than half of the first loss gained. A
    warning where the last layer is frozen, earlier ones are not, and 100 losses gained less than half of the first.
    """
    notes = history.model
    newest = () if history.last is None else history.last.tensors.names  # some may have joined since that was noted
    names = [*(name for name in notes.without_gradient if name not in newest), *notes.zero_lr]
    if not names or not history.num_steps:
        return None
    total, frozen = len(notes.names), set(names)
    leading = 0
    while leading < total and notes.names[leading] in frozen:
        leading += 1
    are_fresh = _are_fresh(history, frozen, near)
    on_purpose = leading == len(frozen) and (leading >= 4 or (bool(are_fresh) and not any(are_fresh)))
    num_held = _num_held(history)
    progress, num_losses = signals_of(history).progress, history.losses.count
    at_a_stand = is_stuck(history, 0.5, 100, at_end=True)
    on_purpose = (on_purpose or num_held == 0) and not (at_a_stand and history.has_ended and {*are_fresh} == {True})
    is_early = num_losses > 0 and not has_had_time(history, 100)
    are_forgotten = (num_held or 0) > 0 and {*are_fresh} == {True} and frozen.isdisjoint(history.tensors)
    is_learnt = progress >= 0.8 and leading < len(frozen) and not are_forgotten  # first layers need not learn for that
    usual = "info" if is_early or is_learnt else _severity_of_share(len(names), total, share)
    ends_frozen = total > 0 and notes.names[-1] in frozen and len(frozen) < total and at_a_stand
    return Finding(
        f"{count(len(names), 'parameter')} of {total} cannot learn (frozen, or with a learning rate of 0): "
        f"{listed(names)}.",
        severity="info" if on_purpose else "warning" if ends_frozen else usual,
        layers=tuple(names[:8]),
        evidence={"num_frozen": len(names), "num_parameters": total, "threshold_share": share},
        confidence=0.8,
        recommendation=""
        if num_held != 0
        else "If that is intended, there is nothing to do: the optimizer does not have them.",
    )


def _num_held(history: TrainingHistory) -> int | None:
    """How many elements the optimizer holds that have no gradient: 0 where it was not given what is frozen."""
    settings, last = history.model.optimizer_settings, history.last
    held = [group.get("num_parameters") for group in settings]
    if last is None or history.model.zero_lr or not held or not all(isinstance(n, (int, float)) for n in held):
        return None
    return sum(int(n) for n in held if isinstance(n, (int, float))) - int(last.tensors.total_row()[0])


def _are_fresh(history: TrainingHistory, names: Iterable[str], near: float) -> list[bool]:
    """Of the weight matrices among `names`: whether their spread is one that a usual initialisation gives."""
    known = history.model.initialization
    ratios = [actual / expected for actual, expected in (known[name] for name in names if name in known)]
    return [any(abs(ratio - usual) <= near * usual for usual in _FRESH) for ratio in ratios]


@rule(
    "missing-gradients",
    of="untrained-parameters",
    remedy="These parameters are trainable and in the optimizer, but the loss does not depend on them: are they used "
    "in the forward pass, and is nothing between them and the loss detached?",
)
def missing_gradients(
    history: TrainingHistory, *, samples: int = 4, share: float = 0.5, progress: float = 0.3, min_steps: int = 40
) -> Finding | None:
    """Parameters without a gradient, from `samples` samples on: info, as a head that a task does not use has none.

    A warning where they are the first of the model, weights among them, as where something detaches the way to them; or
    where `min_steps` losses gained less than a share `progress` of the first. Info if they are more than a `share` of
    the model's (of the first ones, seven tenths), unless 100 losses gained hardly anything. Experts and other branches,
    some of which have a gradient, do not count: idle-experts reports them.
    """
    notes, tensors = history.model, history.tensors
    if not notes.names or tensors.num_samples < samples:
        return None
    newest = () if history.last is None else history.last.tensors.names  # some may have joined since the last sample
    if newest == notes.names or tensors.hold(notes.names):
        return None
    explained = {*notes.not_in_optimizer, *notes.without_gradient, *notes.zero_lr}
    explained.update(notes.moved_in_step, notes.moved_between)  # of these unseen-updates tells
    absent = {*notes.names}.difference(tensors, explained, newest)
    if notes.num_seen is not None:
        absent &= {*notes.never_seen}
    if not absent or absent == {*notes.names}:
        return None
    absent -= idle_branches(notes.names, absent)
    names = [name for name in notes.names if name in absent]
    if not names:
        return None
    first = set(takewhile(set(names).__contains__, notes.names))
    has_weights = not first.isdisjoint(notes.initialization)
    is_lost = has_weights or not history.losses.count or is_stuck(history, progress, min_steps)
    share = 1.0 if is_stuck(history, 0.15, 100) else max(share, 0.7) if has_weights else share
    return Finding(
        f"{count(len(names), 'parameter')} never had a gradient: {listed(names)}.",
        history.recent[0].step,
        tensors.last_step,
        severity=_severity_of_share(len(names), len(notes.names), share) if is_lost else "info",
        layers=tuple(names[:8]),
        evidence={"num_missing": len(names), "num_parameters": len(notes.names), "threshold_samples": samples},
        confidence=0.85,
    )
