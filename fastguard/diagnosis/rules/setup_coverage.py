"""Rules on gradients that do not arrive, or say nothing, and on running statistics."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from .. import needs
from ..finding import Finding, Severity, count, listed
from ..needs import descent, margin
from ..registry import rule
from ..signals import ends, median, signals_of

TITLE = "Set-up"

_BACKWARD = "fastguard.wrap_backward guards optimizers that step within the backward pass."


def _pattern(history: TrainingHistory) -> tuple[str, str, str]:
    """Why no gradient may be there: a name, what was seen, and what to do; empty where nothing fits."""
    notes = history.model
    others = {*notes.not_in_optimizer}
    moved = [name for name in notes.moved_between if name in others]
    is_stale = bool(notes.names) and len(others) == len(notes.names) - len(notes.without_gradient) > 0
    reached = notes.num_reached_unseen
    if notes.gradients_elsewhere:
        name = notes.gradients_elsewhere
        return "elsewhere", f"the parameters have `{name}`", f"Their gradients are in `{name}`: guard what reads it."
    if is_stale or moved:
        how = "; they change all the same" if moved else ""
        return (
            "other-parameters",
            f"the model's parameters are not the optimizer's{how}",
            "Make and wrap the optimizer after the model was moved, sharded or replaced, or guard what trains it.",
        )
    if notes.num_cleared_gradients and not (notes.moved_between or notes.moved_in_step):
        return (
            "cleared-before-step",
            "a backward pass left gradients that were gone when the optimizer stepped",
            "Call zero_grad() after step(), or before backward(): not between backward() and step().",
        )
    if reached and notes.moved_between:
        return (
            "step-in-backward",
            "backward passes reach them, and they change before the optimizer steps",
            f"Something steps within the backward pass. {_BACKWARD}",
        )
    if notes.moved_in_step:
        return (
            "other-gradients",
            "the optimizer changes them all the same",
            "It takes its gradients from elsewhere (main_grad, a projection, copies in float32): guard the optimizer "
            "that holds these.",
        )
    if notes.moved_between:
        return "trained-elsewhere", "they change between its steps", f"Guard what trains them. {_BACKWARD}"
    if reached == 0:
        return (
            "no-backward",
            "no backward pass reaches them",
            "Is backward() called, on a loss that hangs on these parameters (no detach(), no no_grad())? Was the model "
            "moved, sharded or replaced after the optimizer was made?",
        )
    return "", "", ""


@rule(
    "no-gradient",
    severity="critical",
    reads="the norms of all steps, how many elements the last gradients had, whether backward passes reach the "
    "parameters, and whether these move",
    source="our own: a parameter that gets no gradient does not learn, whatever the loss does",
    remedy="Does backward() reach these parameters? Is zero_grad() called between backward() and step()? Was the "
    "optimizer made before the model was moved, replaced or wrapped? Does something else step for it?",
)
def no_gradient(history: TrainingHistory, *, steps: int = 10) -> Finding | None:
    """From the first step on, for at least `steps`, all gradients were zero or missing; silent where the loss is zero.

    Critical; a warning where gradients are there and zero, and there is a reward for an objective, or no loss to tell
    whether there is anything to learn.
    """
    if history.num_clean < steps or history.num_clean != history.num_steps or history.norm_max != 0.0:
        return None
    if history.lacks_norms or (history.losses.count and history.losses.max == 0.0):
        return None
    name, seen, remedy = _pattern(history)
    num_seen = history.model.num_seen
    are_there = bool(len(history.tensors) if num_seen is None else num_seen)
    is_known = not are_there or name == "cleared-before-step"
    is_doubtful = not is_known and (not history.losses.count or history.model.objective == "reward")
    what = "All gradients were zero" if are_there else "All gradients were zero, or missing,"
    return Finding(
        f"{what} at each of {history.num_clean} steps" + (f": {seen}." if seen else "."),
        severity="warning" if is_doubtful else "critical",
        layers=history.model.moved_in_step[:8] or history.model.moved_between[:8],
        evidence={"num_steps": history.num_clean, "threshold_steps": steps, **({"pattern": name} if name else {})},
        recommendation=remedy,
        confidence=0.7 if is_doubtful else 0.97,
    )


@rule(
    "unseen-updates",
    reads="parameters that never had a gradient, samples of their values around steps, and whether backward passes "
    "reach them",
    source="our own: what moves without a gradient that the guard sees is trained by something else",
    remedy="Something else trains these parameters: neither their norm is recorded, nor are they clipped or skipped. "
    "Guard that, too: wrap([a, b], model), or wrap_backward for what steps within the backward pass.",
    cause=("trained-elsewhere", "Parameters are being updated by code that fastguard does not see."),
    weight=0.95,
    explains="untrained-parameters unseen-updates",
)
def unseen_updates(history: TrainingHistory) -> Finding | None:
    """Trainable parameters change although the guard never saw a gradient of theirs, while it did of others.

    A warning where a step of the optimizer changes them, or a backward pass reaches them; else info: averages of other
    weights look the same.
    """
    notes, never = history.model, {*history.model.never_seen}
    names = [name for name in dict.fromkeys((*notes.moved_in_step, *notes.moved_between)) if name in never]
    if not names or not history.norm_max > 0.0:
        return None
    is_trained = any(name in never for name in notes.moved_in_step) or bool(notes.num_reached_unseen)
    _, seen, remedy = _pattern(history)
    return Finding(
        f"{count(len(names), 'parameter')} changed without a gradient that the guard saw: {listed(names)}"
        + (f"; {seen}." if seen else "."),
        severity="warning" if is_trained else "info",
        layers=tuple(names[:8]),
        evidence={"num_moved": len(names), "num_never_seen": len(never), "num_seen": notes.num_seen},
        recommendation=remedy,
        confidence=0.9 if is_trained else 0.6,
    )


@rule(
    "no-signal",
    reads="norms of exactly zero among others, and the losses of these steps",
    source="our own: a batch whose advantages are all equal, or whose labels are all ignored, has a gradient of zeros",
    remedy="These batches teach nothing: groups of samples with the same reward (filter them, or draw more varied "
    "ones), labels that are all the ignored index (truncation, a wrong mask), or a loss that is met.",
)
def no_signal(history: TrainingHistory, *, steps: int = 3, share: float = 0.01, most: float = 0.5) -> Finding | None:
    """In the window at least `steps` steps, and a `share`, had gradients of exactly zero, while others had not.

    Info; a warning if they are more than a share `most` of at least 50 and their loss is not zero: not with rewards,
    margins or games.
    """
    if history.norm_min > 0.0:
        return None
    zero = [e for e in history.clean if e.norm == 0.0]
    num = len(history.clean)
    if len(zero) < max(steps, share * num) or len(zero) == num or not history.norm_max > 0.0:
        return None
    if zero[-1] is history.clean[-1] and all(e.norm == 0.0 for e in list(history.clean)[-len(zero) :]):
        return None  # they have died, or all is learnt
    losses = [e.loss for e in zero if e.loss is not None]
    are_met = bool(losses) and all(loss == 0.0 for loss in losses)
    is_high = num >= 50 and len(zero) > most * num and bool(losses) and not are_met
    is_wrong = is_high and descent(history) is not False and not margin(history)
    severity: Severity = "warning" if is_wrong and signals_of(history).progress < 0.5 else "info"
    return Finding(
        f"{count(len(zero), 'step')} of the last {num} had gradients of exactly zero"
        + (", and a loss of zero." if are_met else "."),
        *ends(zero),
        severity=severity,
        evidence={"num_steps": len(zero), "share": len(zero) / num, "threshold_share": share},
        confidence=0.85,
    )


@rule(
    "running-statistics-apart",
    reads="running mean and variance of BatchNorm modules beside those of a training batch; validation losses",
    source="Ioffe and Szegedy 2015, section 3.1: evaluation takes the population's statistics for the batch's",
    remedy="Look at momentum (0.1 is usual, 0 never follows), at eval() or reset_running_stats() in the loop, at "
    "batches of a few samples, at statistics in half precision, and at whether training data come in another order or "
    "scale than in validation.",
    cause=(
        "normalisation-statistics",
        "In evaluation, BatchNorm normalises with statistics that differ from those of the batches.",
    ),
    weight=0.97,
    explains="overfitting label-noise validation-inputs-differ",
    cause_needs=(needs.batch_statistics,),
)
def running_statistics_apart(
    history: TrainingHistory, *, gap: float = 0.5, ratio: float = 2.0, worse: float = 1.1, min_steps: int = 30
) -> Finding | None:
    """A BatchNorm's running mean is more than `gap` standard deviations from a batch's, or its variance a factor of
    more than `ratio`, over all channels, after `min_steps` clean steps.

    Info; a warning where nearly all validation losses are `worse` times the training loss. Critical at any step where
    the running statistics are not finite.
    """
    lost = [name for name, (away, _) in history.model.norm_statistics.items() if away == math.inf]
    if lost:
        return _lost(history, lost)
    if history.num_clean < min_steps:
        return None
    apart = {
        name: (away, times)
        for name, (away, times) in history.model.norm_statistics.items()
        if away > gap or not 1.0 / ratio <= times <= ratio
    }
    if not apart:
        return None
    worst = max(apart, key=lambda name: max(apart[name][0], abs(math.log(apart[name][1]))))
    away, times = apart[worst]
    known = [v for v in history.validations if math.isfinite(v.train_loss) and v.train_loss > 0.0]
    is_felt = len(known) > 1 and sum(v.val_loss > worse * v.train_loss for v in known) >= 0.8 * len(known)
    level = signals_of(history).loss_level
    return Finding(
        f"The running statistics of {count(len(apart), 'BatchNorm module')} of {len(history.model.norm_statistics)} "
        f"are not those of the batches ({listed(list(apart))}): of {worst} the means are {away:.2g} standard "
        f"deviations apart, and the variance is {times:.2g} times the batch's.",
        severity="warning" if is_felt else "info",
        layers=tuple(apart)[:8],
        evidence={
            "gap": away,
            "variance_ratio": times,
            "val_loss": median([v.val_loss for v in known[-3:]]) if known else None,
            "train_loss": level,
            "threshold_gap": gap,
        },
        confidence=0.9 if is_felt else 0.6,
    )


def _lost(history: TrainingHistory, names: list[str]) -> Finding:
    newest = history.recent[-1].step if history.recent else None
    return Finding(
        f"The running statistics of {count(len(names), 'BatchNorm module')} of {len(history.model.norm_statistics)} "
        f"are not finite ({listed(names)}): in eval mode what comes out is NaN, or zero.",
        newest,
        newest,
        severity="critical",
        layers=tuple(names)[:8],
        evidence={"num_not_finite": len(names), "num_modules": len(history.model.norm_statistics)},
        confidence=1.0,
    )
