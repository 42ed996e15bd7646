"""The loss, and the output that it gets: errors, activations before it, and what it wants of free outputs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ...._text import prose
from ....diagnosis.finding import Seen, Severity
from ..asking import check
from ..evidence import Evidence
from ..losses import has_indices, num_classes
from ..watcher import REGRESSION, LossCall

TITLE = "Loss and output"
_TORCH = 'the definition of the loss in torch.nn.functional; UMLAUT (Schoop et al. 2021), "no softmax before CE"'
_PROBABILITIES = ("softmax", "sigmoid", "hardsigmoid")
_OTHERS = ("relu", "relu6", "tanh", "softplus", "softsign", "hardtanh", "exp", "leaky_relu", "elu", "gelu", "silu")
_RANGES = {
    **dict.fromkeys(("sigmoid", "hardsigmoid", "softmax"), (0.0, 1.0)),
    **dict.fromkeys(("tanh", "softsign", "hardtanh"), (-1.0, 1.0)),
    **dict.fromkeys(("relu", "softplus", "exp"), (0.0, float("inf"))),
    **dict.fromkeys(("log_softmax", "logsigmoid"), (float("-inf"), 0.0)),
    **dict.fromkeys(("elu", "celu"), (-1.0, float("inf"))),
    "relu6": (0.0, 6.0),
    "selu": (-1.76, float("inf")),
    "silu": (-0.28, float("inf")),
    "gelu": (-0.17, float("inf")),
}
_OF_SHAPES = re.compile(
    r"\b(shapes?|sizes?|batch_size|dimensions?|channels|broadcast\w*|multi-target)\b", re.IGNORECASE
)


@check(
    "trial-pass-fails",
    cause="error-in-first-step",
    severity="critical",
    see="The {stage} pass of the first batch raised {_said}",
    sure=0.9,
    remedy="Run one batch through model and loss by hand, with the shapes and dtypes of all tensors printed.",
)
def trial_pass_fails(evidence: Evidence) -> Seen | None:
    """A forward or backward pass raised an error, or the loss has several elements, which backward() does not take."""
    first = evidence.first
    if first.error is None:
        see = "The loss has {_num} elements, but backward() needs a single one."
        remedy, num = 'Reduce the loss to one number: reduction="mean", or .mean().', first.num_losses
        return None if num == 1 else Seen(see=see, do=remedy, sure=0.97, cause="wrong-loss", _num=num)
    said = prose(f"{type(first.error).__name__}: {first.error}".strip().splitlines()[0])
    more: dict[str, Any] = {"cause": "shape-mismatch"} if _OF_SHAPES.search(said) else {}
    if "is out of bounds" in said and evidence.call is not None and has_indices(evidence.call):
        remedy = "Give the last layer one unit per class, and number the classes from 0."
        more = {"cause": "wrong-output-layer", "do": remedy}
    return Seen(stage=first.stage, _said=said, **more)


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
    remedy="Look for a detach(), an index, a mask, a weight of zero or a clamp between outputs and loss.",
)
def wrong_elements_in_loss(evidence: Evidence) -> Seen | None:
    """Samples, classes or outputs never have a gradient; or padding and ignored positions have one.

    If outputs depend on other samples (graphs), samples may be left out: those are the ones to predict.
    """
    return _problem(evidence, "padding" if evidence.flow.across_samples else "left out", "padding")


def _sums_to_one(x: Tensor, dim: int) -> bool:
    """Whether `x` is a distribution over `dim`, which has more than one element."""
    x = x.detach()
    if x.dim() <= dim or x.shape[dim] < 2 or not x.is_floating_point() or not x.numel():
        return False
    return bool((x >= 0).all()) and bool(((x.double().sum(dim) - 1).abs() < 1e-3).all())


def _maker(call: LossCall) -> str:
    """The function that made the loss's input; "softmax" by the values if that was not seen."""
    if call.made_by is not None:
        return call.made_by[0]
    return "softmax" if _sums_to_one(call.input, int(call.input.dim() > 1)) else ""


@check(
    "softmax-before-cross-entropy",
    cause="wrong-output-layer",
    severity="critical",
    see="{loss} gets the output of {made_by} and applies {_what}.",
    sure=0.97,
    source=_TORCH + "; AUTOTRAINER (Zhang et al. 2021), improper activation",
    remedy="Give the loss the output of the last linear layer, without an activation: it takes logits.",
)
def softmax_before_cross_entropy(evidence: Evidence) -> Seen | None:
    """A loss that takes logits gets the output of a softmax or a sigmoid, or, a warning, of another activation.

    Seen by the function that made its input, or by rows that sum to 1.
    """
    call = evidence.call
    is_of_classes = call is not None and call.kind == "cross_entropy" and num_classes(call) > 1
    if call is None or not (is_of_classes or call.kind == "binary_cross_entropy_with_logits"):
        return None
    made_by = _maker(call)
    if made_by in _OTHERS:
        see = "The logits for {loss} come out of {made_by}, which cuts off a part of their range."
        return Seen(see=see, severity="warning", sure=0.9, loss=call.kind, made_by=made_by)
    if made_by not in _PROBABILITIES:
        return None
    what = "another sigmoid, so its answers lie between 0.5 and 0.73"
    if is_of_classes:
        what = "another softmax, which can separate values between 0 and 1 by a factor of e at most"
    return Seen(loss=call.kind, made_by=made_by, _what=what)


@check(
    "nll-without-log-softmax",
    cause="wrong-output-layer",
    severity="critical",
    see="nll_loss gets {_what}, not log-probabilities. It only negates and averages them, so it has no lower bound.",
    sure=0.97,
    source=_TORCH,
    remedy="End the model with log_softmax over the classes, or use cross_entropy on its logits.",
)
def nll_without_log_softmax(evidence: Evidence) -> Seen | None:
    """The input of `nll_loss` is not log-probabilities: their exponentials do not sum to 1."""
    call = evidence.call
    if call is None or call.kind != "nll_loss" or _is_bad_axis(call):
        return None
    x = call.input.detach().double()
    sums, maker = x.exp().sum(int(x.dim() > 1)), _maker(call)
    if bool((x <= 1e-6).all()) and bool(((sums - 1).abs() < 1e-2).all()):
        return None
    what = f"the output of {maker}" if maker else "other values"
    return Seen(largest=float(x.max()), sum_of_exp=float(sums.mean()), made_by=maker, _what=what)


def _is_bad_axis(call: LossCall) -> bool:
    if call.made_by is None or call.made_by[0] not in ("softmax", "log_softmax") or call.input.dim() < 2:
        return False
    x = call.input.detach().double()
    x = x.exp() if call.made_by[0] == "log_softmax" or bool((x < 0).any()) else x
    return x.shape[0] > 1 and _sums_to_one(x, 0) and not _sums_to_one(x, 1)


@check(
    "softmax-over-batch",
    cause="wrong-output-layer",
    severity="critical",
    see="The output's probabilities sum to 1 over the samples of a batch, not over the classes, so each sample's "
    "answer depends on the other samples.",
    sure=0.97,
    remedy="Give the softmax the dimension of the classes: dim=1, or dim=-1.",
)
def softmax_over_batch(evidence: Evidence) -> Seen | None:
    """The output's probabilities sum to 1 over the samples of the batch, and not over the classes."""
    call = evidence.call
    if call is None or not _is_bad_axis(call):
        return None
    return Seen(dim=call.made_by[1] if call.made_by else None)


@check(
    "targets-out-of-reach",
    cause="wrong-output-layer",
    like="bounded-output",
    see="{outside:.0%} of the targets are outside the range of the last activation, {made_by} ({_low:g} to {_high:g}): "
    "they go from {_first:.3g} to {_last:.3g}.",
    severity="critical",
    sure=0.93,
    source="DeepDiagnosis (Wardat et al. 2022), output range against target range",
)
def targets_out_of_reach(evidence: Evidence, *, share: float = 0.05, slack: float = 0.05) -> Seen | None:
    """More than `share` of a regression's targets are outside the range of the last activation.

    By more than `slack` times the range of the targets.
    """
    call, made_by = evidence.call, evidence.output_made_by
    if made_by is None or made_by[0] not in _RANGES or (call is not None and call.kind not in REGRESSION):
        return None
    targets = torch.cat([t.reshape(-1).double() for t in evidence.targets if t.is_floating_point()] or [torch.empty(0)])
    output = evidence.output
    if not targets.numel() or output is None or output.numel() != evidence.targets[0].numel():
        return None
    low, high = _RANGES[made_by[0]]
    first, last = float(targets.min()), float(targets.max())
    allowed = slack * (last - first)
    outside = float(((targets < low - allowed) | (targets > high + allowed)).double().mean())
    if outside <= share:
        return None
    facts: dict[str, Any] = {"_low": low, "_high": high, "_first": first, "_last": last}
    severity: Severity = "critical" if outside > 0.3 else "warning"
    return Seen(outside=outside, made_by=made_by[0], severity=severity, **facts)
