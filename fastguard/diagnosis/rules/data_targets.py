"""Rules on the targets, as the gradient of the model's output shows them: all one, sorted, uneven, large."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import may_rise
from ..registry import rule
from ..signals import has_had_time, is_stuck, median, signals_of, training_batches
from .output import loss_and_activation
from .output_targets import last_activation, loss_kind

TITLE = "Data"
_DIFFERENCES = ("MseLoss", "Sub", "Rsub")


@rule(
    "one-target",
    of="uneven-targets",
    remedy="All targets are the same: look at how labels are read, encoded and joined to the inputs.",
    needs_targets=True,
)
def one_target(history: TrainingHistory, *, num_targets: int = 64, coarse: float = 1e-5) -> Finding | None:
    """Of at least `num_targets` targets all are of one class, or of a squared error all are one number.

    Numbers must be above a share `coarse` of the outputs, beside which they would be rounded away; zeros count where
    the loss takes a difference. Silent where other classes follow: the loss rose above its first, or jumps; or nothing
    is learnt.
    """
    notes, kind = history.model, loss_kind(history)
    # What looks like a class may be a squared error far from its targets.
    has_classes = loss_and_activation(notes.loss_ops)[0] != "squared error"
    is_one_class = has_classes and notes.num_target_classes == 1 and (notes.num_targets or 0) >= num_targets
    is_one_class = is_one_class and not _others_follow(history)
    size = max((abs(x) for x in notes.target_range), default=0.0)
    outputs = [x.output_abs_max for x in training_batches(history)][:3]
    is_known = (size or 0.1) > coarse * max(outputs, default=0.0)  # the output less an error: digits get lost
    is_known &= size > 0.0 or any(op.startswith(_DIFFERENCES) for op in notes.loss_ops)
    is_one_number = kind == "squared error" and notes.target_std is not None and notes.target_std <= 1e-6 * size
    is_one_number = is_one_number and is_known
    if not is_one_class and not is_one_number:
        return None
    what = f"all {notes.num_targets} targets looked at are of one class" if is_one_class else "all targets are equal"
    return Finding(
        f"In the first batches {what}.",
        evidence={"num_targets": notes.num_targets or 0, "threshold": num_targets},
        confidence=0.95,
    )


def _rises_above_its_first(history: TrainingHistory) -> bool:
    """Whether a later loss was well above those before anything was learnt: a class comes that was forgotten."""
    s = signals_of(history)
    begin = max(*history.loss_trend.firsts[:2], s.chance) if len(s.losses) > 5 else math.inf
    return max(s.losses[5:], default=0.0) > 1.2 * begin > 0.0


def _others_follow(history: TrainingHistory) -> bool:
    s = signals_of(history)
    newest = s.losses[-64:]
    jumps = len(newest) == 64 and max(newest) > max(10.0 * median(newest), 0.05 * s.initial_loss)
    is_high = history.losses.count >= 100 and s.loss_level > 0.7 * s.initial_loss
    return jumps or is_high or _rises_above_its_first(history)


@rule(
    "answer-in-inputs",
    reads="the inputs and the targets of the first batches, held against each other",
    source="leakage: Kaufman et al. 2012 (a feature that is known only once the target is)",
    remedy="One of the inputs gives the answer: take it away. Of sequences, shift the targets by one step.",
    needs_targets=True,
)
def answer_in_inputs(history: TrainingHistory, *, share: float = 0.9995, progress: float = 0.9) -> Finding | None:
    """One feature follows the target with a correlation of `share` or more; or all of a sequence is to be given back.

    In all batches looked at. The latter is info, as of an autoencoder, unless a share `progress` of the first loss was
    gained.
    """
    notes, kind = history.model, loss_kind(history)
    if notes.target_in_inputs is None or notes.target_in_inputs < share or kind in ("", "zero"):
        return None
    is_sequence = any(x.input_is_integer for x in training_batches(history))
    is_met = not is_sequence or signals_of(history).progress >= progress
    return Finding(
        "The model is given what it is asked for: "
        + ("the targets are the inputs." if is_sequence else "one of the inputs is the target, up to its scale."),
        severity="warning" if is_met and history.num_clean >= 20 else "info",
        evidence={"follows": notes.target_in_inputs, "threshold": share},
        confidence=0.95,
    )


@rule(
    "unrelated-targets",
    reads="inputs and targets of the first batches: whether near ones belong to near ones",
    source="distance correlation without its bias, over batches (Szekely and Rizzo 2013)",
    remedy="Look at single samples with their targets as the model gets them: was one of the two shuffled, sorted, "
    "filtered or joined without the other?",
    needs_targets=True,
)
def unrelated_targets(
    history: TrainingHistory, *, z: float = 1.64, carried: float = 0.7, progress: float = 0.5, patience: int = 200
) -> Finding | None:
    """In the first batches, similar inputs have targets no more similar than chance makes them, to within `z` of its
    deviations.

    Inputs may tell more than that shows: info before `patience` losses unless the run has ended, and where a share
    `progress` of the first loss was gained and no validation loss contradicts it. Silent where a validation loss came
    below a share `carried` of the first losses, or of the chance level; for losses that tell samples apart, such as
    contrastive ones; and for tokens.
    """
    found, s = history.model.target_dependence, signals_of(history)
    begin = min(s.initial_loss, s.chance or math.inf) if history.losses.min >= 0.0 else -math.inf
    has_carried_over = any(v.val_loss < carried * begin for v in history.validations)
    are_tokens = any(x.input_is_integer for _, x in history.batches if x.training)
    # A classification whose gradient is none of one: its classes are of what comes of several outputs together.
    notes = history.model
    is_of_pairs = notes.loss_ops[:1] == ("NllLossBackward0",) and notes.loss_kind == "squared error"
    if found is None or found >= z or has_carried_over or may_rise(history) or are_tokens or is_of_pairs:
        return None
    is_learnt = s.progress >= progress and not history.validations
    return Finding(
        "In the first batches samples with inputs that are alike have targets no more alike than others do.",
        severity="info" if is_learnt or not has_had_time(history, patience) else "warning",
        evidence={"dependence": found, "threshold": z},
        confidence=0.85,
    )


@rule(
    "sorted-targets",
    reads="the classes that each of the first batches asked for",
    source="Bottou 2012, section 3.1: examples in random order",
    remedy="Batches hold one class each: shuffle the data before each epoch (DataLoader(shuffle=True)).",
    needs_targets=True,
    needs_harm=True,
    cause=(
        "unshuffled-data",
        "Batches hold one class each, or nearly: the model forgets one while it learns the next.",
    ),
    weight=0.96,
    explains="loss-spike norm-spike loss-oscillation loss-divergence no-warm-up growing-norm same-output-for-all "
    "zero-gradients learning-rate-jump standstill",
)
def sorted_targets(history: TrainingHistory, *, share: float = 0.8, num_targets: int = 64) -> Finding | None:
    """Within a batch a `share` of the targets is of one class, on average; over the batches there are several.

    From `num_targets` targets on, in batches of four or more. Silent where one class has three quarters of that share
    over all batches, too, unless it has all of them and the loss rose above its first later.
    """
    notes = history.model
    if notes.target_batch_top_share is None or not notes.num_target_classes or notes.target_top_share is None:
        return None
    is_first = notes.num_target_classes == 1  # of several, each after the other
    if is_first and not (signals_of(history).chance and _rises_above_its_first(history)):
        return None
    sizes = [x.num_samples for x in training_batches(history)]
    if (notes.num_targets or 0) < num_targets or not sizes or max(sizes) < 4:
        return None
    is_even = notes.target_top_share <= 0.75 * notes.target_batch_top_share
    if notes.target_batch_top_share < share or not (is_first or is_even):
        return None
    return Finding(
        f"Within a batch {notes.target_batch_top_share:.0%} of the targets are of one class, "
        + ("and the loss rises as others come." if is_first else f"of {notes.num_target_classes} in all."),
        evidence={"batch_top_share": notes.target_batch_top_share, "num_classes": notes.num_target_classes},
        confidence=0.95,
    )


@rule(
    "uneven-targets",
    reads="how often each class was asked for in the first batches, and the loss",
    source="our own; a model that names the most frequent class alone is right that often",
    remedy="One class is nearly all of the data: weight the loss by class, draw batches evenly, and measure with "
    "balanced accuracy.",
    needs_targets=True,
    cause=("imbalanced-targets", "Nearly all targets are of one class: always predicting it is nearly enough."),
    weight=(0.85, 0.6),
    explains="same-output-for-all standstill",
)
def uneven_targets(
    history: TrainingHistory, *, share: float = 0.9, very: float = 0.94, num_targets: int = 128, of_many: float = 0.8
) -> Finding | None:
    """A class has more than a `share` of at least `num_targets` targets, and there is another.

    Or, of five classes or more, a share `of_many` of half as many targets: always a warning. Otherwise info, unless it
    has more than `very`, or 50 losses gained less than 0.3 of the first.
    """
    notes = history.model
    if notes.target_top_share is None or (notes.num_targets or 0) < num_targets // 2:
        return None
    is_of_many = (notes.num_target_classes or 0) >= 5 and notes.target_top_share > of_many
    is_uneven = notes.target_top_share > share and (notes.num_targets or 0) >= num_targets
    if notes.num_target_classes == 1 or not (is_of_many or is_uneven):
        return None
    return Finding(
        f"{notes.target_top_share:.0%} of the targets of the first batches are of one class.",
        severity="warning" if is_of_many or notes.target_top_share > very or is_stuck(history, 0.3, 50) else "info",
        evidence={"top_share": notes.target_top_share, "num_targets": notes.num_targets, "threshold": share},
        confidence=0.8,
    )


@rule(
    "target-scale",
    reads="the targets of a squared error in the first batches, the first outputs and the loss",
    source="LeCun et al. 1998, section 4.5 (targets within the range of what the last layer gives)",
    remedy="Bring the targets to mean 0 and standard deviation 1 with the training set's numbers, and undo it in "
    "prediction.",
    needs_descent=True,
    needs_targets=True,
)
def target_scale(
    history: TrainingHistory, *, size: float = 10.0, progress: float = 0.3, min_steps: int = 80, reach: float = 2.0
) -> Finding | None:
    """Targets of a squared error whose size (root of mean square) is above `size`.

    Or of an absolute or Huber error that began above `size`, and above ten times the first outputs. Or, of any size,
    targets whose mean no output came near, while the loss fell, and is stuck above `reach` times what that mean alone
    would give. Info; a warning if `min_steps` losses gained less than a share `progress` of the first, if ten steps
    were NaN or Inf before that, or if the loss is twice what the mean alone would give, or stuck there; of an absolute
    error, if the newest losses are still above `size`.
    """
    notes, s = history.model, signals_of(history)
    is_known = history.losses.count >= min_steps
    if loss_kind(history) != "squared error" or notes.target_mean is None or notes.target_std is None:
        return _far_off(history, size, is_hurt=is_known and s.loss_level > size)
    rms, variance = (notes.target_mean**2 + notes.target_std**2) ** 0.5, notes.target_std**2
    is_apart = is_known and s.stands and s.fall > 0.1 and s.loss_level > reach * variance
    is_apart = is_apart and _never_comes_near(history, notes.target_mean, 0.5 * notes.target_std)
    if rms <= size and not is_apart:
        return None
    is_hurt = not is_known and history.num_nonfinite >= 10
    if is_known:
        has_learnt_nothing = s.progress < 0.05 and (s.stands or history.has_ended)
        is_hurt = has_learnt_nothing or s.loss_level > 2.0 * variance or not s.fall >= progress
    return Finding(
        f"The targets have mean {notes.target_mean:.3g} and standard deviation {notes.target_std:.3g}, where a model "
        "begins with outputs of about 1.",
        severity="warning" if is_hurt else "info",
        evidence={"rms": rms, "mean": notes.target_mean, "std": notes.target_std, "threshold": size},
        confidence=0.9 if rms > 5 * size else 0.7,
    )


def _far_off(history: TrainingHistory, size: float, *, is_hurt: bool) -> Finding | None:
    """Of an error that is as large as its targets are far from the output: the first loss says how far."""
    ops = [op for op in history.model.loss_ops if not op.startswith("Mean")][:1]
    outputs = [x.output_abs_max for x in training_batches(history)][:1]
    first = history.loss_trend.firsts[0] if history.loss_trend.firsts else 0.0
    if not ops or not ops[0].startswith(("L1Loss", "SmoothL1", "Huber")) or not outputs:
        return None
    if not size < first < math.inf or first <= 10.0 * outputs[0]:
        return None
    return Finding(
        f"The targets are {first:.3g} away from the first outputs, which are at most {outputs[0]:.3g}.",
        severity="warning" if is_hurt else "info",
        evidence={"rms": first, "threshold": size},
        confidence=0.9 if first > 5 * size else 0.7,
    )


def _never_comes_near(history: TrainingHistory, mean: float, room: float) -> bool:
    """Whether all outputs that were seen lie on one side of the targets' mean, further away than `room`, and came
    nearer as far as they could; where the model is seen to end in an activation, `targets-beyond-output` tells."""
    seen = training_batches(history)
    are_beside = all(x.output_max < mean - room for x in seen) or all(x.output_min > mean + room for x in seen)
    if not are_beside or not seen or last_activation(history):
        return False
    return abs(seen[-1].output_mean - mean) < abs(seen[0].output_mean - mean) - seen[0].output_std
