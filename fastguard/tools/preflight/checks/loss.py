"""The loss itself: its kind, its sign, its shapes, its value at the start."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from ...._text import prose
from ....diagnosis.finding import Seen
from ..asking import check
from ..evidence import Evidence
from ..losses import CLASSES, YES_OR_NO, chance, has_indices, num_classes
from .output import is_one_hot

TITLE = "Loss function"
_DEFINITION = "the definition of the loss in torch.nn.functional"
_OF_SHAPES = re.compile(
    r"\b(shapes?|sizes?|batch_size|dimensions?|channels|broadcast\w*|multi-target)\b", re.IGNORECASE
)
_SCALE_FREE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Rprop", "Lion", "Muon")


@check(
    "trial-pass-fails",
    cause="error-in-first-step",
    severity="critical",
    see="The {stage} pass of the first batch raised {_said}",
    sure=0.9,
    reads="one forward and backward pass",
    source="the training's own first step",
    remedy="Run one batch through model and loss by hand, with the shapes and dtypes of all tensors printed.",
)
def trial_pass_fails(evidence: Evidence) -> Seen | None:
    """A forward or backward pass raised an error, or the loss has several elements, which backward() does not take."""
    first = evidence.first
    if first.error is None and first.num_losses == 1:
        return None
    if first.error is None:
        return Seen(
            see="The loss has {_num} elements, but backward() needs a single one.",
            do='Reduce the loss to one number: reduction="mean", or .mean().',
            sure=0.97,
            cause="wrong-loss",
            _num=first.num_losses,
        )
    said = prose(f"{type(first.error).__name__}: {first.error}".strip().splitlines()[0])
    if "is out of bounds" in said and evidence.call is not None and has_indices(evidence.call):
        remedy = "Give the last layer one unit per class, and number the classes from 0."
        return Seen(stage=first.stage, cause="wrong-output-layer", do=remedy, _said=said)
    cause: dict[str, Any] = {"cause": "shape-mismatch"} if _OF_SHAPES.search(said) else {}
    return Seen(stage=first.stage, _said=said, **cause)


@check(
    "targets-of-another-kind",
    cause="wrong-loss",
    severity="critical",
    see="The targets of {_loss} are {_problem}.",
    sure=0.95,
    reads="shape and dtype of the targets of a loss over classes",
    source=_DEFINITION,
    remedy="Give cross_entropy class indices (int64, shape [N]), or a distribution of the output's shape.",
)
def targets_of_another_kind(evidence: Evidence) -> Seen | None:
    """The targets of `cross_entropy` or `nll_loss` are neither class indices nor, for the first, distributions.

    They are one-hot rows of integers, class indices as floats, or several classes in a row.
    """
    call = evidence.call
    if call is None or call.kind not in CLASSES or not isinstance(call.target, Tensor) or not call.target.numel():
        return None
    target, problem = call.target.detach(), ""
    is_index_shaped = target.dim() == call.input.dim() - 1
    if has_indices(call) and is_one_hot(target) and target.shape == call.input.shape:
        problem = "one-hot rows of integers, which are read as class indices"
    elif target.is_floating_point() and is_index_shaped and call.result is None:
        problem = "class indices as floats, which it does not take"
    elif target.is_floating_point() and not is_index_shaped and call.kind == "cross_entropy":
        sums = target.double().sum(1 if target.dim() > 1 else 0)
        if bool((target < 0).any()) or bool(((sums - 1).abs() > 0.01).any()):
            problem = f"not distributions: rows sum to {float(sums.min()):.3g} up to {float(sums.max()):.3g}"
    if not problem:
        return None
    dtype = str(target.dtype).removeprefix("torch.")
    return Seen(shape=list(target.shape), dtype=dtype, _loss=call.kind, _problem=problem)


@check(
    "targets-outside-unit-interval",
    cause="wrong-loss",
    severity="critical",
    see="The targets of {_loss} go from {lowest:.3g} to {highest:.3g}.",
    sure=0.95,
    reads="targets of binary cross-entropy",
    source=_DEFINITION,
    remedy="Binary cross-entropy takes 0 to 1: map -1 and 1 to 0 and 1; for several classes use cross_entropy.",
)
def targets_outside_unit_interval(evidence: Evidence) -> Seen | None:
    """Targets of binary cross-entropy are below 0 or above 1, where the loss has no lower bound."""
    for call in evidence.calls:
        if call.kind not in YES_OR_NO or not isinstance(call.target, Tensor) or not call.target.numel():
            continue
        low, high = float(call.target.min()), float(call.target.max())
        if low < -1e-6 or high > 1 + 1e-6:
            return Seen(lowest=low, highest=high, _loss=call.kind)
    return None


def _problem(evidence: Evidence, *kinds: str) -> Seen | None:
    """The first problem of these kinds that asking the loss has found."""
    for one in evidence.answer.problems:
        if one.kind in kinds:
            return Seen(see="{_message}", do=one.remedy, sure=one.confidence, _message=one.message, **one.evidence)
    return None


@check(
    "loss-prefers-wrong-answers",
    cause="wrong-loss",
    severity="critical",
    reads="free outputs in place of the model's, optimised under the loss on the first batch",
    source="a loss is lowest where the answer is right",
    remedy="Check sign, arguments, dimension and mask: the loss is lowest where predictions are wrong.",
)
def loss_prefers_wrong_answers(evidence: Evidence) -> Seen | None:
    """The outputs that minimise the loss are not the targets, or other outputs lower it where predictions are wrong.

    Asked about outputs that have the form of the targets: logits of classes (also of tokens, whose shift is checked),
    logits or probabilities of yes and no, numbers. Embeddings, rewards and losses between samples are not judged.
    """
    return _problem(evidence, "target", "elsewhere")


@check(
    "wrong-elements-in-loss",
    cause="wrong-loss",
    severity="critical",
    reads="free outputs in place of the model's: which have a gradient, at random and on the way to the loss's minimum",
    source="a loss has a gradient at every output that it judges, and at no other",
    remedy="Look for a detach(), an index, a mask, a weight of zero or a clamp between outputs and loss.",
)
def wrong_elements_in_loss(evidence: Evidence) -> Seen | None:
    """Samples, classes or outputs never have a gradient; or padding and ignored positions have one.

    If outputs depend on other samples (graphs), samples may be left out: those are the ones to predict.
    """
    return _problem(evidence, "padding" if evidence.flow.across_samples else "left out", "padding")


@check(
    "summed-loss",
    cause="wrong-loss",
    see="The loss is a sum over {samples} samples, so gradients, and with {_optimizer} steps, are that many times "
    "larger than those of the mean.",
    sure=0.75,
    reads="`reduction` of the loss; the optimizer's kind",
    source="the gradient of a sum grows with the batch, and so does the step of SGD",
    remedy='Use reduction="mean", or divide the sum by the number of samples.',
)
def summed_loss(evidence: Evidence, *, least_samples: int = 8) -> Seen | None:
    """The loss is a sum over at least `least_samples` samples, and the optimizer's steps grow with it.

    Silent if the optimizer divides by the size of the gradients (Adam and similar), or the sum is divided later.
    """
    call, optimizer = evidence.call, type(evidence.bench.optimizer).__name__
    if call is None or call.reduction != "sum" or not evidence.is_single_loss or not call.input.dim():
        return None
    if optimizer in _SCALE_FREE or call.input.shape[0] < least_samples:
        return None
    return Seen(reduction=call.reduction, samples=int(call.input.shape[0]), _optimizer=optimizer)


@check(
    "loss-far-above-chance",
    cause="poor-initialisation",
    depth=2,
    like="loss-begins-high",
    see="The loss begins at {loss:.3g}; the chance level is {chance:.3g} ({_classes} classes).",
    sure=0.5,
    reads="the loss at the start, against the chance level",
    source='Karpathy 2019, "A recipe for training neural networks": verify the loss at the start',
)
def loss_far_above_chance(evidence: Evidence, *, ratio: float = 4.0) -> Seen | None:
    """The first loss is above `ratio` times chance: ln C for C classes, ln 2 for yes or no.

    The model is sure of wrong answers before it has learnt anything.
    """
    call = evidence.call
    if call is None or call.result is None or call.reduction != "mean" or not evidence.ran:
        return None
    output = evidence.first.output
    if isinstance(output, Tensor) and float(call.input.abs().max()) > 2.0 * float(output.abs().max()):
        return None  # the loss has a scale of its own
    known = chance(call)
    value = float(call.result.detach()) if call.result.numel() == 1 else float("nan")
    if not known or not value > ratio * known or call.made_by is not None:
        return None
    return Seen(loss=value, chance=known, threshold=ratio, _classes=num_classes(call))
