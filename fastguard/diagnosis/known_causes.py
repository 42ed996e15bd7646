"""The root causes that come with fastguard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..history import TrainingHistory
from ..history.updates import is_bias
from . import needs
from .causes import cause
from .finding import Finding
from .rules.lr_size import estimated_update_ratio
from .signals import signals_of

Found = Mapping[str, Finding]
_STANDSTILL = "loss-not-decreasing underfitting loss-plateau overtraining loss-at-chance bounded-output"
_BROKEN = "non-finite-gradients non-finite-loss skip-run non-finite-activations"
_TOO_LARGE_STEPS = ("learning-rate-jump", "update-ratio-high", "no-warm-up", "loss-explosion")
_DIED_AFTER = (*_TOO_LARGE_STEPS, "loss-spike")
_ALIVE_STEPS = 30
_SETTINGS = ("dropout-high", "shrinking-weights", "poor-initialisation")
_DEAD = "dead-relu-units dead-smooth-units zero-gradients zero-gradient-tensors vanishing-norm"


def _isolated(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Bad steps here and there, good ones after them: a batch, not the weights."""
    return 0.0 if history.skip_run >= 3 or history.longest_skip_run > 3 else 0.75


def has_finite_gradients(history: TrainingHistory) -> bool:
    """Whether no gradient was ever NaN or Inf: one of a batch that was would be."""
    return not history.num_nonfinite and not history.num_skipped


def _going_on(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Skipped steps change nothing, so what is bad at every step since is in the weights, unless those are known.

    A run that was never finite began with weights that are. Finite weights will do where float16 overflows, and where
    an operation has no finite value or derivative for what they give.
    """
    may_be_finite = _weights_are_fine(history) or history.model.is_smooth is False or needs.float16(history)
    goes_on = history.num_clean >= 3 and history.skip_run >= 3 and not history.num_scaled
    return 0.6 if goes_on and not may_be_finite else 0.0


def is_lost_in_float16(history: TrainingHistory) -> bool:
    """The loss pulls at the output, and in float16, without a scaler, nothing of that is left."""
    return needs.float16(history) and not history.num_scaled and history.model.loss_kind not in ("", "zero")


def _overflows_on(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Bad at every step since some, in float16, without a scaler that would have made it so, and of fine weights."""
    is_of_data = "batch-not-finite" in found or history.weights.bad or history.model.is_smooth is False
    is_so = needs.float16(history) and history.skip_run >= 3 and not history.num_scaled
    return 0.7 if is_so and not is_of_data else 0.0


def _overflowed(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Inf out of finite inputs and finite weights is overflow, and only half precision overflows that easily.

    Inputs are finite where a module says so, and where batch after batch goes bad.
    """
    if history.weights.bad:
        return 0.0
    goes_on = history.skip_run >= 3 and (_weights_are_fine(history) or "loss-scale-collapse" in found)
    return 0.9 if finding.evidence["num_infs"] and (finding.evidence["is_origin"] or goes_on) else 0.0


def _never_finite(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Finite inputs and weights whose gradients were never finite: the way through the model makes them so large.

    Unless it is inputs that are, or float16 that ends early.
    """
    scale = found.get("input-scale")
    if needs.float16(history) or (scale is not None and scale.evidence["rms"] > 100.0):
        return 0.0
    losses = [entry.loss for entry in history.recent if entry.loss is not None]
    is_of_loss = not losses or not all(map(math.isfinite, losses))
    has_fine_start = "batch-not-finite" not in found and not history.weights.bad
    return 0.7 if history.num_clean < 3 and has_fine_start and is_of_loss else 0.0


def _weights_are_fine(history: TrainingHistory) -> bool:
    """Whether weights were looked at since the run of skips began, and were all finite."""
    if not len(history.weights) or history.weights.last_step <= history.longest_skip_run_end - history.skip_run:
        return False
    return not history.weights.bad


def _from_weights(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return 0.6 if history.weights.bad else 0.0


def _from_input(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return 0.0 if finding.evidence["is_origin"] else 0.6


def _of_itself(
    weight: float, before: tuple[str, ...] = _TOO_LARGE_STEPS
) -> Callable[[Finding, TrainingHistory, Found], float]:
    """`weight`, unless steps that were too large came `before`, or a setting explains it: units die of those."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        steps = [found[name].first_step for name in before if name in found]
        began = finding.first_step
        if any(name in found and found[name].severity != "info" for name in _SETTINGS):
            return 0.2 * weight
        if began is not None and began >= _ALIVE_STEPS and signals_of(history).progress < 0.03:
            return 0.3 * weight  # they were alive, and nothing was learnt then either
        if any(step is not None and (began is None or step <= began) for step in steps):
            return 0.2 * weight
        return weight

    return weigh


def _on_the_way(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Dead units stop what lies before them; what is beside the way, such as an expert, is rather not chosen."""
    share = finding.evidence["num_zero_tensors"] / finding.evidence["num_tensors"]
    is_on_it = finding.evidence["from_the_first"] or share >= 0.5 or signals_of(history).progress >= 0.1
    return _of_itself(0.8 if is_on_it else 0.25, _DIED_AFTER)(finding, history, found)


def _decays(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Where steps are far larger than what decays, and nothing shrinks, the learning rate makes the decay so large."""
    if finding.evidence["norm_left"] < finding.evidence["threshold_norm"]:
        return 0.99
    updates = found.get("update-ratio-high")
    too_high = updates is not None and updates.evidence["update_ratio"] > 10.0 * finding.evidence["decay_per_step"]
    return 0.4 if too_high and finding.evidence["decay_per_step"] else 0.99


def _steps(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Where weights shrink and steps are no larger than what shrinks them, the steps are decay."""
    shrinking = found.get("shrinking-weights")
    return 0.93 if shrinking is None or _decays(shrinking, history, found) < 0.9 else 0.5


def _unless_clipped(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Steps that are too small, unless clipping makes them so."""
    clipped = found.get("clip-rate-high")
    return 0.25 if clipped is not None and clipped.evidence["median_coef"] < 0.05 else 0.85


def _is_low(finding: Finding) -> bool:
    return finding.evidence["largest"] < finding.evidence["threshold_low"]


def _after_growth(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """NaN at the end of a loss or a norm that had run away: steps overshot until numbers ended.

    Seen once, in loss or gradients; less where an operation may have no finite value there.
    """
    if finding.rule == "non-finite-loss" and "non-finite-gradients" in found:
        return 0.0
    losses, norms = history.loss_trend, history.norm_trend
    has_risen = losses.count >= 3 and losses.first > 0.0 and losses.mean > 3.0 * losses.first
    has_grown = norms.count >= 3 and norms.mean - norms.first > 4.6  # a hundredfold
    weight = 0.5 if history.model.is_smooth is False else 0.75
    return weight if has_risen or has_grown else 0.0


def _if_nothing_carries_over(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """The training loss falls somewhat, the validation loss never: the samples are learnt, not what they share."""
    known = [v.val_loss for v in history.validations if math.isfinite(v.val_loss)]
    first, gained = history.loss_trend.first, signals_of(history).progress
    if len(known) < 3 or not gained > 0.03 or min(known) < 0.97 * first:
        return 0.0
    return _if_steps_are_sound(finding, history, found)


def _if_steps_are_sound(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Weights that move as they should and learn nothing: the targets do not follow from the inputs."""
    odd = ("steps-too-large", "steps-too-small", "learning-rate-unusual", "vanishing-layers", "same-output-for-all",
           "zero-gradient-tensors", "update-ratio-high", "update-ratio-low", "vanishing-norm",
           "learning-rate-still-rising", "learning-rate-gone")  # fmt: skip
    ratio = estimated_update_ratio(history)
    if ratio is not None and not 5e-4 <= ratio <= 0.3:  # of the weights a step
        return 0.2
    return 0.2 if any(name in found and found[name].severity != "info" for name in odd) else 0.6


def _unless_scaled(weight: float) -> Callable[[Finding, TrainingHistory, Found], float]:
    """`weight`, unless inputs or targets are so large that any usual rate overshoots, or come one class at a time."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        others = ("input-scale", "target-scale", "sorted-targets")
        is_scaled = any(name in found and found[name].severity != "info" for name in others)
        return (0.4 if is_scaled else 1.0) * weight

    return weigh


def _has_tiny_batches(history: TrainingHistory, found: Found) -> bool:
    """Batches of a few samples, whose noise throws the loss about without a bad one; or a single element far out."""
    return "tiny-batches" in found or "lone-element" in found


def _is_of_schedule_or_machine(history: TrainingHistory, found: Found) -> bool:
    """A learning rate that only ever rose: the schedule is wrong, whatever its size; gradients that add up, which make
    any rate too high; or one element far out of range, ahead of all steps that were too large."""
    is_elsewhere = "learning-rate-still-rising" in found or "gradients-not-cleared" in found
    is_elsewhere = is_elsewhere or _is_moved_by_others(history, found)
    return is_elsewhere or _comes_of_one_element(history, found)


def _is_moved_by_others(history: TrainingHistory, found: Found) -> bool:
    """Most parameters are written to at most steps by something other than the optimizer, and nothing is learnt."""
    finding, notes = found.get("weights-overwritten"), history.model
    if finding is None or finding.severity == "info":
        return False
    is_most = 2 * len(notes.overwritten) > min(len(notes.names), 16)  # of so many that are looked at
    return is_most and 2 * (notes.num_overwritten or 0) > (notes.num_compared or 0)


def _comes_of_one_element(history: TrainingHistory, found: Found) -> bool:
    """One element far out of range, ahead of all steps that were too large."""
    lone = found.get("lone-element")
    steps = [found[name].first_step for name in _TOO_LARGE_STEPS if name in found]
    return lone is not None and all(step is None or step >= (lone.first_step or 0) for step in steps)


def _never_had_a_gradient(history: TrainingHistory, found: Found) -> bool:
    """Not one gradient in the whole run, or beside the units' own weights: units die in training, and all of them."""
    return "no-gradient" in found or _are_bypassed(history)


def _if_it_is_much(weight: float) -> Callable[[Finding, TrainingHistory, Found], float]:
    """`weight`, but less where nothing is learnt and it is less than a tenth of the parameters: that is not why."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        is_much = finding.evidence["num_frozen"] >= 0.1 * finding.evidence["num_parameters"]
        stands = "loss-at-chance" in found or "loss-not-decreasing" in found
        return weight if is_much or not stands else 0.4 * weight

    return weigh


def _are_bypassed(history: TrainingHistory) -> bool:
    """Whether weights whose gradient is nothing but zeros stand beside biases that have one, in the first layer, too.

    Such a layer's outputs are answered to, and its inputs are the data: no unit is dead, the way to the weights is cut.
    """
    tensors = history.tensors
    zero = {name for name, track in tensors.items() if track.num_zero and track.num_zero == track.num_samples}
    weights = [name for name in tensors if not is_bias(name)]
    if not weights or weights[0] not in zero:
        return False
    beside = [name.rpartition(".")[0] + ".bias" for name in weights if name in zero]
    return all(name in tensors and name not in zero for name in beside)


def _cut(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return 0.9 if _are_bypassed(history) else 0.0


def _are_idle_experts(history: TrainingHistory, found: Found) -> bool:
    """Modules side by side, some of which are not chosen."""
    return "idle-experts" in found


def _without_clipping(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return 0.6 if not history.num_clipped else 0.3


def _stays_broken(found: Found) -> bool:
    """Units or tensors that answer no more at the end: what a batch that was skipped or clipped does not leave."""
    rules = ("zero-gradient-tensors", "same-output-for-all", "dead-relu-units")
    return any(name in found and found[name].severity != "info" for name in rules)


def _many_spikes(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return _without_clipping(finding, history, found) if finding.evidence["num_spikes"] >= 3 else 0.0


def _few_spikes(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return _of_itself(_few(finding, 0.4))(finding, history, found)


def _few(finding: Finding, weight: float) -> float:
    """One bad batch is bad once, or a few times; what comes back again and again is of the run, not of a batch."""
    return weight if finding.evidence["num_spikes"] <= 2 else 0.2 * weight


cause(
    "corrupted-weights",
    "Some weights are NaN or Inf, and every step since is spoilt by them.",
    "Go back to a checkpoint from before. Guard with skip_nonfinite=True, and look for what writes to these weights.",
    {"non-finite-weights": 0.97, "non-finite-activations": _from_weights, "skip-run": _going_on},
    _BROKEN + " loss-scale-collapse",
)
cause(
    "half-precision-overflow",
    "A layer's output leaves the range of its half precision.",
    "Use bfloat16, or keep that layer in float32; look why its weights or inputs are so large.",
    {"non-finite-activations": _overflowed, "loss-scale-collapse": 0.8, "skip-run": _overflows_on},
    _BROKEN,
    needs=[needs.half_precision],
)
cause(
    "half-precision-underflow",
    "Gradients are too small for float16 and become zero.",
    "Use a GradScaler, or bfloat16.",
    {
        "half-precision-underflow": 0.9,
        "no-gradient": lambda finding, history, found: 0.9 if is_lost_in_float16(history) else 0.0,
    },
    "zero-gradients zero-gradient-tensors vanishing-norm " + _STANDSTILL,
    needs=[needs.half_precision],
)
cause(
    "bad-batch",
    "One batch, or a few, held what the model cannot digest.",
    "Look at the samples of these steps: NaN, scale, targets. The guard skipped or clipped the step; drop the batch.",
    {
        "non-finite-loss": lambda finding, history, found: (
            0.0 if has_finite_gradients(history) else _isolated(finding, history, found)
        ),
        "non-finite-gradients": _isolated,
        "non-finite-activations": _from_input,
        "loss-spike": lambda finding, history, found: (
            _few(finding, 0.6) * _of_itself(1.0)(finding, history, found) * (0.3 if _stays_broken(found) else 1.0)
        ),
        "batch-not-finite": 0.95,
        "norm-spike": _few_spikes,
    },
    "spiky-loss",
    contradicted=_has_tiny_batches,
)
cause(
    "recurring-bad-batch",
    "The same batch hurts in every epoch.",
    "Find the samples at this place of the data, and repair or drop them. Shuffle anew in each epoch.",
    {"periodic-loss-spikes": 0.95},
    "loss-spike norm-spike spiky-loss",
)
cause(
    "learning-rate-too-high",
    "The learning rate is too high: steps overshoot.",
    "Go back to a checkpoint from before the loss turned, and divide the learning rate by 10; warm it up from there.",
    {
        "learning-rate-jump": 0.99,
        "update-ratio-high": _steps,
        "steps-too-large": _unless_scaled(0.85),
        "learning-rate-unusual": lambda finding, history, found: 0.9 if finding.evidence["is_high"] else 0.0,
        "non-finite-loss": _after_growth,
        "non-finite-gradients": _after_growth,
        "no-warm-up": _unless_scaled(0.6),
        "loss-explosion": _unless_scaled(0.6),
        "loss-divergence": 0.5,
        "divergence-ahead": lambda finding, history, found: 0.6 if finding.evidence["is_at_new_rate"] else 0.35,
        "loss-oscillation": 0.5,
        "growing-norm": 0.4,
        "norm-jump": 0.2,
    },
    f"{_DEAD} {_STANDSTILL} {_BROKEN} norm-spike loss-spike spiky-loss periodic-loss-spikes clip-rate-high "
    "saturated-units overfitting training-above-validation layer-norm-imbalance learning-rate-out-of-bounds "
    "attention-collapse attention-logits-large vanishing-layers shrinking-weights steps-too-large "
    "learning-rate-unusual",
    contradicted=_is_of_schedule_or_machine,
)
cause(
    "learning-rate-too-low",
    "The learning rate is too low: the weights hardly move.",
    "Raise the learning rate by 10 to 100 times; fastguard.LearningRateFinder finds one.",
    {
        "update-ratio-low": _unless_clipped,
        "learning-rate-out-of-bounds": lambda finding, history, found: 0.5 if _is_low(finding) else 0.0,
        "steps-too-small": _unless_clipped,
        "learning-rate-unusual": lambda finding, history, found: 0.0 if finding.evidence["is_high"] else 0.9,
    },
    _STANDSTILL,
)
cause(
    "scheduler-not-stepped",
    "The scheduler is never stepped, so the learning rate stays where the warm-up began.",
    "Call scheduler.step() after each optimizer.step().",
    {"scheduler-not-stepping": 0.98},
    f"update-ratio-low {_STANDSTILL}",
    needs=[needs.scheduler],
)
cause(
    "exploding-gradients",
    "Gradients explode on their way back through the model.",
    "Clip (max_norm at a few times the usual norm), start recurrent weights orthogonal, shorten the sequences, or add "
    "normalisation.",
    {
        "growing-norm": _without_clipping,
        "norm-spike": _many_spikes,
        "layer-norm-imbalance": 0.5,
        "loss-explosion": 0.3,
        "non-finite-gradients": _never_finite,
        "skip-run": _never_finite,
    },
    "loss-spike spiky-loss clip-rate-high loss-oscillation non-finite-loss non-finite-activations",
    contradicted=_comes_of_one_element,
)
cause(
    "gradients-too-large-to-clip",
    "Nearly every step is clipped to a small part of itself: the clip threshold sets the step, not the gradient.",
    "Raise max_norm towards the usual norm; or look why gradients are that large: a sum instead of a mean in the loss, "
    "unscaled accumulation, an initialisation that is too large.",
    {"clip-rate-high": 0.72},
    needs=[needs.clipping, needs.steps_of_the_gradients_size],
)
cause(
    "unscaled-accumulation",
    "Gradients of several batches are added up without dividing the losses by their number.",
    "Divide each micro-batch's loss by the number of micro-batches before backward().",
    {"unscaled-accumulation": 0.95, "norm-jump": 0.3},
    "clip-rate-high overfitting",
    needs=[needs.several_passes],
)
cause(
    "vanishing-gradients",
    "Hardly any gradient reaches the first layers.",
    "Use ReLU-like activations, normalisation, residual connections, or an initialisation that keeps the variance.",
    {"vanishing-layers": _of_itself(0.95), "vanishing-norm": 0.4},
    f"update-ratio-low saturated-units unchanged-weights zero-gradients zero-gradient-tensors {_STANDSTILL}",
)
cause(
    "poor-initialisation",
    "Some layers began with weights far too large or too small for their number of inputs.",
    "Initialise them by their fan-in: kaiming_normal_ for ReLU, xavier_normal_ for tanh.",
    {"poor-initialisation": 0.98},
    f"saturated-units update-ratio-high update-ratio-low clip-rate-high growing-norm layer-norm-imbalance {_DEAD} "
    f"vanishing-layers loss-explosion loss-oscillation no-warm-up {_STANDSTILL}",
)
cause(
    "dead-units",
    "Units that answer nothing to any input cut the layers before them off.",
    "Go back to a checkpoint from before; lower the learning rate, look at the bias before them, or use LeakyReLU.",
    {
        "dead-relu-units": _of_itself(0.85, _DIED_AFTER),
        "dead-smooth-units": _of_itself(0.85, _DIED_AFTER),
        "zero-gradient-tensors": _on_the_way,
        "zero-gradients": _of_itself(0.5, _DIED_AFTER),
    },
    f"loss-divergence vanishing-norm vanishing-layers loss-spike norm-spike unchanged-weights {_STANDSTILL}",
    needs=[needs.rectifiers],
    contradicted=_never_had_a_gradient,
)
cause(
    "saturated-units",
    "Units stuck at the ends of their range let hardly any gradient through.",
    "Initialise the layer before them smaller, normalise, or lower the learning rate.",
    {"saturated-units": lambda finding, history, found: 0.3 if "input-scale" in found else 0.8},
    f"vanishing-norm {_STANDSTILL}",
    needs=[needs.bounded_units],
)
cause(
    "parameters-missing-from-optimizer",
    "Trainable parameters of the model are not in the optimizer.",
    "Make the optimizer after the model is complete, or add them with add_param_group.",
    {"parameters-not-in-optimizer": lambda finding, history, found: 0.0 if finding.severity == "critical" else 0.99},
    f"unchanged-weights overfitting {_STANDSTILL}",
)
cause(
    "frozen-parameters",
    "Parameters are frozen, and it does not look as if on purpose.",
    "Set requires_grad_(True) before the optimizer is made; or leave them out of it, to say that it is on purpose.",
    {"frozen-parameters": _if_it_is_much(0.98)},
    f"unchanged-weights overfitting {_STANDSTILL}",
)
cause(
    "parameters-cut-off",
    "Parameters that the optimizer has never move: the loss does not depend on them.",
    "Look for detach(), no_grad() and modules that forward() does not use.",
    {"missing-gradients": 0.9, "unchanged-weights": 0.6, "zero-gradient-tensors": _cut},
    f"zero-gradients unchanged-weights vanishing-norm {_STANDSTILL}",
    contradicted=_are_idle_experts,
)
cause(
    "weight-decay-too-high",
    "Weight decay takes more from the weights than learning gives them.",
    "Divide weight_decay by 10 or more, and leave biases and norms out of it.",
    {"shrinking-weights": _decays, "large-weight-decay": 0.9},
    f"update-ratio-high clip-rate-high loss-divergence vanishing-layers layer-norm-imbalance growing-norm {_DEAD} "
    f"{_STANDSTILL}",
    needs=[needs.decay],
)
cause(
    "dropout-too-high",
    "Dropout leaves hardly anything to learn from.",
    "Lower it to 0.1 to 0.5.",
    {"dropout-high": 0.95, "training-above-validation": 0.6},
    f"clip-rate-high loss-oscillation spiky-loss {_DEAD} {_STANDSTILL}",
    needs=[needs.dropout],
)
cause(
    "overfitting",
    "The model learns its training data by heart.",
    "Stop at the best validation loss; get more data, augment, or regularise.",
    {"overfitting": 0.9},
    "overtraining label-noise loss-plateau norm-spike",
    needs=[needs.validation],
)
cause(
    "wrong-targets",
    "Everything moves as it should and nothing is learnt: inputs and targets do not seem to belong together.",
    "Look at single samples with their targets as the model gets them: shuffled, shifted, or wrongly joined? If they "
    "are right, the task needs more than this model has.",
    {
        "label-noise": 0.6,
        "loss-at-chance": _if_steps_are_sound,
        "underfitting": _if_nothing_carries_over,
        "loss-not-decreasing": _if_nothing_carries_over,
    },
    f"overfitting {_STANDSTILL}",
)
