"""Output against loss: what the last layer returns, and what the loss expects."""

from __future__ import annotations

import torch
from torch import Tensor

from ....diagnosis.finding import Seen
from ..asking import check
from ..evidence import Evidence
from ..losses import YES_OR_NO, num_classes
from ..watcher import REGRESSION, LossCall

TITLE = "Output layer"
_TORCH = 'the definition of the loss in torch.nn.functional; UMLAUT (Schoop et al. 2021), "no softmax before CE"'
_SQUASHING = ("sigmoid", "relu", "relu6", "tanh", "softplus", "softsign", "hardtanh", "hardsigmoid", "exp", "softmax")
_PROBABILITIES = ("softmax", "sigmoid", "hardsigmoid")
_ROUNDED = ("leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish", "logsigmoid")
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


def _sums_to_one(x: Tensor, dim: int) -> bool:
    """Whether `x` is a distribution over `dim`, which has more than one element."""
    x = x.detach()
    if x.dim() <= dim or x.shape[dim] < 2 or not x.is_floating_point() or not x.numel():
        return False
    return bool((x >= 0).all()) and bool(((x.double().sum(dim) - 1).abs() < 1e-3).all())


def _classes_dim(x: Tensor) -> int:
    return 1 if x.dim() > 1 else 0


def _maker(call: LossCall) -> str:
    """The function that made the loss's input; "softmax" by the values if that was not seen."""
    if call.made_by is not None:
        return call.made_by[0]
    return "softmax" if _sums_to_one(call.input, _classes_dim(call.input)) else ""


@check(
    "softmax-before-cross-entropy",
    cause="wrong-output-layer",
    severity="critical",
    see="{loss} gets the output of {made_by} and applies {_what}.",
    sure=0.97,
    reads="what made the input of cross_entropy or binary_cross_entropy_with_logits",
    source=_TORCH,
    remedy="Remove the softmax (or sigmoid) from the model: the loss takes logits, and applies one itself.",
)
def softmax_before_cross_entropy(evidence: Evidence) -> Seen | None:
    """A loss that takes logits gets probabilities: the output of a softmax or a sigmoid.

    Seen by the function that made its input, or by rows that sum to 1.
    """
    call = evidence.call
    is_of_classes = call is not None and call.kind == "cross_entropy" and num_classes(call) > 1
    if call is None or not (is_of_classes or call.kind == "binary_cross_entropy_with_logits"):
        return None
    made_by = _maker(call)
    if made_by not in _PROBABILITIES:
        return None
    what = "another sigmoid, so its answers lie between 0.5 and 0.73"
    if is_of_classes:
        what = "another softmax, which can separate values between 0 and 1 by a factor of e at most"
    return Seen(loss=call.kind, made_by=made_by, _what=what)


@check(
    "activation-before-cross-entropy",
    cause="wrong-output-layer",
    see="The logits for {loss} come out of {made_by}, which cuts off a part of their range.",
    reads="what made the input of cross_entropy",
    source=_TORCH + "; AUTOTRAINER (Zhang et al. 2021), improper activation",
    remedy="Give cross_entropy the output of the last linear layer, without an activation.",
)
def activation_before_cross_entropy(evidence: Evidence) -> Seen | None:
    """The logits of `cross_entropy` or `binary_cross_entropy_with_logits` come out of an activation like ReLU or tanh.

    `softmax-before-cross-entropy` reports a sigmoid or softmax.
    """
    call = evidence.call
    if call is None or call.kind not in ("cross_entropy", "binary_cross_entropy_with_logits"):
        return None
    made_by = _maker(call)
    if made_by in _PROBABILITIES or made_by not in (*_SQUASHING, *_ROUNDED):
        return None
    return Seen(loss=call.kind, made_by=made_by, sure=0.95 if made_by in _SQUASHING else 0.8)


@check(
    "nll-without-log-softmax",
    cause="wrong-output-layer",
    severity="critical",
    see="nll_loss gets {_what}, not log-probabilities. It only negates and averages them, so it has no lower bound.",
    sure=0.97,
    reads="the input of nll_loss",
    source=_TORCH,
    remedy="End the model with log_softmax over the classes, or use cross_entropy on its logits.",
)
def nll_without_log_softmax(evidence: Evidence) -> Seen | None:
    """The input of `nll_loss` is not log-probabilities: their exponentials do not sum to 1."""
    call = evidence.call
    if call is None or call.kind != "nll_loss" or _is_bad_axis(call):
        return None
    x = call.input.detach().double()
    sums = x.exp().sum(_classes_dim(x))
    if bool((x <= 1e-6).all()) and bool(((sums - 1).abs() < 1e-2).all()):
        return None
    what = f"the output of {_maker(call)}" if _maker(call) else "other values"
    return Seen(largest=float(x.max()), sum_of_exp=float(sums.mean()), made_by=_maker(call), _what=what)


@check(
    "probabilities-out-of-range",
    cause="wrong-output-layer",
    severity="critical",
    see="binary_cross_entropy needs probabilities, and gets values from {lowest:.3g} to {highest:.3g}{_from}.",
    sure=0.97,
    reads="the input of binary_cross_entropy",
    source=_TORCH,
    remedy="End the model with a sigmoid, or use binary_cross_entropy_with_logits on its output as it is.",
)
def probabilities_out_of_range(evidence: Evidence) -> Seen | None:
    """`binary_cross_entropy` gets values outside [0, 1], or the output of an activation with another range."""
    call = evidence.call
    if call is None or call.kind != "binary_cross_entropy" or not call.input.numel():
        return None
    low, high = float(call.input.detach().min()), float(call.input.detach().max())
    made_by = call.made_by[0] if call.made_by is not None else ""
    if low >= 0.0 and high <= 1.0 and made_by not in ("relu", "tanh", "softplus", "softsign", "elu", "selu", "exp"):
        return None
    return Seen(lowest=low, highest=high, made_by=made_by, _from=f" from {made_by}" if made_by else "")


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
    reads="sums of the loss's input over samples and over classes",
    source="the dimension of a softmax is that of the classes",
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
    reads="the last activation's range; the targets of a regression",
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
    return Seen(
        outside=outside,
        threshold=share,
        made_by=made_by[0],
        severity="critical" if outside > 0.3 else "warning",
        _low=low,
        _high=high,
        _first=first,
        _last=last,
    )


@check(
    "softmax-into-bce",
    cause="wrong-loss",
    see="The loss asks yes or no for each class separately, but the output is a distribution over {classes} classes.",
    sure=0.9,
    reads="rows of the input of binary_cross_entropy and of its targets",
    source='DeepFD (Cao et al. 2022), fault "loss": binary for categorical cross-entropy',
    remedy="For one class out of several use cross_entropy on logits; for several at once, a sigmoid for each.",
)
def softmax_into_bce(evidence: Evidence, *, least_classes: int = 3) -> Seen | None:
    """The loss is binary, and the output is a softmax over at least `least_classes`."""
    call = evidence.call
    if call is None or call.kind not in YES_OR_NO or call.input.dim() < 2 or call.input.shape[-1] < least_classes:
        return None
    if call.made_by is None or call.made_by[0] not in ("softmax", "log_softmax"):
        return None
    return Seen(loss=call.kind, classes=int(call.input.shape[-1]))


def is_one_hot(targets: object, least: int = 2) -> bool:
    """Whether each row of `targets` is zeros and one 1."""
    if not isinstance(targets, Tensor) or targets.dim() < 2 or targets.shape[-1] < least or not targets.numel():
        return False
    t = targets.detach()
    return bool(((t == 0) | (t == 1)).all()) and bool((t.double().sum(-1) == 1).all())
