"""Rules on the data: what the model is given, how validation differs, and labels that cannot be learnt."""

from __future__ import annotations

import math

from ...records import BatchSample, TrainingHistory
from ..finding import Seen, Severity
from ..needs import OF_CLASSES
from ..registry import rule
from ..signals import has_had_time, has_run_away, is_stuck, median, signals_of

TITLE = "Data"


@rule(
    "label-noise",
    source="our own; networks fit random labels, and only validation shows it (Zhang et al. 2017)",
    see="The training loss fell from {first:.4g} to {train_loss:.4g}, validation never below {best_val_loss:.4g}.",
    remedy="Check labels: shuffled against inputs, wrong, or from another distribution than the validation set's?",
    needs_descent=True,
)
def label_noise(history: TrainingHistory, *, learnt: float = 0.3, carried: float = 0.1) -> Seen | None:
    """The training loss fell by a share `learnt` of its first value, the best validation loss by less than `carried`.

    Fires from 4 validations on, if the newest is above the first. The confidence is low unless the best is far above
    the chance level, since too few samples look the same. Silent if sixty steps were enough to memorise everything.
    """
    known = [v for v in history.validations if math.isfinite(v.train_loss)]
    s, first = signals_of(history), signals_of(history).initial_loss
    if len(known) < 4 or not min(s.loss_levels[:3], default=first) >= 0.05 * first > 0.0:
        return None
    best, train = min(v.val_loss for v in known), known[-1].train_loss
    has_carried = best < (1.0 - carried) * first or median([v.val_loss for v in known[-3:]]) <= known[0].val_loss
    if train > (1.0 - learnt) * first or has_carried:
        return None
    sure = 0.9 if best > 1.3 * max(first, s.chance) else 0.6
    return Seen(at=known, sure=sure, train_loss=train, first=first, best_val_loss=best)


def _batches(history: TrainingHistory, *, training: bool) -> list[tuple[int, BatchSample]]:
    return [(step, x) for step, x in history.batches if (x.training and x.with_grad) == training]


@rule(
    "input-scale",
    severity="critical",
    source="LeCun et al. 1998, section 4.3 (inputs with mean 0 and equal variance); UMLAUT asks for [-1, 1]",
    see="The inputs have a size of about {rms:.3g}, where layers are initialised for one of about 1.",
    remedy="Bring each feature to mean 0 and standard deviation 1, with the training set's numbers everywhere.",
)
def input_scale(history: TrainingHistory, *, spread: float = 10.0, far: float = 50.0) -> Seen | None:
    """The inputs' root of mean square is above `spread`, or below 1e-3.

    Info. A warning if 60 losses gained less than a share 0.3 of the first; or, above `far` or below 1e-3, after 60
    losses or at the end, unless the model normalises. Critical above `far` if the loss tripled or is not finite.
    Integers, such as tokens, do not count.
    """
    known = [x for _, x in _batches(history, training=True) if not x.input_is_integer and not x.input_num_nonfinite]
    size = median([math.hypot(x.input_mean, x.input_std) for x in known])
    if not (0.0 < size < 1e-3 or size > spread):
        return None
    is_far = size > far or size < 1e-3
    normalises = any("Norm" in kind for kind in history.model.module_kinds)
    is_hurt = is_stuck(history, 0.3, 60) or (is_far and has_had_time(history, 60) and not normalises)
    return Seen(
        severity="critical" if size > far and has_run_away(history) else "warning" if is_hurt else "info",
        rms=size,
    )


@rule(
    "batch-not-finite",
    severity="critical",
    needs_targets=True,
    see="{num_batches:sampled batch} contained NaN or Inf in the inputs.",
    sure=0.99,
    remedy="Look at these samples and their preparation: a missing value, a logarithm of 0, a division by 0.",
)
def batch_not_finite(history: TrainingHistory) -> Seen | None:
    """NaN or Inf in a sampled batch. Info if a step with NaN was taken before: the inputs may be another model's."""
    bad = [(step, x.input_num_nonfinite) for step, x in history.batches if x.input_num_nonfinite]
    taken = min((event.step for event in history.first_events if not event.skipped), default=math.inf)
    if not bad:
        return None
    severity: Severity = "info" if bad[0][0] > taken else "critical"
    return Seen(at=[step for step, _ in bad], severity=severity, num_batches=len(bad), num_nonfinite=bad[0][1])


@rule(
    "same-inputs",
    see="The batch was the same at each of {num_batches} sampled steps.",
    remedy="Look at the loader's sampler, an iterator made again in the loop, and how samples are stacked.",
    cause=("repeated-data", "The model sees the same batch, or the same sample, again and again."),
    weight=0.9,
    explains="overfitting label-noise standstill",
)
def same_inputs(history: TrainingHistory, *, samples: int = 6, constant: float = 0.999) -> Seen | None:
    """At least `samples` sampled batches are equal, though an epoch has several; or all samples in them are equal.

    Samples are equal if at least a share `constant` of the features is. If the length of an epoch is unknown, it is a
    warning only if validation is far behind: a small set may be one batch.
    """
    known = _batches(history, training=True)
    are_alike = all(x.input_constant_share >= constant and x.num_samples > 1 for _, x in known)
    if len(known) < samples or (not are_alike and len({x.input_digest for _, x in known}) > 1):
        return None
    epoch, last = history.model.steps_per_epoch, list(history.validations)[-1:]
    is_behind = any(v.val_loss > 3.0 * max(v.train_loss, 1e-12) for v in last)
    is_wrong = are_alike or (is_behind if epoch is None else epoch > 1)
    return Seen(
        at=[step for step, _ in known],
        warn=is_wrong,
        see="All samples in each of {num_batches} sampled batches are the same." if are_alike else "",
        num_batches=len(known),
    )


@rule(
    "validation-inputs-differ",
    see="Inputs have mean {_mean[0]:.3g} and standard deviation {_std[0]:.3g} in training, {_mean[1]:.3g} and "
    "{_std[1]:.3g} in validation.",
    remedy="Prepare validation data as training data: same numbers for scaling, same channels, same tokens.",
    cause=("preprocessing-differs", "Validation data are preprocessed differently from training data."),
    weight=0.93,
    explains="overfitting label-noise",
)
def validation_inputs_differ(history: TrainingHistory, *, shift: float = 1.0, ratio: float = 2.5) -> Seen | None:
    """Means differ by `shift` standard deviations, or spreads by a factor `ratio`.

    Fires from 2 passes of each kind on. A warning if the newest validation loss is 1.5 times the training loss of that
    time, or, in a loss over classes, if the means differ by twice as much or the spreads by half as much again; else
    info.
    """
    sides = [[x for _, x in _batches(history, training=is_training)] for is_training in (True, False)]
    sides = [[x for x in side if not x.input_is_integer] for side in sides]
    mean, std = ([median([getattr(x, name) for x in side]) for side in sides] for name in ("input_mean", "input_std"))
    if min(map(len, sides)) < 2 or not min(std) > 0.0:
        return None
    moved, times = abs(mean[1] - mean[0]) / std[0], max(std) / min(std)
    if moved <= shift and times <= ratio:
        return None
    is_far = history.model.loss_kind in OF_CLASSES and (moved > 2.0 * shift or times > 1.5 * ratio)
    return Seen(
        warn=is_far or any(v.val_loss > 1.5 * v.train_loss for v in list(history.validations)[-1:]),
        shift=moved,
        ratio=times,
        _mean=mean,
        _std=std,
    )
