"""The root causes that come with fastguard."""

from __future__ import annotations

from . import needs, reasons
from .causes import cause

cause(
    "corrupted-weights",
    "Some weights are NaN or Inf, and every step since is spoilt by them.",
    "Go back to a checkpoint from before. Guard with skip_nonfinite=True, and look for what writes to these weights.",
    {"non-finite-weights": 0.97, "non-finite-activations": reasons.from_weights, "skip-run": reasons.going_on},
    "non-finite-gradients non-finite-loss skip-run non-finite-activations half-precision-range",
)
cause(
    "half-precision-overflow",
    "A layer's output leaves the range of its half precision.",
    "Use bfloat16, or keep that layer in float32; look why its weights or inputs are so large.",
    {"non-finite-activations": reasons.overflowed, "loss-scale-collapse": 0.8, "skip-run": reasons.overflows_on},
    "non-finite-gradients non-finite-loss skip-run non-finite-activations",
    needs=[needs.half_precision],
)
cause(
    "half-precision-underflow",
    "Gradients are too small for float16 and become zero.",
    "Use a GradScaler, or bfloat16.",
    {
        "half-precision-underflow": 0.9,
        "no-gradient": lambda finding, history, found: 0.9 if reasons.is_lost_in_float16(history) else 0.0,
    },
    "zero-gradients vanishing-gradients standstill",
    needs=[needs.half_precision],
)
cause(
    "bad-batch",
    "One or a few batches contain NaN, extreme values or bad labels.",
    "Look at the samples of these steps: NaN, scale, targets. Fix or drop them. Skipped steps changed nothing.",
    {
        "non-finite-loss": lambda finding, history, found: (
            0.0 if reasons.has_finite_gradients(history) else reasons.isolated(finding, history, found)
        ),
        "non-finite-gradients": reasons.isolated,
        "non-finite-activations": reasons.from_input,
        "loss-spike": reasons.spiked,
        "batch-not-finite": 0.95,
        "norm-spike": reasons.few_spikes,
    },
    "loss-spike",
    contradicted=reasons.has_tiny_batches,
)
cause(
    "learning-rate-too-high",
    "The learning rate is too high: steps overshoot.",
    "Divide the learning rate by 10, and begin anew or at a checkpoint from before the loss turned; warm it up there.",
    {
        "learning-rate-jump": 0.99,
        "update-ratio-high": reasons.steps,
        "steps-too-large": reasons.unless_scaled(0.85),
        "learning-rate-unusual": lambda finding, history, found: 0.9 if finding.evidence["is_high"] else 0.0,
        "non-finite-loss": reasons.after_growth,
        "non-finite-gradients": reasons.after_growth,
        "no-warm-up": reasons.unless_scaled(0.6),
        "loss-explosion": reasons.unless_scaled(0.6),
        "loss-divergence": 0.5,
        "divergence-ahead": lambda finding, history, found: 0.6 if finding.evidence["is_at_new_rate"] else 0.35,
        "loss-oscillation": 0.5,
        "growing-norm": 0.4,
        "norm-jump": 0.2,
        "shrinking-weights": reasons.decayed_by_rate,
    },
    "dead-units zero-gradients vanishing-gradients non-finite-gradients non-finite-loss skip-run "
    "non-finite-activations norm-spike loss-spike clip-rate-high saturated-units overfitting "
    "training-above-validation layer-norm-imbalance learning-rate-unusual attention-collapse update-ratio-high "
    "standstill",
    contradicted=reasons.is_of_schedule_or_machine,
)
cause(
    "learning-rate-too-low",
    "The learning rate is too low: the weights hardly move.",
    "Raise the learning rate by 10 to 100 times; fastguard.LearningRateFinder finds one.",
    {
        "update-ratio-low": reasons.unless_clipped,
        "learning-rate-out-of-bounds": lambda finding, history, found: (
            0.5 if finding.evidence["largest"] < finding.evidence["threshold_low"] else 0.0
        ),
        "steps-too-small": reasons.unless_clipped,
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
        "growing-norm": reasons.without_clipping,
        "norm-spike": reasons.many_spikes,
        "layer-norm-imbalance": 0.5,
        "loss-explosion": 0.3,
        "non-finite-gradients": reasons.never_finite,
        "skip-run": reasons.never_finite,
    },
    "loss-spike clip-rate-high loss-oscillation non-finite-loss non-finite-activations",
    contradicted=reasons.is_of_schedule_or_machine,
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
    {"vanishing-layers": reasons.of_itself(0.95), "vanishing-norm": 0.4},
    "update-ratio-low saturated-units untrained-parameters zero-gradients standstill",
)
cause(
    "poor-initialisation",
    "Some layers began with weights far too large or too small for their number of inputs, or all equal.",
    "Initialise them by their fan-in: kaiming_normal_ for ReLU, xavier_normal_ for tanh.",
    {"poor-initialisation": reasons.initial_weights, "loss-begins-high": reasons.of_first_weights},
    "saturated-units update-ratio-high update-ratio-low clip-rate-high growing-norm layer-norm-imbalance dead-units "
    "zero-gradients vanishing-gradients loss-divergence loss-oscillation no-warm-up standstill",
)
cause(
    "dead-units",
    "Units that answer nothing to any input cut the layers before them off.",
    "Go back to a checkpoint from before; lower the learning rate, look at the bias before them, or use LeakyReLU.",
    {
        "dead-units": reasons.of_itself(0.85, reasons.DIED_AFTER),
        "zero-gradient-tensors": reasons.on_the_way,
        "zero-gradients": reasons.of_itself(0.5, reasons.DIED_AFTER),
    },
    "loss-divergence vanishing-gradients loss-spike norm-spike untrained-parameters standstill",
    needs=[needs.rectifiers],
    contradicted=reasons.never_had_a_gradient,
)
cause(
    "saturated-units",
    "Units stuck at the ends of their range let hardly any gradient through.",
    "Initialise the layer before them smaller, normalise, or lower the learning rate.",
    {"saturated-units": lambda finding, history, found: 0.3 if "input-scale" in found else 0.8},
    "vanishing-gradients standstill",
    needs=[needs.bounded_units],
)
cause(
    "parameters-missing-from-optimizer",
    "Trainable parameters of the model are not in the optimizer.",
    "Make the optimizer after the model is complete, or add them with add_param_group.",
    {"parameters-not-in-optimizer": lambda finding, history, found: 0.0 if finding.severity == "critical" else 0.99},
    "untrained-parameters overfitting standstill",
)
cause(
    "frozen-parameters",
    "Parameters are frozen, and it does not look as if on purpose.",
    "Set requires_grad_(True) before the optimizer is made; or leave them out of it, to say that it is on purpose.",
    {"frozen-parameters": reasons.if_it_is_much(0.98)},
    "untrained-parameters overfitting standstill",
)
cause(
    "parameters-cut-off",
    "Some of the optimizer's parameters never move: the loss does not depend on them.",
    "Look for detach(), no_grad() and modules that forward() does not use.",
    {"missing-gradients": 0.9, "unchanged-weights": 0.6, "zero-gradient-tensors": reasons.cut},
    "zero-gradients untrained-parameters vanishing-gradients standstill",
    contradicted=reasons.are_idle_experts,
)
cause(
    "weight-decay-too-high",
    "Weight decay takes more from the weights than learning gives them.",
    "Divide weight_decay by 10 or more, and leave biases and norms out of it.",
    {"shrinking-weights": reasons.decays, "large-weight-decay": 0.9},
    "update-ratio-high clip-rate-high loss-divergence vanishing-gradients layer-norm-imbalance growing-norm "
    "dead-units zero-gradients same-output-for-all standstill",
    needs=[needs.decay],
)
cause(
    "dropout-too-high",
    "Dropout leaves hardly anything to learn from.",
    "Lower it to 0.1 to 0.5.",
    {"dropout-high": 0.95, "training-above-validation": 0.6},
    "clip-rate-high loss-oscillation loss-spike dead-units zero-gradients vanishing-gradients standstill",
    needs=[needs.dropout],
)
cause(
    "overfitting",
    "The model learns its training data by heart.",
    "Stop at the best validation loss; get more data, augment, or regularise.",
    {"overfitting": reasons.unless_turned_round},
    "label-noise loss-not-decreasing norm-spike",
    needs=[needs.validation],
)
cause(
    "wrong-targets",
    "Inputs and targets do not seem to belong together: what is there to be learnt does not follow from the inputs.",
    "Look at single samples with their targets as the model gets them: shuffled, shifted, or wrongly joined? If they "
    "are right, the task needs more than this model has.",
    {
        "label-noise": lambda finding, history, found: 0.9 if reasons.is_turned_round(found) else 0.6,
        "unrelated-targets": reasons.if_unexplained(0.9),
        "loss-at-chance": reasons.if_steps_are_sound,
        "underfitting": reasons.if_nothing_carries_over,
        "loss-not-decreasing": reasons.if_nothing_carries_over,
    },
    "overfitting standstill",
)
