"""Root causes in how model, loss, optimizer, data and machine work together, and those that are a field of a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..records import TrainingHistory
from . import needs
from .causes import cause
from .finding import Finding, sign_of
from .reasons import climbs, has_finite_gradients, is_lost_in_float16, is_too_plain, is_undefined
from .registry import RULES
from .rules.output_targets import last_activation
from .signals import signals_of

Found = Mapping[str, Finding]
_STANDING = ("loss-not-decreasing", "underfitting", "loss-at-chance", "same-output-for-all")
_JUMPS = ("norm-spike", "loss-spike", "loss-explosion", "non-finite-loss", "non-finite-gradients", "spiky-loss")
_UNSTEADY = ("loss-explosion", "loss-divergence", "loss-oscillation", "norm-spike", "growing-norm")


def if_nothing_is_learnt(weight: float, otherwise: float = 0.0) -> Callable[[Finding, TrainingHistory, Found], float]:
    """`weight` where the loss stands still, `otherwise` where it does not."""

    def weigh(finding: Finding, history: TrainingHistory, found: Found) -> float:
        return weight if any(name in found for name in _STANDING) else otherwise

    return weigh


def _wrong_range(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """An activation at the end is to blame where its output stands at an end, or where nothing else is odd."""
    if finding.evidence["is_at_its_end"]:
        return 0.9
    is_alone = not any(name in found for name in ("learning-rate-jump", "update-ratio-high", "update-ratio-low"))
    return 0.45 if is_alone else 0.2


def _from_scale(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Inputs far off are to blame for steps that jump and for standstill; not where all goes well."""
    is_far = finding.confidence > 0.8
    if any(name in found for name in (*_STANDING, *_UNSTEADY, "skip-run")):
        return 0.9 if is_far else 0.7
    return 0.6 if finding.severity != "info" else 0.2


def _first_loss_is_huge(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Squared errors of thousands in the beginning, and an output of ordinary size: targets are far from it."""
    first = history.loss_trend.first
    samples = [x for _, x in history.batches if x.training][:3]
    if not first > 100.0 or not samples or any(x.output_abs_max > 0.3 * first**0.5 for x in samples):
        return 0.0
    kinds = history.model.loss_ops[:2]
    return 0.8 if any("Mse" in op or "L1" in op or "Huber" in op for op in kinds) else 0.5 if not kinds else 0.0


def _ends_in_one_softmax(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """A softmax over one unit is 1, whatever comes in; over a batch of such no gradient passes."""
    if _takes_one_softmax(history):
        return 0.95
    samples = [x for _, x in history.batches if x.training and x.with_grad]
    is_flat = bool(samples) and all(x.output_spread == 0.0 for x in samples if x.num_samples > 1)
    return 0.9 if is_flat and _reaches_the_output(history, found) else 0.0


def _leaves_nothing(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """What clipping leaves is too little for steps of the gradient's size; or too little beside Adam's eps."""
    left = finding.evidence["median_coef"]
    if needs.steps_of_the_gradients_size(history) is not False:
        return 0.9 if left < 0.01 else 0.0
    elements = history.last.tensors.total_row()[0] if history.last is not None else 0.0
    rms = left * finding.evidence["median_norm"] / max(elements, 1.0) ** 0.5
    return 0.95 if rms < 10.0 * _eps(history) else 0.0


def _eps(history: TrainingHistory) -> float:
    values = [group.get("eps") for group in history.model.optimizer_settings]
    return max((float(value) for value in values if isinstance(value, (int, float))), default=1e-8)


def _without_repetition(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """A batch that comes again and again is soon learnt by heart."""
    return 0.2 if "same-inputs" in found else 0.7


def _collapsed(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Not from outputs in eval mode alone: those may be of other statistics, or of noise that is missing."""
    return 0.0 if finding.evidence["began_so"] or finding.evidence["in_eval_mode"] else 0.55


def _unless_others_speak(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Outputs become alike where units die, weights shrink or steps overshoot, too."""
    return 0.9 if _is_alone(sign_of(finding), found) else 0.3


def _from_the_start(finding: Finding, history: TrainingHistory, found: Found) -> float:
    if finding.evidence["in_eval_mode"]:
        return 0.0
    return 0.55 if finding.evidence["began_so"] and history.model.last_modules[:1] != ("Linear",) else 0.2


def _never_learnt(history: TrainingHistory, found: Found) -> bool:
    """Less than a twentieth of the first loss was ever gained, and it is not seen why."""
    return signals_of(history).progress < 0.05 and not is_too_plain(history, found)


def _takes_one_softmax(history: TrainingHistory) -> bool:
    """The loss makes a softmax of one unit, or along an axis of one, and no gradient of it is anything but zero.

    Along an axis of several it is not, at outputs below 10, if the loss is: then it has gradients that are not zero.
    """
    samples = [x for _, x in history.batches if x.training and x.with_grad]
    ops, widths = history.model.loss_ops[:5], {x.output_width for x in samples}
    is_of_one = widths == {1} and ("SoftmaxBackward0" in ops or "LogSoftmaxBackward0" in ops)
    is_small = bool(samples) and all(x.output_abs_max < 10.0 for x in samples) and history.losses.min > 0.0
    return history.model.loss_kind == "zero" and (is_of_one or (is_small and "SoftmaxBackward0" in ops))


def _reaches_the_output(history: TrainingHistory, found: Found) -> bool:
    """The loss pulls at the output, and gradients are there, all zeros: the last activation ends them."""
    if _takes_one_softmax(history) or is_lost_in_float16(history):
        return True
    has_elements = history.last is not None and bool(history.last.tensors.total_row()[0])
    return history.model.loss_kind not in ("", "zero") and has_elements and bool(last_activation(history))


def _has_not_learnt(history: TrainingHistory, found: Found) -> bool:
    """A loss that a constant does not meet."""
    return signals_of(history).progress < 0.5


def _finite_loss(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """Gradients that are NaN while the loss is a number, and the norm had not grown: a derivative ends there."""
    bad = [e for e in history.recent if e.skipped or not math.isfinite(e.norm)]
    known = [e.loss for e in bad if e.loss is not None]
    if is_undefined(history):
        return 0.88
    if not known or "non-finite-loss" in found or not all(math.isfinite(loss) for loss in known):
        return 0.0
    has_grown = history.norm_trend.count >= 3 and history.norm_trend.mean - history.norm_trend.first > 4.6
    return 0.4 if has_grown else 0.88


def _loss_alone(finding: Finding, history: TrainingHistory, found: Found) -> float:
    """A loss that is NaN or Inf while no gradient ever was: the last steps to it do that, not what came in."""
    return 0.85 if has_finite_gradients(history) and history.model.is_smooth is False else 0.0


def _is_of_data_or_precision(history: TrainingHistory, found: Found) -> bool:
    """A batch that is not finite itself, half precision, which overflows, no operation that could be to blame, or a
    loss that had no floor."""
    is_smooth = history.model.is_smooth is True and not is_undefined(history)
    is_elsewhere = "batch-not-finite" in found or "loss-without-floor" in found
    return is_elsewhere or needs.half_precision(history) is True or is_smooth


def _is_alone(name: str, found: Found) -> bool:
    return all(finding.severity == "info" for other, finding in found.items() if other != name)


def _is_of_batch_or_precision(history: TrainingHistory, found: Found) -> bool:
    """A batch that is not finite itself, inputs far out, or half precision, which overflows."""
    return "batch-not-finite" in found or "input-outliers" in found or needs.half_precision(history) is True


for _rule in [sign for one in RULES.values() for sign in one.signs]:
    _weight = if_nothing_is_learnt(*_rule.weight) if isinstance(_rule.weight, tuple) else _rule.weight
    if isinstance(_rule.cause, tuple):
        cause(*_rule.cause, _rule.remedy, {_rule.name: _weight}, _rule.explains, needs=_rule.cause_needs)
cause(
    "no-gradient-arrives",
    "Not one gradient reaches the optimizer.",
    "Look for zero_grad() between backward() and step(), an optimizer made of a model's former parameters, detach() "
    "or no_grad() on the way, and for another that steps in its place.",
    {
        "no-gradient": 0.97,
        "parameters-not-in-optimizer": lambda finding, history, found: 0.97 if finding.severity == "critical" else 0.0,
    },
    "zero-gradients vanishing-gradients untrained-parameters standstill",
    contradicted=_reaches_the_output,
)
cause(
    "wrong-output-layer",
    "The last layer's activation, shape or axis does not go with the loss or with the targets.",
    "Give cross_entropy and losses with logits the plain output of the last linear layer; end in nothing for targets "
    "that can be any number.",
    {
        "output-against-loss": 0.97,
        "output-not-as-the-loss-asks": 0.97,
        "targets-beyond-output": 0.96,
        "softmax-floor": 0.9,
        "bounded-output": _wrong_range,
        "same-output-for-all": _from_the_start,
        "no-gradient": _ends_in_one_softmax,
    },
    "zero-gradients no-gradient vanishing-gradients training-above-validation non-finite-loss non-finite-gradients "
    "skip-run standstill",
)
cause(
    "unnormalised-inputs",
    "The inputs are far from the scale that the layers were initialised for.",
    "Bring each feature to mean 0 and standard deviation 1, with the training set's numbers.",
    {"input-scale": _from_scale},
    "loss-begins-high norm-spike growing-norm loss-divergence loss-oscillation clip-rate-high no-warm-up loss-spike "
    "update-ratio-high saturated-units dead-units zero-gradients standstill",
)
cause(
    "unnormalised-targets",
    "The targets are far larger than what the model puts out.",
    "Bring the targets to mean 0 and standard deviation 1, and undo it in prediction.",
    {
        "target-scale": _from_scale,
        **dict.fromkeys(("underfitting", "loss-explosion", "no-warm-up"), _first_loss_is_huge),
    },
    "norm-spike growing-norm loss-divergence loss-oscillation update-ratio-high clip-rate-high layer-norm-imbalance "
    "non-finite-loss non-finite-gradients skip-run standstill",
)
cause(
    "wrong-loss",
    "The loss is not one for these targets, has the wrong sign, or is not reduced as it should be.",
    "Use cross_entropy for classes, binary_cross_entropy_with_logits for yes or no, a squared or absolute error for "
    "numbers; give output and targets the same shape; look for a minus, maximize=True and negated gradients.",
    {
        **dict.fromkeys(("loss-explosion", "loss-not-decreasing", "no-warm-up"), climbs),
        "broadcast-targets": 0.97,
        "negated-loss": 0.97,
        "loss-without-floor": 0.9,
        "loss-against-targets": lambda finding, history, found: (
            0.95 if finding.confidence >= 0.9 else if_nothing_is_learnt(0.85, 0.7)(finding, history, found)
        ),
    },
    "loss-divergence vanishing-gradients zero-gradients same-output-for-all no-warm-up growing-norm norm-spike "
    "layer-norm-imbalance update-ratio-high clip-rate-high non-finite-loss non-finite-gradients skip-run standstill",
)
cause(
    "clipped-away",
    "Clipping leaves so little of the gradients that the weights hardly move.",
    "Raise max_norm towards the usual norm.",
    {"clip-rate-high": _leaves_nothing},
    "update-ratio-low standstill",
    needs=[needs.clipping],
)
cause(
    "wrong-schedule",
    "The learning rate's schedule does not fit the run: it takes the rate away too early, or never ends its warm-up.",
    "Look at the schedule's length and unit (steps or epochs), and at where scheduler.step() is called.",
    {"learning-rate-gone": 0.92, "learning-rate-still-rising": 0.93},
    "update-ratio-low loss-divergence growing-norm norm-spike loss-spike loss-oscillation zero-gradients "
    "same-output-for-all learning-rate-unusual update-ratio-high standstill",
)
cause(
    "trivial-targets",
    "There is nothing to learn: the targets are constant, or can be read off the inputs.",
    "Look at single samples with their targets; remove leaked features.",
    {"one-target": 0.96, "answer-in-inputs": 0.95, "loss-gone": _without_repetition},
    "vanishing-gradients loss-not-decreasing zero-gradients",
)
cause(
    "outliers",
    "Single inputs are far larger than all others.",
    "Look at these samples: missing values coded as numbers, other units. Clip or repair them.",
    {"input-outliers": lambda finding, history, found: 0.8 if any(n in found for n in _JUMPS) else 0.35},
    "norm-spike loss-spike loss-divergence non-finite-gradients non-finite-loss clip-rate-high",
)
cause(
    "collapsed-representation",
    "The model has come to give one answer to every input.",
    "Look for a loss that can be met by a constant: no negatives, a stop-gradient left out, one term that outweighs.",
    {"same-output-for-all": _collapsed, "outputs-become-alike": _unless_others_speak},
    "zero-gradients vanishing-gradients loss-gone standstill",
    contradicted=_has_not_learnt,
)
cause(
    "model-cannot-fit",
    "The model gets no further, and nothing else is seen that holds it back: it may lack what the task needs.",
    "See whether it can learn one batch by heart; then make it wider or deeper, or give it what tells inputs apart.",
    {
        "layers-without-activation": 0.85,
        "loss-at-chance": lambda finding, history, found: 0.7 if is_too_plain(history, found) else 0.0,
        "underfitting": lambda finding, history, found: 0.4 if _is_alone("underfitting", found) else 0.0,
    },
    "loss-not-decreasing bounded-output",
    contradicted=_never_learnt,
)
cause(
    "singular-operation",
    "An operation in model or loss, or in what prepares the targets, has no finite value or derivative where it was "
    "asked: a root or a logarithm of 0, 0 / 0.",
    "Look at square roots, norms, logarithms, divisions and powers: add a small eps inside, or clamp before them.",
    {"non-finite-gradients": _finite_loss, "skip-run": _finite_loss, "non-finite-loss": _loss_alone},
    "non-finite-activations non-finite-loss",
    contradicted=_is_of_data_or_precision,
)
cause(
    "dead-experts",
    "Some experts are never chosen, and learn nothing.",
    "Balance the load of the router: an auxiliary loss, noise on its logits, or a capacity for each expert.",
    {"idle-experts": 0.98, "unused-experts": 0.9, "router-collapse": 0.6},
    "untrained-parameters zero-gradients layer-norm-imbalance standstill",
)
cause(
    "hardware-fault",
    "A gradient or the optimizer's state was far out of range, as a flipped bit in memory or arithmetic leaves it.",
    "Go back to a checkpoint from before that step and take it again: if all is well then, test memory and device.",
    {"lone-element": 0.97, "moment-out-of-bounds": 0.85},
    "norm-spike loss-spike growing-norm non-finite-gradients non-finite-loss skip-run non-finite-activations "
    "non-finite-weights saturated-units loss-divergence clip-rate-high layer-norm-imbalance update-ratio-high "
    "dead-units zero-gradients vanishing-gradients standstill",
    contradicted=_is_of_batch_or_precision,
)
