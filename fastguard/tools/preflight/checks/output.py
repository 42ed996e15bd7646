"""Output against loss: what the last layer gives, and what the loss takes it for."""

from __future__ import annotations

import torch
from torch import Tensor

from ....diagnosis import Finding
from ..evidence import Evidence
from ..losses import YES_OR_NO, num_classes
from ..registry import check
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
    "relu6": (0.0, 6.0),
    "elu": (-1.0, float("inf")),
    "celu": (-1.0, float("inf")),
    "selu": (-1.76, float("inf")),
    "silu": (-0.28, float("inf")),
    "gelu": (-0.17, float("inf")),
}


def _sums_to_one(x: Tensor, dim: int) -> bool:
    """Whether `x` is a distribution over `dim`, and not one that is trivially so."""
    x = x.detach()
    if x.dim() <= dim or x.shape[dim] < 2 or not x.is_floating_point() or not x.numel():
        return False
    return bool((x >= 0).all()) and bool(((x.double().sum(dim) - 1).abs() < 1e-3).all())


def _classes_dim(x: Tensor) -> int:
    return 1 if x.dim() > 1 else 0


def _maker(call: LossCall) -> str:
    """What made the loss's input, by name; by its values, where that could not be watched."""
    if call.made_by is not None:
        return call.made_by[0]
    return "softmax" if _sums_to_one(call.input, _classes_dim(call.input)) else ""


@check(
    "softmax-before-cross-entropy",
    cause="wrong-output-layer",
    severity="critical",
    reads="what made the input of cross_entropy or binary_cross_entropy_with_logits",
    source=_TORCH,
    remedy="Leave the softmax (or sigmoid) out of the model: the loss takes logits, and applies one itself.",
)
def softmax_before_cross_entropy(evidence: Evidence) -> Finding | None:
    """A loss that takes logits is given probabilities: what a softmax or a sigmoid put out.

    Told by the function that made its input; where that could not be watched, by rows that sum to 1.
    """
    call = evidence.call
    is_of_classes = call is not None and call.kind == "cross_entropy" and num_classes(call) > 1
    if call is None or not (is_of_classes or call.kind == "binary_cross_entropy_with_logits"):
        return None
    made_by = _maker(call)
    if made_by not in _PROBABILITIES:
        return None
    what = (
        "a softmax to it once more: between probabilities of 0 and 1 it can tell classes apart by a factor of e at most"
        if is_of_classes
        else "a sigmoid to it once more: its answers lie between 0.5 and 0.73"
    )
    return Finding(
        f"The loss {call.kind} is given what {made_by} put out, and applies {what}.",
        severity="critical",
        evidence={"loss": call.kind, "made_by": made_by},
        confidence=0.97,
    )


@check(
    "activation-before-cross-entropy",
    cause="wrong-output-layer",
    reads="what made the input of cross_entropy",
    source=_TORCH + "; AUTOTRAINER (Zhang et al. 2021), improper activation",
    remedy="Give cross_entropy the last linear layer's output as it is, without an activation.",
)
def activation_before_cross_entropy(evidence: Evidence) -> Finding | None:
    """The logits of `cross_entropy` or `binary_cross_entropy_with_logits` come out of an activation.

    Such as ReLU, tanh, softplus: it takes away part of the range that logits have. `softmax-before-cross-entropy` tells
    of a sigmoid or softmax.
    """
    call = evidence.call
    if call is None or call.kind not in ("cross_entropy", "binary_cross_entropy_with_logits"):
        return None
    made_by = _maker(call)
    if made_by in _PROBABILITIES or made_by not in (*_SQUASHING, *_ROUNDED):
        return None
    is_hard = made_by in _SQUASHING
    return Finding(
        f"The logits that {call.kind} is given come out of {made_by}, which leaves them only a part of their range.",
        evidence={"loss": call.kind, "made_by": made_by},
        confidence=0.95 if is_hard else 0.8,
    )


@check(
    "nll-without-log-softmax",
    cause="wrong-output-layer",
    severity="critical",
    reads="the input of nll_loss",
    source=_TORCH,
    remedy="End the model with log_softmax over the classes, or use cross_entropy on its logits.",
)
def nll_without_log_softmax(evidence: Evidence) -> Finding | None:
    """The input of `nll_loss` is no logarithm of probabilities: their exponentials do not sum to 1."""
    call = evidence.call
    if call is None or call.kind != "nll_loss" or _is_bad_axis(call):
        return None
    x = call.input.detach().double()
    sums = x.exp().sum(_classes_dim(x))
    if bool((x <= 1e-6).all()) and bool(((sums - 1).abs() < 1e-2).all()):
        return None
    return Finding(
        "The loss nll_loss is given values that are no log-probabilities"
        f"{f' but what {_maker(call)} put out' if _maker(call) else ''}: it only takes their mean with a minus sign, "
        "and can fall without end.",
        severity="critical",
        evidence={"largest": float(x.max()), "sum_of_exp": float(sums.mean()), "made_by": _maker(call)},
        confidence=0.97,
    )


@check(
    "probabilities-out-of-range",
    cause="wrong-output-layer",
    severity="critical",
    reads="the input of binary_cross_entropy",
    source=_TORCH,
    remedy="End the model with a sigmoid, or use binary_cross_entropy_with_logits on its output as it is.",
)
def probabilities_out_of_range(evidence: Evidence) -> Finding | None:
    """`binary_cross_entropy` is given values outside [0, 1]; or values of an activation that is no probability's."""
    call = evidence.call
    if call is None or call.kind != "binary_cross_entropy" or not call.input.numel():
        return None
    low, high = float(call.input.detach().min()), float(call.input.detach().max())
    made_by = call.made_by[0] if call.made_by is not None else ""
    if low >= 0.0 and high <= 1.0 and made_by not in ("relu", "tanh", "softplus", "softsign", "elu", "selu", "exp"):
        return None
    return Finding(
        f"The loss binary_cross_entropy is given values from {low:.3g} to {high:.3g}"
        f"{f' out of {made_by}' if made_by else ''}; it needs probabilities.",
        severity="critical",
        evidence={"lowest": low, "highest": high, "made_by": made_by},
        confidence=0.97,
    )


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
    reads="sums of the loss's input over samples and over classes",
    source="the dimension of a softmax is that of the classes",
    remedy="Give the softmax the dimension of the classes: dim=1, or dim=-1.",
)
def softmax_over_batch(evidence: Evidence) -> Finding | None:
    """The output's probabilities sum to 1 over the samples of the batch, and not over the classes."""
    call = evidence.call
    if call is None or not _is_bad_axis(call):
        return None
    return Finding(
        "The output's probabilities sum to 1 over the samples of a batch, not over the classes: each sample's answer "
        "depends on who else is in the batch.",
        severity="critical",
        evidence={"dim": call.made_by[1] if call.made_by else None},
        confidence=0.97,
    )


@check(
    "targets-out-of-reach",
    cause="wrong-output-layer",
    reads="the last activation's range; the targets of a regression",
    source="DeepDiagnosis (Wardat et al. 2022), output range against target range",
    remedy="End a regression with a linear layer, or scale the targets into the range of the last activation.",
)
def targets_out_of_reach(evidence: Evidence, *, share: float = 0.05, slack: float = 0.05) -> Finding | None:
    """More than `share` of a regression's targets lie outside what the last activation can give.

    Further outside than `slack` of the range of the targets.
    """
    call = evidence.call
    is_regression = call is not None and call.kind in REGRESSION
    made_by = evidence.output_made_by
    if made_by is None or made_by[0] not in _RANGES or not evidence.targets or (call is not None and not is_regression):
        return None
    targets = torch.cat([t.reshape(-1).double() for t in evidence.targets if t.is_floating_point()] or [torch.empty(0)])
    output = evidence.output
    if not targets.numel() or output is None or output.numel() != evidence.targets[0].numel():
        return None
    low, high = _RANGES[made_by[0]]
    allowed = slack * float(targets.max() - targets.min())
    outside = float(((targets < low - allowed) | (targets > high + allowed)).double().mean())
    if outside <= share:
        return None
    return Finding(
        f"{outside:.0%} of the targets lie outside what the last activation, {made_by[0]}, can give ({low:g} to "
        f"{high:g}): they go from {float(targets.min()):.3g} to {float(targets.max()):.3g}.",
        severity="critical" if outside > 0.3 else "warning",
        evidence={"outside": outside, "threshold": share, "made_by": made_by[0]},
        confidence=0.93,
    )


@check(
    "softmax-into-bce",
    cause="wrong-loss",
    reads="rows of the input of binary_cross_entropy and of its targets",
    source='DeepFD (Cao et al. 2022), fault "loss": binary for categorical cross-entropy',
    remedy="For one class out of several use cross_entropy on logits; for several at once, a sigmoid for each.",
)
def softmax_into_bce(evidence: Evidence, *, least_classes: int = 3) -> Finding | None:
    """The loss is binary, and the output is a softmax over at least `least_classes`."""
    call = evidence.call
    if call is None or call.kind not in YES_OR_NO or call.input.dim() < 2 or call.input.shape[-1] < least_classes:
        return None
    if call.made_by is None or call.made_by[0] not in ("softmax", "log_softmax"):
        return None
    return Finding(
        "The loss asks of each class yes or no by itself, and the output is a distribution over the classes.",
        evidence={"loss": call.kind, "classes": int(call.input.shape[-1])},
        confidence=0.9,
    )


def is_one_hot(targets: object, least: int = 2) -> bool:
    """Whether each row of `targets` is zeros and one 1."""
    if not isinstance(targets, Tensor) or targets.dim() < 2 or targets.shape[-1] < least or not targets.numel():
        return False
    t = targets.detach()
    return bool(((t == 0) | (t == 1)).all()) and bool((t.double().sum(-1) == 1).all())
