"""Rules on the targets, as the gradient of the model's output shows them: all one, sorted, uneven, large."""

from __future__ import annotations

from ...history import TrainingHistory
from ..finding import Finding
from ..registry import rule
from ..signals import Signals, median, signals_of
from .output import loss_and_activation
from .output_targets import loss_kind, span, stands

TITLE = "Data"


@rule(
    "one-target",
    reads="classes or numbers that the first batches asked for",
    source="our own: what never changes teaches nothing",
    remedy="All targets are the same: look at how labels are read, encoded and joined to the inputs.",
    needs_targets=True,
)
def one_target(history: TrainingHistory, *, num_targets: int = 64, coarse: float = 1e-5) -> Finding | None:
    """Of at least `num_targets` targets all are of one class, or of a squared error all are one number.

    The latter where they are not below a share `coarse` of the outputs, beside which they would be rounded away.
    """
    notes, kind = history.model, loss_kind(history)
    has_classes = (
        loss_and_activation(notes.loss_ops)[0] != "squared error"
    )  # which may look like one, far from its targets
    is_one_class = has_classes and notes.num_target_classes == 1 and (notes.num_targets or 0) >= num_targets
    size = max((abs(x) for x in notes.target_range), default=0.0)
    outputs = [x.output_abs_max for _, x in history.batches if x.training and x.with_grad][:3]
    is_known = (size or 0.1) > coarse * max(
        outputs, default=0.0
    )  # a target is the output less an error: digits get lost
    is_one_number = kind == "squared error" and notes.target_std is not None and notes.target_std <= 1e-6 * size
    is_one_number = is_one_number and is_known
    if not is_one_class and not is_one_number:
        return None
    what = f"all {notes.num_targets} targets looked at are of one class" if is_one_class else "all targets are equal"
    return Finding(
        f"In the first batches {what}.",
        *span(history),
        evidence={"num_targets": notes.num_targets or 0, "threshold": num_targets},
        confidence=0.95,
    )


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
    is_sequence = any(x.input_is_integer for _, x in history.batches if x.training and x.with_grad)
    is_met = not is_sequence or signals_of(history).progress >= progress
    return Finding(
        "The model is given what it is asked for: "
        + ("the targets are the inputs." if is_sequence else "one of the inputs is the target, up to its scale."),
        *span(history),
        severity="warning" if is_met and history.num_clean >= 20 else "info",
        evidence={"follows": notes.target_in_inputs, "threshold": share},
        confidence=0.95,
    )


@rule(
    "sorted-targets",
    reads="the classes that each of the first batches asked for",
    source="Bottou 2012, section 3.1: examples in random order",
    remedy="Batches hold one class each: shuffle the data before each epoch (DataLoader(shuffle=True)).",
    needs_targets=True,
)
def sorted_targets(history: TrainingHistory, *, share: float = 0.8, num_targets: int = 64) -> Finding | None:
    """Within a batch a `share` of the targets is of one class, on average; over the batches there are several.

    From `num_targets` targets on, in batches of four or more. Silent where one class has three quarters of that share
    over all batches, too.
    """
    notes = history.model
    if notes.target_batch_top_share is None or (notes.num_target_classes or 0) < 2 or notes.target_top_share is None:
        return None
    sizes = [x.num_samples for _, x in history.batches if x.training and x.with_grad]
    if (notes.num_targets or 0) < num_targets or not sizes or max(sizes) < 4:
        return None
    if notes.target_batch_top_share < share or notes.target_top_share > 0.75 * notes.target_batch_top_share:
        return None
    return Finding(
        f"Within a batch {notes.target_batch_top_share:.0%} of the targets are of one class, of "
        f"{notes.num_target_classes} in all.",
        *span(history),
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
)
def uneven_targets(
    history: TrainingHistory,
    *,
    share: float = 0.9,
    very: float = 0.94,
    num_targets: int = 128,
    progress: float = 0.3,
    min_steps: int = 50,
) -> Finding | None:
    """A class has more than a `share` of at least `num_targets` targets, and there is another.

    Info; a warning if it has more than `very`, or if after `min_steps` losses less than a share `progress` of the first
    has been gained.
    """
    notes = history.model
    if notes.target_top_share is None or (notes.num_targets or 0) < num_targets:
        return None
    if notes.target_top_share <= share or notes.num_target_classes == 1:
        return None
    return Finding(
        f"{notes.target_top_share:.0%} of the targets of the first batches are of one class.",
        *span(history),
        severity="warning" if notes.target_top_share > very or stands(history, progress, min_steps) else "info",
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
    history: TrainingHistory, *, size: float = 10.0, progress: float = 0.3, min_steps: int = 80
) -> Finding | None:
    """Targets of a squared error whose size (root of mean square) is above `size`.

    Info; a warning if after `min_steps` losses less than a share `progress` of the first has been gained, or the loss
    is twice what their mean alone would give, or stands or ends there, or the run ends on its way down from there.
    """
    notes = history.model
    if loss_kind(history) != "squared error" or notes.target_mean is None or notes.target_std is None:
        return None
    rms = (notes.target_mean**2 + notes.target_std**2) ** 0.5
    if rms <= size:
        return None
    s, is_known = signals_of(history), history.losses.count >= min_steps
    is_hurt = is_known and (s.loss_level > 2.0 * notes.target_std**2 or not s.fall >= progress)
    is_hurt = is_hurt or (is_known and s.progress < 0.05 and (s.stands or history.has_ended))
    is_hurt = is_hurt or (is_known and history.has_ended and _ends_on_its_way(s, 0.3 * notes.target_std**2))
    return Finding(
        f"The targets have mean {notes.target_mean:.3g} and standard deviation {notes.target_std:.3g}, where a model "
        "begins with outputs of about 1.",
        *span(history),
        severity="warning" if is_hurt else "info",
        evidence={"rms": rms, "mean": notes.target_mean, "std": notes.target_std, "threshold": size},
        confidence=0.9 if rms > 5 * size else 0.7,
    )


def _ends_on_its_way(s: Signals, high: float) -> bool:
    """Whether the newest fifth of the losses stand above `high`, and a fifth below those before them."""
    part = len(s.losses) // 5
    late, before = median(s.losses[-part:]), median(s.losses[-2 * part : -part])
    return part > 0 and high < late < 0.8 * before
