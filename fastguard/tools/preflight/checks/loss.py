"""The loss itself: its kind, its sign, its shapes, its value at the start."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ...._text import prose
from ....diagnosis import Finding
from ..evidence import Evidence
from ..losses import CLASSES, YES_OR_NO, chance, has_indices, num_classes
from ..registry import check
from ..watcher import REGRESSION
from .output import is_one_hot

TITLE = "Loss function"
_OF_SHAPES = re.compile(
    r"\b(shapes?|sizes?|batch_size|dimensions?|channels|broadcast\w*|multi-target)\b", re.IGNORECASE
)
_SCALE_FREE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Rprop", "Lion", "Muon")


@check(
    "trial-pass-fails",
    cause="error-in-first-step",
    severity="critical",
    reads="one forward and backward pass",
    source="the training's own first step",
    remedy="Run one batch through model and loss by hand, with the shapes and dtypes of all tensors printed.",
)
def trial_pass_fails(seen: Evidence) -> Finding | None:
    """A forward or backward pass raised an error, or the loss has several elements, which backward() does not take."""
    first = seen.first
    if first.error is None and first.num_losses == 1:
        return None
    if first.error is None:
        return Finding(
            f"The loss has {first.num_losses} elements: backward() needs a single one.",
            severity="critical",
            evidence={"cause": "wrong-loss"},
            recommendation='Reduce the loss to one number: reduction="mean", or .mean().',
            confidence=0.97,
        )
    said = prose(f"{type(first.error).__name__}: {first.error}".strip().splitlines()[0])
    evidence, remedy = {"stage": first.stage}, ""
    if "is out of bounds" in said and seen.call is not None and has_indices(seen.call):
        evidence["cause"] = "wrong-output-layer"
        remedy = "Give the last layer one unit a class, and number the classes from 0."
    elif _OF_SHAPES.search(said):
        evidence["cause"] = "shape-mismatch"
    return Finding(
        f"The {first.stage} pass of the first batch raised {said}",
        severity="critical",
        evidence=evidence,
        recommendation=remedy,
        confidence=0.9,
    )


@check(
    "targets-of-another-kind",
    cause="wrong-loss",
    severity="critical",
    reads="shape and dtype of the targets of a loss over classes",
    source="the definition of the loss in torch.nn.functional",
    remedy="Give cross_entropy the numbers of the classes (int64, shape [N]), or a distribution of the output's shape.",
)
def targets_of_another_kind(evidence: Evidence) -> Finding | None:
    """The targets of `cross_entropy` or `nll_loss` are neither numbers of classes nor, for the first, distributions.

    One-hot rows of integers, numbers of classes as floats, several classes at once in a row.
    """
    call = evidence.call
    if call is None or call.kind not in CLASSES or not isinstance(call.target, Tensor) or not call.target.numel():
        return None
    target, problem = call.target.detach(), ""
    is_index_shaped = target.dim() == call.input.dim() - 1
    if has_indices(call) and is_one_hot(target) and target.shape == call.input.shape:
        problem = "integers that are one-hot rows, where numbers of classes are meant"
    elif target.is_floating_point() and is_index_shaped and call.result is None:
        problem = "numbers of classes as floats, which it does not take"
    elif target.is_floating_point() and not is_index_shaped and call.kind == "cross_entropy":
        sums = target.double().sum(1 if target.dim() > 1 else 0)
        if bool((target < 0).any()) or bool(((sums - 1).abs() > 0.01).any()):
            problem = f"rows that are no distributions: their sums go from {float(sums.min()):.3g} to "
            problem += f"{float(sums.max()):.3g}"
    if not problem:
        return None
    return Finding(
        f"The targets of {call.kind} are {problem}.",
        severity="critical",
        evidence={"shape": list(target.shape), "dtype": str(target.dtype).removeprefix("torch.")},
        confidence=0.95,
    )


@check(
    "classes-as-quantities",
    cause="wrong-loss",
    reads="targets of a loss for regression",
    source='DeepFD (Cao et al. 2022), fault "loss": a loss for regression in a classification',
    remedy="Use cross_entropy (one class of several) or binary_cross_entropy_with_logits (yes or no) for classes.",
)
def classes_as_quantities(evidence: Evidence, *, most_classes: int = 20, least_samples: int = 16) -> Finding | None:
    """A regression's targets are classes: one-hot rows, or nothing but 0 and 1, or at most `most_classes` numbers.

    Of at least `least_samples` samples; of whole numbers other than 0 and 1, only where they are integers in dtype
    or come from 0 without a gap. A remark: a squared error on classes learns them too, more slowly.
    """
    call = evidence.call
    targets = [t for t in evidence.targets if t.dim()]
    if call is None or call.kind not in REGRESSION or not targets or call.input.shape[0] < 2:
        return None
    t = torch.cat([one.reshape(one.shape[0], -1).double() for one in targets])
    if t.shape[0] < least_samples or t.shape[1] > 1000:
        return None
    if t.shape[1] >= 2:
        if not is_one_hot(t):
            return None
        what, confidence = "one-hot rows", 0.9
    else:
        values = t.unique()
        is_whole = bool((values == values.round()).all())
        if not 2 <= values.numel() <= most_classes or not is_whole or int(values.min()) not in (0, -1, 1):
            return None
        if values.numel() == 2:
            what, confidence = f"nothing but {values[0]:g} and {values[1]:g}", 0.8
        elif values.numel() == int(values.max()) - int(values.min()) + 1:
            what, confidence = f"the whole numbers from {values.min():g} to {values.max():g}", 0.5
        else:
            return None
    return Finding(
        f"The targets of {call.kind} are {what}: classes, it seems, not quantities.",
        severity="info",  # scores of probabilities and some games are meant so
        evidence={"loss": call.kind, "targets": what},
        confidence=confidence,
    )


@check(
    "targets-outside-unit-interval",
    cause="wrong-loss",
    severity="critical",
    reads="targets of binary cross-entropy",
    source="the definition of the loss in torch.nn.functional",
    remedy="Binary cross-entropy takes 0 to 1: map -1 and 1 to 0 and 1; for several classes use cross_entropy.",
)
def targets_outside_unit_interval(evidence: Evidence) -> Finding | None:
    """Targets of binary cross-entropy lie below 0 or above 1: the loss has no lower bound there."""
    for call in evidence.calls:
        if call.kind not in YES_OR_NO or not isinstance(call.target, Tensor) or not call.target.numel():
            continue
        low, high = float(call.target.min()), float(call.target.max())
        if low < -1e-6 or high > 1 + 1e-6:
            return Finding(
                f"The targets of {call.kind} go from {low:.3g} to {high:.3g}.",
                severity="critical",
                evidence={"lowest": low, "highest": high},
                confidence=0.95,
            )
    return None


def _told(evidence: Evidence, *kinds: str) -> Finding | None:
    """The first problem of these kinds that the loss has by its own answer."""
    for problem in evidence.answer.problems:
        if problem.kind in kinds:
            return Finding(
                problem.message,
                severity="critical",
                evidence=problem.evidence,
                confidence=problem.confidence,
                recommendation=problem.remedy,
            )
    return None


@check(
    "loss-prefers-wrong-answers",
    cause="wrong-loss",
    severity="critical",
    reads="free outputs in place of the model's, optimised under the loss on the first batch",
    source="a loss is lowest where the answer is right",
    remedy="Check sign, arguments, dimension and mask: the loss is lowest where predictions are wrong.",
)
def loss_prefers_wrong_answers(evidence: Evidence) -> Finding | None:
    """The outputs that minimise the loss are not the targets, or other outputs lower it where predictions are wrong.

    Asked of outputs that have the form of the targets: logits of classes (also of tokens, whose shift is checked),
    logits or probabilities of yes and no, numbers. Embeddings, rewards and losses between samples are not judged.
    """
    return _told(evidence, "target", "elsewhere")


@check(
    "wrong-elements-in-loss",
    cause="wrong-loss",
    severity="critical",
    reads="free outputs in place of the model's: which have a gradient, at random and on the way to the loss's minimum",
    source="a loss has a gradient at every output that it judges, and at no other",
    remedy="Look for a detach(), an index, a mask, a weight of zero or a clamp between outputs and loss.",
)
def wrong_elements_in_loss(evidence: Evidence) -> Finding | None:
    """Samples, classes or outputs have no gradient wherever outputs are; or padding and ignored positions have one.

    Of models whose outputs depend on other samples (graphs), samples may be left out: they are those to be predicted.
    """
    return _told(evidence, "padding" if evidence.flow.across_samples else "left out", "padding")


@check(
    "summed-loss",
    cause="wrong-loss",
    reads="`reduction` of the loss; the optimizer's kind",
    source="the gradient of a sum grows with the batch, and so does the step of SGD",
    remedy='Use reduction="mean", or divide the sum by the number of samples.',
)
def summed_loss(evidence: Evidence, *, least_samples: int = 8) -> Finding | None:
    """The loss is a sum over at least `least_samples` samples, and the optimizer's steps grow with it.

    Not told where the optimizer divides by the gradients' own size (Adam and its kin), or the sum is divided later.
    """
    call = evidence.call
    if call is None or call.reduction != "sum" or not evidence.is_single_loss or not call.input.dim():
        return None
    if type(evidence.bench.optimizer).__name__ in _SCALE_FREE or call.input.shape[0] < least_samples:
        return None
    return Finding(
        f"The loss is a sum over {call.input.shape[0]} samples: gradients, and with "
        f"{type(evidence.bench.optimizer).__name__} steps, are as many times larger than those of the mean.",
        evidence={"reduction": call.reduction, "samples": int(call.input.shape[0])},
        confidence=0.75,
    )


@check(
    "loss-far-above-chance",
    cause="poor-initialisation",
    depth=2,
    reads="the loss at the start, against that of a model that knows nothing",
    source='Karpathy 2019, "A recipe for training neural networks": verify the loss at the start',
    remedy="Begin with outputs near zero: initialise the last layer smaller, and scale inputs to about 1.",
)
def loss_far_above_chance(evidence: Evidence, *, ratio: float = 4.0) -> Finding | None:
    """The first loss is above `ratio` times chance: ln C of C classes, ln 2 of yes or no.

    The model is sure of itself, and wrong, before it has learnt anything.
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
    return Finding(
        f"The loss begins at {value:.3g}; a model that knows nothing has {known:.3g} ({num_classes(call)} classes).",
        evidence={"loss": value, "chance": known, "threshold": ratio},
        confidence=0.5,
    )
