"""The root causes that come with fastguard. Others are a field of their rule."""

from __future__ import annotations

from . import needs, reasons
from .causes import cause
from .registry import RULES
from .signals import signals_of

for _rule in [sign for one in RULES.values() for sign in one.signs]:
    _weight = reasons.if_nothing_is_learnt(*_rule.weight) if isinstance(_rule.weight, tuple) else _rule.weight
    if isinstance(_rule.cause, tuple):
        cause(*_rule.cause, _rule.remedy, {_rule.name: _weight}, _rule.explains)

cause(
    "corrupted-weights",
    "Some weights are NaN or Inf, and have spoilt every step since.",
    "Go back to a checkpoint from before. Guard with skip_nonfinite=True, and look for what writes to these weights.",
    {"non-finite-weights": 0.97, "skip-run": reasons.going_on},
    "non-finite-activations half-precision-range nonfinite",
)
cause(
    "half-precision-overflow",
    "A layer's output leaves the range of its half precision.",
    "Use bfloat16, or keep that layer in float32; look why its weights or inputs are so large.",
    {"non-finite-activations": reasons.overflowed, "loss-scale-collapse": 0.8, "skip-run": reasons.overflows_on},
    "non-finite-activations nonfinite",
    needs=[needs.half_precision],
)
cause(
    "half-precision-underflow",
    "Gradients are too small for float16 and become zero.",
    "Use a GradScaler, or bfloat16.",
    {"half-precision-underflow": 0.9, "no-gradient": reasons.lost_in_float16},
    "zero-gradients vanishing-gradients standstill",
    needs=[needs.half_precision],
)
cause(
    "bad-batch",
    "One or a few batches contain NaN, extreme values or bad labels.",
    "Look at the samples of these steps: NaN, scale, targets. Fix or drop them. Skipped steps changed nothing.",
    {
        "non-finite-gradients": reasons.isolated,
        "non-finite-loss": reasons.isolated,
        "loss-spike": reasons.few(0.6),
        "batch-not-finite": 0.95,
        "norm-spike": reasons.few(0.4),
    },
    "loss-spike non-finite-activations",
    unless="lone-element loss-without-floor output-against-loss",
)
cause(
    "learning-rate-too-high",
    "The learning rate is too high: steps overshoot.",
    "Divide the learning rate by 10, and start again or at a checkpoint from before the loss turned; warm it up there.",
    {
        "learning-rate-jump": 0.99,
        "update-ratio-high": 0.93,
        "steps-too-large": reasons.unless_decayed(0.85),
        "learning-rate-unusual": lambda *seen: (
            reasons.unless_decayed(0.9)(*seen) if seen[0].evidence["is_high"] else 0.0
        ),
        "non-finite-loss": reasons.after_growth,
        "non-finite-gradients": reasons.after_growth,
        "no-warm-up": 0.6,
        "loss-explosion": 0.6,
        "loss-divergence": 0.5,
        "divergence-ahead": lambda finding, history, found: 0.6 if finding.evidence["is_at_new_rate"] else 0.35,
        "growing-norm": 0.4,
    },
    "dead-units zero-gradients vanishing-gradients non-finite-activations saturated-units overfitting "
    "learning-rate-unusual unsteady nonfinite standstill",
    unless="learning-rate-still-rising gradients-not-cleared lone-element",
)
cause(
    "learning-rate-too-low",
    "The learning rate is too low: the weights hardly move.",
    "Raise the learning rate by 10 to 100 times; fastguard.LearningRateFinder finds one.",
    {
        "update-ratio-low": reasons.unless_clipped,
        "steps-too-small": reasons.unless_clipped,
        "loss-not-decreasing": lambda finding, history, found: 0.6 if signals_of(history).still_falls else 0.0,
        "falls-in-a-line": 0.85,
        "learning-rate-unusual": lambda finding, history, found: 0.0 if finding.evidence["is_high"] else 0.9,
    },
    "standstill",
)
cause(
    "exploding-gradients",
    "Gradients, or the activations they come from, explode on their way through the model.",
    "Clip (max_norm at a few times the usual norm), start recurrent weights orthogonal, shorten the sequences, or add "
    "normalisation.",
    {
        "growing-norm": lambda finding, history, found: 0.3 if history.num_clipped else 0.6,
        "norm-spike": lambda finding, history, found: 0.6 if finding.evidence["num_spikes"] >= 3 else 0.0,
        "loss-explosion": 0.3,
        "non-finite-gradients": reasons.never_finite,
        "skip-run": reasons.never_finite,
    },
    "loss-spike clip-rate-high non-finite-loss non-finite-activations",
    unless="learning-rate-still-rising gradients-not-cleared lone-element",
)
cause(
    "gradients-too-large-to-clip",
    "Nearly every step is clipped to a small part of itself: the clip threshold sets the step, not the gradient.",
    "Raise max_norm towards the usual norm; or look why gradients are that large: a sum instead of a mean in the loss, "
    "unscaled accumulation, an initialisation that is too large.",
    {"clip-rate-high": 0.72},
    needs=[needs.steps_of_the_gradients_size],
)
cause(
    "clipped-away",
    "Clipping leaves so little of the gradients that the weights hardly move.",
    "Raise max_norm towards the usual norm.",
    {
        "clip-rate-high": reasons.leaves_nothing,
        "already-clipped": lambda finding, history, found: 0.0 if finding.severity == "info" else 0.9,
    },
    "update-ratio-low standstill",
)
cause(
    "unscaled-accumulation",
    "Gradients of several batches are added up without dividing the losses by their number.",
    "Divide each micro-batch's loss by the number of micro-batches before backward().",
    {"unscaled-accumulation": 0.95},
    "clip-rate-high overfitting",
)
cause(
    "vanishing-gradients",
    "Hardly any gradient reaches the first layers.",
    "Use ReLU-like activations, normalisation, residual connections, or an initialisation that keeps the variance.",
    {"vanishing-layers": reasons.of_itself(0.95)},
    "update-ratio-low saturated-units untrained-parameters zero-gradients standstill",
)
cause(
    "poor-initialisation",
    "Some layers began with weights far too large or too small for their number of inputs, or all equal.",
    "Initialise them by their fan-in: kaiming_normal_ for ReLU, xavier_normal_ for tanh.",
    {"poor-initialisation": 0.98},
    "no-gradient saturated-units update-ratio-low dead-units zero-gradients vanishing-gradients loss-begins-high "
    "unsteady standstill",
)
cause(
    "dead-units",
    "Units that answer nothing to any input cut off the layers before them.",
    "Go back to a checkpoint from before; lower the learning rate, look at the bias before them, or use LeakyReLU.",
    {
        "dead-units": reasons.of_itself(0.85),
        "zero-gradient-tensors": reasons.of_itself(0.8),
        "zero-gradients": reasons.of_itself(0.5),
    },
    "loss-divergence vanishing-gradients loss-spike norm-spike untrained-parameters standstill",
    needs=[needs.rectifiers],
    unless="no-gradient",
)
cause(
    "saturated-units",
    "Units stuck at the ends of their range let hardly any gradient through.",
    "Initialise the layer before them smaller, normalise, or lower the learning rate.",
    {"saturated-units": 0.8},
    "vanishing-gradients standstill",
)
cause(
    "weight-decay-too-high",
    "Weight decay takes more from the weights than learning gives them.",
    "Divide weight_decay by 10 or more, and leave biases and norms out of it.",
    {
        "shrinking-weights": 0.99,
        "large-weight-decay": lambda finding, history, found: 0.5 if "odd-optimizer-settings" in found else 0.9,
    },
    "vanishing-gradients dead-units zero-gradients same-output-for-all unsteady standstill",
)
cause(
    "dropout-too-high",
    "Dropout leaves hardly anything to learn from.",
    "Lower it to 0.1 to 0.5.",
    {"dropout-high": 0.95},
    "clip-rate-high loss-spike dead-units zero-gradients vanishing-gradients standstill",
)
cause(
    "singular-operation",
    "An operation in model or loss, or in the preparation of the targets, has no finite value or derivative for its "
    "input: a root or a logarithm of 0, 0 / 0.",
    "Look at square roots, norms, logarithms, divisions and powers: add a small eps inside, or clamp before them.",
    {
        "non-finite-gradients": reasons.finite_loss,
        "skip-run": reasons.finite_loss,
        "non-finite-loss": reasons.loss_alone,
    },
    "non-finite-activations non-finite-loss",
    needs=[needs.singular],
    unless="batch-not-finite loss-without-floor",
)
cause(
    "hardware-fault",
    "A gradient was far out of range, as a flipped bit in memory or arithmetic leaves it.",
    "Go back to a checkpoint from before that step and take it again: if all is well then, test memory and device.",
    {"lone-element": 0.97},
    "non-finite-activations non-finite-weights saturated-units dead-units zero-gradients vanishing-gradients "
    "unsteady nonfinite standstill",
    needs=[needs.full_precision],
    unless="batch-not-finite",
)
cause(
    "parameters-missing-from-optimizer",
    "Trainable parameters of the model are not in the optimizer.",
    "Make the optimizer after the model is complete, or add them with add_param_group.",
    {"parameters-not-in-optimizer": reasons.left_out},
    "untrained-parameters no-gradient overfitting standstill",
)
cause(
    "frozen-parameters",
    "Parameters are frozen, and it does not look intended.",
    "Set requires_grad_(True) before the optimizer is made; or, if it is intended, leave them out of the optimizer.",
    {"frozen-parameters": 0.98},
    "untrained-parameters overfitting standstill",
)
cause(
    "parameters-cut-off",
    "Some of the optimizer's parameters never move: the loss does not depend on them.",
    "Look for detach(), no_grad() and modules that forward() does not use.",
    {"missing-gradients": lambda finding, history, found: 0.0 if finding.severity == "info" else 0.9},
    "zero-gradients untrained-parameters vanishing-gradients standstill",
)
cause(
    "overfitting",
    "The model learns its training data by heart.",
    "Stop at the best validation loss; get more data, augment, or regularise.",
    {"overfitting": 0.9},
    "label-noise loss-not-decreasing norm-spike",
)
cause(
    "wrong-targets",
    "Inputs and targets do not seem to belong together: the targets do not follow from the inputs.",
    "Look at single samples with their targets as the model gets them: shuffled, shifted, or wrongly joined? If they "
    "are right, the task needs more than this model has.",
    {
        "label-noise": lambda finding, history, found: 0.9 if finding.confidence > 0.8 else 0.6,
        "unrelated-targets": 0.9,
        "loss-at-chance": 0.6,
        "inputs-without-effect": reasons.unless_held_back,
    },
    "overfitting standstill",
)
cause(
    "no-gradient-arrives",
    "Not one gradient reaches the optimizer.",
    "Look for zero_grad() between backward() and step(), an optimizer made of a model's former parameters, detach() "
    "or no_grad() on the way, and for another that steps in its place.",
    {
        "no-gradient": reasons.cut_off,
        "parameters-not-in-optimizer": lambda *seen: 0.0 if reasons.left_out(*seen) else 0.97,
    },
    "zero-gradients vanishing-gradients untrained-parameters standstill",
    unless="output-against-loss bounded-output targets-beyond-output",
)
cause(
    "wrong-output-layer",
    "The last layer's activation, shape or axis does not fit the loss or the targets.",
    "Give cross_entropy and losses with logits the plain output of the last linear layer; use no activation at the end "
    "for targets that can be any number.",
    {
        "output-against-loss": 0.97,
        "output-not-as-the-loss-asks": 0.97,
        "targets-beyond-output": 0.96,
        "bounded-output": lambda finding, history, found: 0.9 if finding.evidence["is_at_its_end"] else 0.45,
        "same-output-for-all": 0.2,
    },
    "zero-gradients no-gradient vanishing-gradients nonfinite standstill",
)
cause(
    "unnormalised-inputs",
    "The inputs are far from the scale that the layers were initialised for.",
    "Bring each feature to mean 0 and standard deviation 1, with the training set's numbers.",
    {"input-scale": 0.9},
    "loss-begins-high saturated-units dead-units zero-gradients unsteady standstill",
)
cause(
    "unnormalised-targets",
    "The targets are far larger than the model's outputs.",
    "Bring the targets to mean 0 and standard deviation 1, and undo it in prediction.",
    {"target-scale": 0.9},
    "unsteady nonfinite standstill",
)
cause(
    "wrong-loss",
    "The loss does not fit these targets, has the wrong sign, or is not reduced as it should be.",
    "Use cross_entropy for classes, binary_cross_entropy_with_logits for yes or no, a squared or absolute error for "
    "numbers; give output and targets the same shape; look for a minus, maximize=True and negated gradients.",
    {
        "loss-explosion": reasons.climbs,
        "no-warm-up": reasons.climbs,
        "broadcast-targets": 0.97,
        "negated-loss": 0.97,
        "negated-policy-loss": 0.95,
        "loss-without-floor": 0.9,
        "loss-against-targets": 0.85,
    },
    "vanishing-gradients zero-gradients same-output-for-all unsteady nonfinite standstill",
)
cause(
    "wrong-schedule",
    "The learning rate's schedule does not fit the run: it lowers the rate too early, or never ends its warm-up.",
    "Look at the schedule's length and unit (steps or epochs), and at where scheduler.step() is called.",
    {"learning-rate-gone": 0.92, "learning-rate-still-rising": 0.93},
    "update-ratio-low zero-gradients same-output-for-all learning-rate-unusual unsteady standstill",
)
cause(
    "trivial-targets",
    "There is nothing to learn: the targets are constant, or can be read off the inputs.",
    "Look at single samples with their targets; remove leaked features; hide later positions of sequences.",
    {"one-target": 0.96, "answer-in-inputs": 0.95, "answer-seen": 0.98},
    "vanishing-gradients loss-not-decreasing zero-gradients",
    unless="same-inputs",
)
cause(
    "collapsed-representation",
    "The model has come to give one answer to every input.",
    "Look for a loss that a constant output can minimise: no negatives, a stop-gradient left out, one term that "
    "outweighs the others.",
    {
        "same-output-for-all": lambda finding, history, found: (
            0.0 if finding.evidence["began_so"] or finding.evidence["in_eval_mode"] else 0.55
        )
    },
    "zero-gradients vanishing-gradients standstill",
    needs=[reasons.half_learnt],
)
cause(
    "model-cannot-fit",
    "The model gets no further, and nothing else is seen that holds it back: it may lack what the task needs.",
    "Check that it can learn one batch by heart; then make it wider or deeper, or give it features that tell inputs "
    "apart.",
    {"layers-without-activation": 0.85, "underfitting": reasons.if_alone},
    "loss-not-decreasing bounded-output",
)
