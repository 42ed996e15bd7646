"""How strongly findings speak for the causes that come with fastguard, and what contradicts these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..records import TrainingHistory
from ..records.updates import is_bias
from . import needs
from .finding import Finding, sign_of
from .rules.lr import estimated_update_ratio
from .signals import signals_of

Found = Mapping[str, Finding]
_TOO_LARGE_STEPS = ("learning-rate-jump", "update-ratio-high", "no-warm-up", "loss-explosion")
DIED_AFTER = (*_TOO_LARGE_STEPS, "loss-spike")
_ALIVE_STEPS = 30
_SMALL_STEP, _LARGE_STEP = 0.03, 0.3  # of the median weight
_TELLING = 8.0  # standard deviations of what chance makes: more than what targets have of which only some are wrong
_AROUND = (*needs.ZERO_FLOORED, "LogSoftmax", "Squeeze", "View", "TBackward")
_UNDEFINED = ("LogBackward", "Log1p", "Log2", "Log10", "Sqrt", "Rsqrt", "Pow", "Div", "Acos", "Asin", "Xlogy", "Lgamma")
_LEARNS_NOTHING = ("loss-not-decreasing", "underfitting", "loss-plateau", "loss-at-chance", "loss-still-falling",
                   "overtraining", "overfitting", "label-noise", "training-above-validation")  # fmt: skip
_SETTINGS = ("dropout-high", "shrinking-weights", "large-weight-decay", "poor-initialisation")


def isolated(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Bad steps here and there, good ones after them: a batch, not the weights."""
    return 0.0 if history.skip_run >= 3 or history.longest_skip_run > 3 else 0.75


def has_finite_gradients(history: TrainingHistory) -> bool:
    """Whether no gradient was ever NaN or Inf: one of a batch that was would be."""
    return not history.num_nonfinite and not history.num_skipped


def going_on(finding: Finding, history: TrainingHistory, found: Found) -> float:
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


def overflows_on(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Bad at every step since some, in float16, without a scaler that would have made it so, and of fine weights."""
    is_of_data = "batch-not-finite" in found or history.weights.bad or history.model.is_smooth is False
    is_so = needs.float16(history) and history.skip_run >= 3 and not history.num_scaled
    return 0.7 if is_so and not is_of_data else 0.0


def overflowed(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Inf out of finite inputs and finite weights is overflow, and only half precision overflows that easily.

    Inputs are finite where a module says so, and where batch after batch goes bad.
    """
    if history.weights.bad:
        return 0.0
    goes_on = history.skip_run >= 3 and (_weights_are_fine(history) or "loss-scale-collapse" in found)
    return 0.9 if finding.evidence["num_infs"] and (finding.evidence["is_origin"] or goes_on) else 0.0


def never_finite(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Finite inputs and weights whose gradients were never finite: the way through the model makes them so large.

    Unless it is inputs that are, or float16 that ends early, or the loss is NaN, and never Inf, of a finite output or
    an operation that may have no value: what explodes is Inf on its way; nor where all outputs were of ordinary size.
    """
    scale = found.get("input-scale")
    if needs.float16(history) or (scale is not None and scale.evidence["rms"] > 100.0):
        return 0.0
    outputs = [x for _, x in history.batches if x.training and x.with_grad]
    is_calm = bool(outputs) and all(x.output_abs_max < 1e4 and not x.output_num_nonfinite for x in outputs)
    if is_undefined(history) or is_calm or "output-against-loss" in found:
        return 0.0
    losses = [entry.loss for entry in history.recent if entry.loss is not None]
    is_of_loss = not losses or not all(map(math.isfinite, losses))
    has_fine_start = "batch-not-finite" not in found and not history.weights.bad
    return 0.7 if history.num_clean < 3 and has_fine_start and is_of_loss else 0.0


def is_undefined(history: TrainingHistory) -> bool:
    """Whether losses were NaN from the first on, never Inf: of an output that is finite, or where an operation between
    has no value everywhere.
    """
    losses = [entry.loss for entry in history.recent if entry.loss is not None]
    is_nan = bool(losses) and not history.num_clean and all(map(math.isnan, losses))
    outputs = [x.output_num_nonfinite for _, x in history.batches if x.training and x.with_grad]
    is_after = bool(outputs) and not any(outputs)
    return is_nan and (is_after or any(op.startswith(_UNDEFINED) for op in history.model.loss_ops))


def _weights_are_fine(history: TrainingHistory) -> bool:
    """Whether weights were looked at since the run of skips began, and were all finite."""
    if not len(history.weights) or history.weights.last_step <= history.longest_skip_run_end - history.skip_run:
        return False
    return not history.weights.bad


def from_weights(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return 0.6 if history.weights.bad else 0.0


def from_input(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return 0.0 if finding.evidence["is_origin"] else 0.6


def of_itself(
    weight: float, before: tuple[str, ...] = _TOO_LARGE_STEPS
) -> Callable[[Finding, TrainingHistory, Found], float]:
    """`weight`, unless steps that were too large came `before`, or a setting explains it: units die of those."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        steps = [found[name].first_step for name in before if name in found]
        began = finding.first_step
        if _warns(found, *_SETTINGS) or (estimated_update_ratio(history) or 0.0) >= _LARGE_STEP:
            return 0.2 * weight
        if began is not None and began >= _ALIVE_STEPS and signals_of(history).progress < 0.03:
            return 0.3 * weight  # they were alive, and nothing was learnt then either
        if any(step is not None and (began is None or step <= began) for step in steps):
            return 0.2 * weight
        return weight

    return weigh


def on_the_way(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Dead units stop what lies before them; what is beside the way, such as an expert, is rather not chosen."""
    share = finding.evidence["num_zero_tensors"] / finding.evidence["num_tensors"]
    is_on_it = finding.evidence["from_the_first"] or share >= 0.5 or signals_of(history).progress >= 0.1
    return of_itself(0.8 if is_on_it else 0.25, DIED_AFTER)(finding, history, found)


def decays(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Not where the learning rate makes a usual decay so large, nor where steps are larger and nothing shrinks."""
    rate = found.get("learning-rate-unusual")
    if (rate is not None and rate.evidence["is_high"]) or _is_decay_of_the_rate(finding, history):
        return 0.2
    if finding.evidence["norm_left"] < finding.evidence["threshold_norm"]:
        return 0.99
    updates = found.get("update-ratio-high")
    too_high = updates is not None and updates.evidence["update_ratio"] > 10.0 * finding.evidence["decay_per_step"]
    return 0.4 if too_high and finding.evidence["decay_per_step"] else 0.99


def _is_decay_of_the_rate(finding: Finding, history: TrainingHistory) -> bool:
    """Whether decay takes much at each step though it was not set high: it is multiplied by the learning rate."""
    decays = [group.get("weight_decay") for group in history.model.optimizer_settings]
    is_usual = any(decays) and all(isinstance(value, (int, float)) and value <= 0.1 for value in decays)
    return is_usual and finding.evidence["decay_per_step"] > finding.evidence["threshold"]


def decayed_by_rate(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """A usual weight decay takes much at each step only where the learning rate is high."""
    return 0.8 if _is_decay_of_the_rate(finding, history) else 0.0


def steps(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Where weights shrink and steps are no larger than what shrinks them, the steps are decay."""
    shrinking = found.get("shrinking-weights")
    return 0.93 if shrinking is None or decays(shrinking, history, found) < 0.9 else 0.5


def unless_clipped(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Steps that are too small, unless clipping makes them so, or what makes gradients small that set their size."""
    clipped, are_small = found.get("clip-rate-high"), _warns(found, "vanishing-layers", "output-against-loss")
    usual = 0.4 if are_small and needs.steps_of_the_gradients_size(history) else 0.85
    return 0.25 if clipped is not None and clipped.evidence["median_coef"] < 0.05 else usual


def after_growth(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """NaN at the end of a loss or a norm that had run away: steps overshot until numbers ended.

    Seen once, in loss or gradients; less where an operation may have no finite value there.
    """
    if sign_of(finding) == "non-finite-loss" and "non-finite-gradients" in found:
        return 0.0
    losses, norms = history.loss_trend, history.norm_trend
    has_risen = losses.count >= 3 and losses.first > 0.0 and losses.mean > 3.0 * losses.first
    has_grown = norms.count >= 3 and norms.mean - norms.first > 4.6  # a hundredfold
    weight = 0.5 if history.model.is_smooth is False else 0.75
    return weight if has_risen or has_grown else 0.0


def if_nothing_carries_over(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """The training loss falls somewhat, the validation loss never: the samples are learnt, not what they share."""
    known = [v.val_loss for v in history.validations if math.isfinite(v.val_loss)]
    first, gained = history.loss_trend.first, signals_of(history).progress
    if len(known) < 3 or not gained > 0.03 or min(known) < 0.97 * first:
        return 0.0
    return if_steps_are_sound(finding, history, found)


def if_steps_are_sound(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Weights that move as they should and learn nothing: the targets do not follow from the inputs.

    Unless it was seen that they do: near inputs have near targets.
    """
    return 0.6 if (history.model.target_dependence or 0.0) <= _TELLING and _are_steps_sound(history, found) else 0.2


def is_too_plain(history: TrainingHistory, found: Found) -> bool:
    """Near inputs have near targets, steps are sound, and a model of nothing but linear layers does not find it."""
    layers = {op for op in history.model.loss_ops if not op.startswith(_AROUND)}
    is_it = layers == {"AddmmBackward0"} and (history.model.target_dependence or 0.0) > _TELLING
    return is_it and _are_steps_sound(history, found)


def _are_steps_sound(history: TrainingHistory, found: Found) -> bool:
    odd = ("steps-too-large", "steps-too-small", "learning-rate-unusual", "vanishing-layers", "same-output-for-all",
           "zero-gradient-tensors", "update-ratio-high", "update-ratio-low", "vanishing-norm",
           "learning-rate-still-rising", "learning-rate-gone")  # fmt: skip
    ratio = estimated_update_ratio(history)
    if ratio is not None and not 5e-4 <= ratio <= _LARGE_STEP:
        return False
    return not _warns(found, *odd)


def if_unexplained(weight: float) -> Callable[[Finding, TrainingHistory, Found], float]:
    """`weight` where steps are sound and nothing warns but a loss that stands or does not carry over; else a third."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        others = [name for name in found if name != sign_of(finding) and name not in _LEARNS_NOTHING]
        is_alone = not _warns(found, *others) and _are_steps_sound(history, found)
        return weight if is_alone else weight / 3.0

    return weigh


def _warns(found: Found, *names: str) -> bool:
    return any(name in found and found[name].severity != "info" for name in names)


def unless_scaled(weight: float) -> Callable[[Finding, TrainingHistory, Found], float]:
    """`weight`, unless inputs or targets are so large that any usual rate overshoots, or come one class at a time."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        return (0.4 if _is_scaled(found) or _climbs(history) else 1.0) * weight

    return weigh


def climbs(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """A loss that rises from the first, small steps on: they go up the gradient, and not down."""
    return 0.85 if _climbs(history) and not _is_scaled(found) else 0.0


def _is_scaled(found: Found) -> bool:
    return _warns(found, "input-scale", "target-scale", "sorted-targets")


def _climbs(history: TrainingHistory) -> bool:
    """Whether the loss was never lower than where it began, is three times that, and steps began small."""
    trend, ratio = history.loss_trend, estimated_update_ratio(history, at_first=True)
    begin = sorted(trend.firsts[:3])[1] if len(trend.firsts) > 2 else math.inf
    is_up = trend.mean > 3.0 * begin > 0.0 and trend.best > 0.95 * begin
    return is_up and ratio is not None and ratio < _SMALL_STEP


def initial_weights(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Small weights in less than a quarter of the layers are rarely why a model does not learn: they grow."""
    ratio = finding.evidence["ratio"]
    return 0.4 if 0.0 < ratio < 1.0 and finding.evidence["share"] < 0.25 else 0.98


def of_first_weights(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """First outputs that are far too large are of the first weights: not where inputs are as large already, nor where
    all weights began as they should, and no table of embeddings is there, of which that is not known.
    """
    notes = history.model
    may_be = any(kind.startswith("Embedding") for kind in notes.module_kinds)
    may_be = may_be or any(actual > 2.0 * usual for actual, usual in notes.initialization.values())
    return 0.8 if may_be and finding.evidence["inputs"] <= 5.0 else 0.0


def has_tiny_batches(history: TrainingHistory, found: Found) -> bool:
    """Batches of a few samples, whose noise throws the loss about without a bad one; a single element far out; or a
    loss that nothing holds."""
    return any(name in found for name in ("tiny-batches", "lone-element", "loss-without-floor"))


def is_of_schedule_or_machine(history: TrainingHistory, found: Found) -> bool:
    """A learning rate that only ever rose: the schedule is wrong, whatever its size; gradients that add up, which make
    any rate too high; or one element far out of range, ahead of all steps that were too large."""
    is_elsewhere = "learning-rate-still-rising" in found or "gradients-not-cleared" in found
    is_elsewhere = is_elsewhere or _is_moved_by_others(history, found)
    return is_elsewhere or comes_of_one_element(history, found)


def _is_moved_by_others(history: TrainingHistory, found: Found) -> bool:
    """Most parameters are written to at most steps by something other than the optimizer, and nothing is learnt."""
    finding, notes = found.get("weights-overwritten"), history.model
    if finding is None or finding.severity == "info":
        return False
    is_most = 2 * len(notes.overwritten) > min(len(notes.names), 16)  # of so many that are looked at
    return is_most and 2 * (notes.num_overwritten or 0) > (notes.num_compared or 0)


def comes_of_one_element(history: TrainingHistory, found: Found) -> bool:
    """One element far out of range, ahead of all steps that were too large."""
    lone = found.get("lone-element")
    steps = [found[name].first_step for name in _TOO_LARGE_STEPS if name in found]
    return lone is not None and all(step is None or step >= (lone.first_step or 0) for step in steps)


def never_had_a_gradient(history: TrainingHistory, found: Found) -> bool:
    """Not one gradient in the whole run, or beside the units' own weights: units die in training, and all of them."""
    return "no-gradient" in found or _are_bypassed(history)


def if_it_is_much(weight: float) -> Callable[[Finding, TrainingHistory, Found], float]:
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


def cut(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return 0.9 if _are_bypassed(history) else 0.0


def are_idle_experts(history: TrainingHistory, found: Found) -> bool:
    """Modules side by side, some of which are not chosen."""
    return "idle-experts" in found


def is_turned_round(found: Found) -> bool:
    """What is learnt makes others' losses far higher than knowing nothing does, of inputs that are alike."""
    noise = found.get("label-noise")
    return noise is not None and noise.confidence > 0.8 and "validation-inputs-differ" not in found


def unless_turned_round(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Samples learnt by heart tell nothing of others; they do not tell what is false."""
    return 0.4 if is_turned_round(found) else 0.9


def without_clipping(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return 0.6 if not history.num_clipped else 0.3


def many_spikes(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return without_clipping(finding, history, found) if finding.evidence["num_spikes"] >= 3 else 0.0


def spiked(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """A loss that jumped and came back, unless steps that were too large came before, or units stay dead."""
    stay_dead = _warns(found, "zero-gradient-tensors", "same-output-for-all", "dead-units")
    return few(finding, 0.6) * of_itself(1.0)(finding, history, found) * (0.3 if stay_dead else 1.0)


def few_spikes(finding: Finding, history: TrainingHistory, found: Found) -> float:
    return of_itself(few(finding, 0.4))(finding, history, found)


def few(finding: Finding, weight: float) -> float:
    """One bad batch is bad once, or a few times; what comes back again and again is of the run, not of a batch."""
    return weight if finding.evidence["num_spikes"] <= 2 else 0.2 * weight
