"""Rules on gradients that do not arrive, or say nothing, and on running statistics."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Seen
from ..registry import rule

TITLE = "Set-up"

_BACKWARD = "fastguard.wrap_backward guards optimizers that step within the backward pass."
_PATTERNS = {  # why no gradient may be there: what is seen, and what to do
    "other-parameters": (
        "the model's parameters are not the optimizer's",
        "Make and wrap the optimizer after the model was moved, sharded or replaced, or guard what trains it.",
    ),
    "cleared-before-step": (
        "a backward pass left gradients that were gone when the optimizer stepped",
        "Call zero_grad() after step(), or before backward(): not between backward() and step().",
    ),
    "step-in-backward": (
        "backward passes reach them, and they change before the optimizer steps",
        f"Look for what steps within the backward pass. {_BACKWARD}",
    ),
    "other-gradients": (
        "the optimizer changes them all the same",
        "Guard the optimizer that holds the gradients: this one takes them from elsewhere (main_grad, a projection, "
        "copies in float32).",
    ),
    "trained-elsewhere": ("they change between its steps", f"Guard what trains them. {_BACKWARD}"),
    "no-backward": (
        "no backward pass reaches them",
        "Check that backward() is called, on a loss that depends on these parameters (no detach(), no no_grad()), and "
        "that the model was not moved, sharded or replaced after the optimizer was made.",
    ),
}


def _pattern(history: TrainingHistory) -> tuple[str, str, str]:
    """Why no gradient may be there: a name, what was seen, and what to do; empty where nothing fits."""
    notes = history.model
    others = {*notes.not_in_optimizer}
    moves = any(name in others for name in notes.moved_between)
    if moves or (notes.names and len(others) == len(notes.names) - len(notes.without_gradient) > 0):
        name = "other-parameters"
    elif notes.num_cleared_gradients and not (notes.moved_between or notes.moved_in_step):
        name = "cleared-before-step"
    elif notes.num_reached_unseen and notes.moved_between:
        name = "step-in-backward"
    elif notes.moved_in_step or notes.moved_between:
        name = "other-gradients" if notes.moved_in_step else "trained-elsewhere"
    elif notes.num_reached_unseen == 0:
        name = "no-backward"
    else:
        return "", "", ""
    seen, do = _PATTERNS[name]
    return name, seen + "; they change all the same" * (name == "other-parameters" and moves), do


@rule(
    "no-gradient",
    severity="critical",
    see="All gradients were {_zero} at each of {num_steps} steps{_why}.",
    remedy="Look for zero_grad() before step(), detach(), and an optimizer made before the model was moved.",
)
def no_gradient(history: TrainingHistory, *, steps: int = 10) -> Seen | None:
    """From the first step on, for at least `steps` steps, all gradients were zero or missing.

    Critical; a warning if gradients exist and are zero, and the objective is a reward, or there is no loss. Silent if
    the loss is zero.
    """
    if history.num_clean < steps or history.num_clean != history.num_steps or history.norm_max != 0.0:
        return None
    if history.lacks_norms or (history.losses.count and history.losses.max == 0.0):
        return None
    (name, why, do), num_seen = _pattern(history), history.model.num_seen
    are_there = bool(len(history.tensors) if num_seen is None else num_seen)
    has_no_aim = not history.losses.count or history.model.objective == "reward"
    is_doubtful = are_there and name != "cleared-before-step" and has_no_aim
    return Seen(
        severity="warning" if is_doubtful else "critical",
        layers=history.model.moved_in_step or history.model.moved_between,
        do=do,
        sure=0.7 if is_doubtful else 0.97,
        num_steps=history.num_clean,
        _zero="zero" if are_there else "zero, or missing,",
        _why=f": {why}" if why else "",
        pattern=name or None,
    )


@rule(
    "unseen-updates",
    see="{num_moved:parameter} changed without a gradient that the guard saw: {layers}{_why}.",
    remedy="Guard what trains them, too: wrap([a, b], model), or wrap_backward for steps within the backward pass.",
    cause=("trained-elsewhere", "Parameters are being updated by code that fastguard does not see."),
    weight=0.95,
    explains="untrained-parameters unseen-updates",
)
def unseen_updates(history: TrainingHistory) -> Seen | None:
    """Trainable parameters change although the guard never saw a gradient of theirs, while it did of others.

    A warning if a step of the optimizer changes them, or a backward pass reaches them; else info: averages of other
    weights look the same.
    """
    notes, never = history.model, {*history.model.never_seen}
    names = [name for name in dict.fromkeys((*notes.moved_in_step, *notes.moved_between)) if name in never]
    if not names or not history.norm_max > 0.0:
        return None
    is_trained = any(name in never for name in notes.moved_in_step) or bool(notes.num_reached_unseen)
    _, why, do = _pattern(history)
    return Seen(
        layers=names,
        warn=is_trained,
        do=do,
        num_moved=len(names),
        _why=f"; {why}" if why else "",
    )


@rule(
    "running-statistics-apart",
    severity="critical",
    source="Ioffe and Szegedy 2015, section 3.1: evaluation takes the population's statistics for the batch's",
    see="The running statistics of {_num:BatchNorm module} of {_of} are not those of the batches ({layers}): of "
    "{_worst} the means are {gap:.2g} standard deviations apart, and the variance is {variance_ratio:.2g} times the "
    "batch's.",
    remedy="Look at momentum (0.1 is usual, 0 never follows), at eval() or reset_running_stats() in the loop, at "
    "batches of a few samples, at statistics in half precision, and at whether training data come in another order or "
    "scale than in validation.",
    cause=(
        "normalisation-statistics",
        "In evaluation, BatchNorm normalises with statistics that differ from those of the batches.",
    ),
    weight=0.97,
    explains="overfitting label-noise validation-inputs-differ",
)
def running_statistics_apart(history: TrainingHistory, *, gap: float = 0.5, ratio: float = 2.0) -> Seen | None:
    """A BatchNorm's running mean is `gap` standard deviations from a batch's, or its variance a factor `ratio`, over
    all channels.

    Fires after 30 clean steps. Info; a warning if nearly all validation losses are 1.1 times the training loss.
    Critical at any step if the running statistics are not finite.
    """
    known = history.model.norm_statistics
    lost = [name for name, (away, _) in known.items() if away == math.inf]
    if lost:
        newest = history.recent[-1].step if history.recent else None
        return Seen(
            at=(newest, newest),
            layers=lost,
            sure=1.0,
            see="The running statistics of {num_not_finite:BatchNorm module} of {num_modules} are not finite "
            "({layers}): in eval mode the output is NaN, or zero.",
            num_not_finite=len(lost),
            num_modules=len(known),
        )
    pairs = {name: pair for name, pair in known.items() if pair[0] > gap or not 1.0 / ratio <= pair[1] <= ratio}
    if history.num_clean < 30 or not pairs:
        return None
    worst = max(pairs, key=lambda name: max(pairs[name][0], abs(math.log(pairs[name][1]))))
    validations = [v for v in history.validations if math.isfinite(v.train_loss) and v.train_loss > 0.0]
    num_worse = sum(v.val_loss > 1.1 * v.train_loss for v in validations)
    is_felt = len(validations) > 1 and num_worse >= 0.8 * len(validations)
    return Seen(
        layers=pairs,
        warn=is_felt,
        gap=pairs[worst][0],
        variance_ratio=pairs[worst][1],
        _num=len(pairs),
        _of=len(known),
        _worst=worst,
    )
