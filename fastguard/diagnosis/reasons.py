"""How strongly a finding speaks for a cause, where that depends on the rest of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..records import TrainingHistory
from . import needs
from .finding import Finding, sign_of
from .rules.lr import estimated_update_ratio
from .signals import num_samples, signals_of

Found = Mapping[str, Finding]
Reason = Callable[[Finding, TrainingHistory, Found], float]
_STANDING = ("loss-not-decreasing", "underfitting", "loss-at-chance", "same-output-for-all")
_TOO_LARGE_STEPS = ("learning-rate-jump", "update-ratio-high", "no-warm-up", "loss-explosion", "loss-spike")
_SETTINGS = ("dropout-high", "shrinking-weights", "large-weight-decay", "poor-initialisation", "output-against-loss")
_ALIVE_STEPS = 30
_FAR_TOO_MUCH_DECAY = 0.5
_SMALL_STEP, _LARGE_STEP = 0.03, 0.3  # of the median weight


def if_nothing_is_learnt(weight: float, otherwise: float = 0.0) -> Reason:
    """`weight` if the loss does not fall, `otherwise` if it does."""
    return lambda finding, history, found: weight if not found.keys().isdisjoint(_STANDING) else otherwise


def isolated(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Bad steps here and there, good ones after them: a batch, not the weights. In a game the other side makes them."""
    is_of_loss = sign_of(finding) == "non-finite-loss" and needs.has_finite_gradients(history)
    if is_of_loss or history.skip_run >= 3 or history.longest_skip_run > 3:
        return 0.0
    first_taken = next((event.step for event in history.first_events if not event.skipped), math.inf)
    is_followed = first_taken == math.inf or (bool(history.clean) and history.clean[-1].step > first_taken)
    return 0.75 if is_followed else 0.0 if needs.game(history) else 0.3


def going_on(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """What is bad at every step since is in the weights, unless those are known, or float16 or an operation does it."""
    may_be_finite = _weights_are_fine(history) or history.model.is_smooth is False or needs.float16(history)
    goes_on = history.num_clean >= 3 and history.skip_run >= 3 and not history.num_scaled
    return 0.6 if goes_on and not may_be_finite else 0.0


def _weights_are_fine(history: TrainingHistory) -> bool:
    """Whether weights were looked at since the run of skips began, and were all finite."""
    is_late = len(history.weights) and history.weights.last_step > history.longest_skip_run_end - history.skip_run
    return bool(is_late) and not history.weights.bad


def overflowed(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Inf of finite inputs, or batch after batch, and of finite weights is overflow: half precision's as a rule."""
    goes_on = history.skip_run >= 3 and (_weights_are_fine(history) or "loss-scale-collapse" in found)
    is_overflow = finding.evidence["num_infs"] and (finding.evidence["is_origin"] or goes_on)
    return 0.9 if is_overflow and not history.weights.bad else 0.0


def overflows_on(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Bad at every step since some, in float16, without a scaler that would have made it so, and of fine weights."""
    is_of_data = "batch-not-finite" in found or history.weights.bad or history.model.is_smooth is False
    is_so = needs.float16(history) and history.skip_run >= 3 and not history.num_scaled
    return 0.7 if is_so and not is_of_data else 0.0


def lost_in_float16(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """The loss pulls at the output, and in float16, without a scaler, nothing of that is left."""
    is_pulled = history.model.loss_kind not in ("", "zero")
    return 0.9 if is_pulled and needs.float16(history) and not history.num_scaled else 0.0


def cut_off(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Gradients of zero throughout, which no float16, no equal weights and no other parameters in the loss explain."""
    if "parameters-not-in-optimizer" in found and left_out(found["parameters-not-in-optimizer"], history, found):
        return 0.3
    is_equal = "poor-initialisation" in found and found["poor-initialisation"].evidence["ratio"] == 0.0
    return 0.0 if lost_in_float16(finding, history, found) else 0.3 if is_equal else 0.97


def never_finite(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Gradients that were never finite, of finite inputs and weights, unless something nearer makes them so."""
    outputs = [x for _, x in history.batches if x.training and x.with_grad]
    is_calm = bool(outputs) and all(x.output_abs_max < 1e4 and not x.output_num_nonfinite for x in outputs)
    is_elsewhere = "batch-not-finite" in found or "output-against-loss" in found or bool(history.weights.bad)
    is_elsewhere = is_elsewhere or needs.float16(history) or is_calm or needs.is_undefined(history)
    return 0.7 if history.num_clean < 3 and not is_elsewhere else 0.0


def of_itself(weight: float) -> Reason:
    """`weight`, unless steps that were too large came before, or a setting explains it: units die of those."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        began, steps = finding.first_step, [found[name].first_step for name in _TOO_LARGE_STEPS if name in found]
        if _warns(found, *_SETTINGS) or (estimated_update_ratio(history) or 0.0) >= _LARGE_STEP:
            return 0.2 * weight
        if began is not None and began >= _ALIVE_STEPS and signals_of(history).progress < 0.03:
            return 0.3 * weight  # they were alive, and nothing was learnt then either
        is_after = any(step is not None and (began is None or step <= began) for step in steps)
        return 0.2 * weight if is_after else weight

    return weigh


def unless_clipped(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Steps that are too small, unless clipping or sorted data makes them so, or what makes gradients small."""
    clipped, are_small = found.get("clip-rate-high"), _warns(found, "vanishing-layers", "output-against-loss")
    if _warns(found, "already-clipped", "sorted-targets"):
        return 0.25
    usual = 0.4 if are_small and needs.steps_of_the_gradients_size(history) else 0.85
    return 0.25 if clipped is not None and clipped.evidence["median_coef"] < 0.05 else usual


def unless_decayed(weight: float) -> Reason:
    """`weight` of steps that are too large, unless decay is ten times what is too much, or inputs make gradients so."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        decay = found.get("large-weight-decay")
        is_it = decay is not None and decay.evidence["weight_decay"] >= _FAR_TOO_MUCH_DECAY
        is_scaled = _warns(found, "input-scale") and needs.steps_of_the_gradients_size(history)
        return 0.4 * weight if is_scaled or (is_it and _warns(found, "large-weight-decay")) else weight

    return weigh


def leaves_nothing(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """What clipping leaves is too little for steps of the gradient's size; or too little beside Adam's eps."""
    sets_steps = needs.steps_of_the_gradients_size(history) is not False
    return 0.9 if finding.evidence["median_coef"] < (0.01 if sets_steps else 1e-5) else 0.0


def after_growth(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """NaN, seen once, after a loss or a norm had run away, or at an unusual rate: steps overshot."""
    if sign_of(finding) == "non-finite-loss" and "non-finite-gradients" in found:
        return 0.0
    losses = history.loss_trend
    has_risen = losses.count >= 3 and losses.first > 0.0 and losses.mean > 3.0 * losses.first
    weight = 0.5 if history.model.is_smooth is False else 0.75
    return weight if has_risen or _norms_have_grown(history) or _warns(found, "learning-rate-unusual") else 0.0


def _norms_have_grown(history: TrainingHistory) -> bool:
    norms = history.norm_trend
    return norms.count >= 3 and norms.mean - norms.first > 4.6  # a hundredfold


def finite_loss(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Gradients that are NaN while the loss is a number, and the norm had not grown: a derivative ends there."""
    bad = [e for e in history.recent if e.skipped or not math.isfinite(e.norm)]
    known = [e.loss for e in bad if e.loss is not None]
    if needs.is_undefined(history):
        return 0.88
    if not known or "non-finite-loss" in found or not all(map(math.isfinite, known)):
        return 0.0
    return 0.4 if _norms_have_grown(history) else 0.88


def loss_alone(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """A loss that is NaN or Inf while no gradient ever was: the last steps to it do that, not what came in."""
    return 0.85 if needs.has_finite_gradients(history) and history.model.is_smooth is False else 0.0


def climbs(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """A loss that was never below its first, and is three times that after small steps: they go up the gradient."""
    trend, ratio = history.loss_trend, estimated_update_ratio(history, at_first=True)
    begin = sorted(trend.firsts[:3])[1] if len(trend.firsts) > 2 else math.inf
    is_up = trend.mean > 3.0 * begin > 0.0 and trend.best > 0.95 * begin
    is_scaled = _warns(found, "input-scale", "target-scale", "sorted-targets")
    return 0.85 if is_up and ratio is not None and ratio < _SMALL_STEP and not is_scaled else 0.0


def unless_held_back(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Inputs that change nothing say nothing of the targets where something else may keep the model from learning."""
    return 0.0 if _warns(found, *found.keys() - {sign_of(finding), *_STANDING}) else 0.7


def few(weight: float) -> Reason:
    """`weight` of one or two spikes; what comes back again and again is of the run, and tiny batches are noisy."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        return weight if finding.evidence["num_spikes"] <= 2 and num_samples(history) > 4 else 0.2 * weight

    return weigh


def left_out(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Parameters that no optimizer holds, unless the optimizer holds none of the model's."""
    return 0.0 if finding.severity == "critical" and "are_elsewhere" not in finding.evidence else 0.99


def if_alone(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """No other sign warns, and the loss has no margin, which embeddings that are all alike meet exactly."""
    return (
        0.4
        if not needs.margin(history) and all(one is finding or one.severity == "info" for one in found.values())
        else 0.0
    )


def half_learnt(history: TrainingHistory) -> bool:
    """Half of the first loss gained."""
    return signals_of(history).progress >= 0.5


def _warns(found: Found, *names: str) -> bool:
    return any(name in found and found[name].severity != "info" for name in names)
