"""Rules on the targets, as the gradient of the model's output shows them: all one, sorted, uneven, large."""

from __future__ import annotations

import math

from ...records import TrainingHistory
from ..finding import Seen
from ..needs import contrasts, may_rise, ranks_pairs
from ..registry import rule
from ..signals import has_had_time, is_stuck, median, signals_of, training_batches
from .output import loss_and_activation
from .output_targets import loss_kind

TITLE = "Data"


def _rises_above_its_first(history: TrainingHistory) -> bool:
    """Whether a later loss was well above those before anything was learnt: a class comes that was forgotten."""
    s = signals_of(history)
    begin = max(*history.loss_trend.firsts[:2], s.chance) if len(s.losses) > 5 else math.inf
    return max(s.losses[5:], default=0.0) > 1.2 * begin > 0.0


@rule(
    "one-target",
    of="uneven-targets",
    see="In the first batches {_what}.",
    sure=0.95,
    remedy="Look at how labels are read, encoded and joined to the inputs: all targets are the same.",
    needs_targets=True,
)
def one_target(history: TrainingHistory, *, num_targets: int = 32) -> Seen | None:
    """At least `num_targets` targets are all of one class, or those of a squared error are all one number.

    Silent if other classes follow, so that the loss rises above its first, for numbers that are all zero, where the
    logarithm of a sigmoid is taken of no targets, as in rankings, and where the classes are similarities put together.
    """
    notes, num = history.model, history.model.num_targets or 0
    # What looks like a class may be a squared error far from its targets.
    has_classes = loss_and_activation(notes.loss_ops)[0] != "squared error"
    has_classes = has_classes and not ranks_pairs(history) and not contrasts(history)
    is_one_class = has_classes and notes.num_target_classes == 1 and num >= num_targets
    size = max((abs(x) for x in notes.target_range), default=0.0)
    is_one_number = loss_kind(history) == "squared error" and 1e-6 * size >= (notes.target_std or 0.0) and size > 0.0
    if not is_one_number and (not is_one_class or _rises_above_its_first(history)):
        return None
    what = f"all {num} targets looked at are of one class" if is_one_class else "all targets are equal"
    return Seen(num_targets=num, _what=what)


@rule(
    "answer-in-inputs",
    source="leakage: Kaufman et al. 2012 (a feature that is known only once the target is)",
    see="The inputs contain the answer: {_what}.",
    sure=0.95,
    remedy="Remove the input that gives the answer; shift the targets of sequences by one step.",
    needs_targets=True,
)
def answer_in_inputs(history: TrainingHistory, *, share: float = 0.9995, progress: float = 0.9) -> Seen | None:
    """One feature follows the target with a correlation of `share` or more; or the targets of a sequence are its
    inputs.

    Counts if all sampled batches agree. A sequence is info, as for an autoencoder, unless a share `progress` of the
    first loss was gained. Silent if the targets are the next tokens of a decoder: it copies what an encoder is given.
    """
    notes = history.model
    follows, are_next = notes.target_in_inputs, notes.target_shift[:1] == (1,)
    is_sequence = any(x.input_is_integer for x in training_batches(history))
    if follows is None or follows < share or (is_sequence and are_next) or loss_kind(history) in ("", "zero"):
        return None
    is_met = not is_sequence or signals_of(history).progress >= progress
    what = "the targets are the inputs" if is_sequence else "one of the inputs is the target, up to its scale"
    return Seen(warn=is_met and history.num_clean >= 20, follows=follows, _what=what)


@rule(
    "answer-seen",
    of="answer-in-inputs",
    source="back-propagation shows what an output depends on (Karpathy 2019, A recipe for training neural networks)",
    see="The targets are the {_which} inputs, and outputs depend on later positions: position {position} sees position "
    "{sees}.",
    sure=0.98,
    remedy="Give attention a causal mask, a convolution padding on the left, a recurrent layer one direction.",
    needs_targets=True,
)
def answer_seen(history: TrainingHistory) -> Seen | None:
    """The targets of all sampled batches are tokens of a sequence, and the outputs have a derivative by those tokens.

    The tokens are the next ones, or those after the next. The derivative is exactly zero where an output does not
    depend on a token, so there is no threshold. Unknown if the graph has gradient checkpoints, compiled parts or other
    functions of Python's, BatchNorm, GroupNorm or Fourier transforms.
    """
    shift, place, sees = (*history.model.target_shift, 0, 0, -1)[:3]
    if sees < place + max(shift, 1):
        return None
    return Seen(_which="next" if shift == 1 else "second next", shift=shift, position=place, sees=sees)


@rule(
    "unrelated-targets",
    source="distance correlation without its bias, over batches (Szekely and Rizzo 2013)",
    see="In the first batches, samples with similar inputs have targets no more similar than others do.",
    remedy="Look at single samples with their targets: was one of the two shuffled, sorted, filtered or misjoined?",
    needs_targets=True,
)
def unrelated_targets(history: TrainingHistory, *, z: float = 1.64, carried: float = 0.7) -> Seen | None:
    """In the first batches, similar inputs have targets no more similar than by chance, to within `z` deviations.

    Info before 200 losses unless the run has ended, and if a share 0.5 of the first loss was gained without any
    validation. Silent if a validation loss came below a share `carried` of the first losses or of the chance level; and
    for tokens.
    """
    found, s = history.model.target_dependence, signals_of(history)
    begin = min(s.initial_loss, s.chance or math.inf) if history.losses.min >= 0.0 else -math.inf
    has_carried_over = any(v.val_loss < carried * begin for v in history.validations)
    are_tokens = any(x.input_is_integer for _, x in history.batches if x.training)
    if found is None or found >= z or has_carried_over or may_rise(history) or are_tokens:
        return None
    is_learnt = s.progress >= 0.5 and not history.validations
    return Seen(warn=has_had_time(history, 200) and not is_learnt, dependence=found)


@rule(
    "inputs-without-effect",
    source="permutation tests (Fisher 1935)",
    see="Other inputs do not make the loss worse: with inputs permuted against targets from step {step} on, it was no "
    "higher in {num_steps} steps (t = {t:.1f}).",
    remedy="Look at single samples with their targets as the model gets them. Then look for what keeps the model from "
    "learning: a loss that does not use the output, gradients that vanish, a learning rate that is too low.",
    needs_descent=True,
    needs_targets=True,
)
def inputs_without_effect(history: TrainingHistory, *, least_step: int = 100, progress: float = 0.1) -> Seen | None:
    """The newest such experiment began after `least_step` steps, within the first epoch, and harmed nothing.

    Earlier, a sound model may have learned no more than the frequencies of the targets. Silent if the losses were equal
    bit by bit: nothing was permuted that counts. Silent while the loss falls by three standard errors, since the model
    may have learned from the inputs by now, and where it never fell by a share `progress`: that model learns from none.
    """
    tried = [one for one in history.model.experiments if one["arm"] == "inputs permuted" and one["effect"]]
    harmed_nothing = tried and tried[-1]["verdict"] in ("no difference", "helps") and tried[-1]["step"] >= least_step
    if not harmed_nothing or signals_of(history).still_falls or signals_of(history).progress < progress:
        return None
    step, num_steps = tried[-1]["step"], tried[-1]["num_steps"]
    return Seen(at=(step, step + num_steps - 1), step=step, num_steps=num_steps, t=-tried[-1]["t"])


@rule(
    "sorted-targets",
    source="Bottou 2012, section 3.1: examples in random order",
    see="Within a batch {batch_top_share:.0%} of the targets are of one class, and the next batches hold others.",
    sure=0.95,
    remedy="Shuffle the data before each epoch (DataLoader(shuffle=True)): batches hold one class each.",
    needs_targets=True,
    cause=(
        "unshuffled-data",
        "Batches hold one class each, or nearly: the model forgets one while it learns the next.",
    ),
    weight=0.96,
    explains="same-output-for-all zero-gradients learning-rate-jump unsteady standstill",
)
def sorted_targets(history: TrainingHistory, *, share: float = 0.8, num_targets: int = 64) -> Seen | None:
    """Within a batch, a share `share` of the targets is of one class, and the loss rises above its first as others
    come; or no class of three or more has half of that share over all batches.

    Fires from `num_targets` targets on, in batches of four or more. Silent if one class of several has three quarters
    of that share over all batches.
    """
    notes, within = history.model, history.model.target_batch_top_share or 0.0
    sizes = [x.num_samples for x in training_batches(history)]
    if (notes.num_targets or 0) < num_targets or max(sizes, default=4) < 4 or within < share:
        return None
    is_one = notes.num_target_classes == 1  # the first of several, perhaps, where it is known what chance is
    is_doubtful = not signals_of(history).chance > 0.0 if is_one else (notes.target_top_share or 0.0) > 0.75 * within
    is_apart = (notes.num_target_classes or 0) > 2 and (notes.target_top_share or 0.0) <= 0.5 * within
    if is_doubtful or not (is_apart or _rises_above_its_first(history)):
        return None
    return Seen(batch_top_share=within, num_classes=notes.num_target_classes)


@rule(
    "uneven-targets",
    see="{top_share:.0%} of the targets of the first batches are of one class.",
    remedy="Weight the loss by class, draw batches evenly, and measure with balanced accuracy.",
    needs_targets=True,
    cause=("imbalanced-targets", "Nearly all targets are of one class: always predicting it is nearly enough."),
    weight=(0.85, 0.6),
    explains="same-output-for-all standstill",
)
def uneven_targets(history: TrainingHistory, *, share: float = 0.9, very: float = 0.94) -> Seen | None:
    """One class has more than a share `share` of at least 64 targets, and there is another.

    With five classes or more, a share 0.8 is enough, and a warning. Otherwise info, unless it has more than `very`, or
    50 losses gained less than 0.3 of the first. Info if the loss is weighted, if a sample has several targets, which
    are rare labels, and if the newest losses are below half of the targets' entropy: the others are learnt, too.
    """
    notes, top, num_classes = history.model, history.model.target_top_share, history.model.num_target_classes or 0
    if top is None or (notes.num_targets or 0) < 64 or num_classes == 1:
        return None
    is_of_many = num_classes >= 5 and top > 0.8
    if not is_of_many and top <= share:
        return None
    has_labels = "binary" in notes.loss_kind and any(x.output_width > 1 for x in training_batches(history))
    entropy, losses = notes.target_entropy or 0.0, signals_of(history).losses[-64:]
    is_learnt = len(losses) >= 50 and median(losses) < 0.5 * entropy
    is_expected = has_labels or is_learnt or notes.has_loss_weights
    warns = (is_of_many or top > very or is_stuck(history, 0.3, 50)) and not is_expected
    return Seen(warn=warns, top_share=top, num_targets=notes.num_targets)


@rule(
    "target-scale",
    source="LeCun et al. 1998, section 4.5 (targets within the range of what the last layer gives)",
    see="The targets have mean {mean:.3g} and standard deviation {std:.3g}; first outputs are about 1.",
    remedy="Bring the targets to mean 0 and standard deviation 1, and undo it in prediction.",
    needs_descent=True,
    needs_targets=True,
)
def target_scale(history: TrainingHistory, *, size: float = 10.0, progress: float = 0.3) -> Seen | None:
    """The root of mean square of a squared error's targets is above `size`.

    Info; a warning from ten times that on after 80 losses, or at the end; if 80 losses gained less than a share
    `progress` of the first, if the loss is twice what the targets' mean alone would give, or if ten steps were NaN or
    Inf before that.
    """
    notes, s = history.model, signals_of(history)
    if loss_kind(history) != "squared error" or notes.target_mean is None or notes.target_std is None:
        return None
    rms = math.hypot(notes.target_mean, notes.target_std)
    is_hurt = s.loss_level > 2.0 * notes.target_std**2 or not s.fall >= progress
    is_hurt = is_hurt if history.losses.count >= 80 else history.num_nonfinite >= 10
    is_hurt = is_hurt or (rms > 10.0 * size and has_had_time(history, 80))
    return Seen(warn=is_hurt, rms=rms, mean=notes.target_mean, std=notes.target_std) if rms > size else None
