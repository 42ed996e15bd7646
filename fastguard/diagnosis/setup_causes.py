"""The root causes of data, model, loss and optimizer."""

from __future__ import annotations

from . import needs, reasons
from .causes import cause

cause(
    "parameters-missing-from-optimizer",
    "Trainable parameters of the model are not in the optimizer.",
    "Make the optimizer after the model is complete, or add them with add_param_group.",
    {"parameters-not-in-optimizer": lambda finding, history, found: 0.0 if finding.severity == "critical" else 0.99},
    "untrained-parameters overfitting standstill",
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
    unless="idle-experts",
)
cause(
    "overfitting",
    "The model learns its training data by heart.",
    "Stop at the best validation loss; get more data, augment, or regularise.",
    {"overfitting": 0.9},
    "label-noise loss-not-decreasing norm-spike",
    needs=[needs.validation],
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
        "inputs-without-effect": 0.7,
    },
    "overfitting standstill",
)
cause(
    "no-gradient-arrives",
    "Not one gradient reaches the optimizer.",
    "Look for zero_grad() between backward() and step(), an optimizer made of a model's former parameters, detach() "
    "or no_grad() on the way, and for another that steps in its place.",
    {
        "no-gradient": lambda *seen: 0.0 if reasons.lost_in_float16(*seen) else 0.97,
        "parameters-not-in-optimizer": lambda finding, history, found: 0.97 if finding.severity == "critical" else 0.0,
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
    "zero-gradients no-gradient vanishing-gradients non-finite-loss non-finite-gradients skip-run standstill",
)
cause(
    "unnormalised-inputs",
    "The inputs are far from the scale that the layers were initialised for.",
    "Bring each feature to mean 0 and standard deviation 1, with the training set's numbers.",
    {"input-scale": 0.9},
    "loss-begins-high norm-spike growing-norm loss-divergence clip-rate-high no-warm-up loss-spike "
    "update-ratio-high saturated-units dead-units zero-gradients standstill",
)
cause(
    "unnormalised-targets",
    "The targets are far larger than the model's outputs.",
    "Bring the targets to mean 0 and standard deviation 1, and undo it in prediction.",
    {"target-scale": 0.9},
    "norm-spike growing-norm loss-divergence update-ratio-high clip-rate-high non-finite-loss "
    "non-finite-gradients skip-run standstill",
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
    "loss-divergence vanishing-gradients zero-gradients same-output-for-all no-warm-up growing-norm norm-spike "
    "update-ratio-high clip-rate-high non-finite-loss non-finite-gradients skip-run standstill",
)
cause(
    "wrong-schedule",
    "The learning rate's schedule does not fit the run: it lowers the rate too early, or never ends its warm-up.",
    "Look at the schedule's length and unit (steps or epochs), and at where scheduler.step() is called.",
    {"learning-rate-gone": 0.92, "learning-rate-still-rising": 0.93},
    "update-ratio-low loss-divergence growing-norm norm-spike loss-spike zero-gradients "
    "same-output-for-all learning-rate-unusual update-ratio-high standstill",
)
cause(
    "trivial-targets",
    "There is nothing to learn: the targets are constant, or can be read off the inputs.",
    "Look at single samples with their targets; remove leaked features.",
    {"one-target": 0.96, "answer-in-inputs": 0.95},
    "vanishing-gradients loss-not-decreasing zero-gradients",
    unless="same-inputs",
)
cause(
    "outliers",
    "Single inputs are far larger than all others.",
    "Look at these samples: missing values coded as numbers, other units. Clip or repair them.",
    {"input-outliers": 0.8},
    "norm-spike loss-spike loss-divergence non-finite-gradients non-finite-loss clip-rate-high",
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
