"""The chance level of a loss, and its value for the best constant answer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .watcher import REGRESSION, LossCall

CLASSES = ("cross_entropy", "nll_loss")
YES_OR_NO = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


def has_indices(call: LossCall) -> bool:
    """Whether the targets are numbers of classes."""
    return call.kind in CLASSES and isinstance(call.target, Tensor) and not call.target.is_floating_point()


def num_classes(call: LossCall) -> int:
    """Number of classes in the input of a loss over classes."""
    return call.input.shape[1] if call.input.dim() > 1 else call.input.shape[0] if call.input.dim() else 1


def labels(call: LossCall) -> Tensor:
    """The classes of the targets, without those to be ignored: 1-d, int64."""
    given = call.target.detach().reshape(-1).long()
    return given[given != int(call.options.get("ignore_index", -100))]


def chance(call: LossCall) -> float | None:
    """The chance level: ln C for C classes, ln 2 for yes or no; None for other losses."""
    if call.kind in CLASSES:
        return math.log(max(num_classes(call), 1))
    return math.log(2.0) if call.kind in YES_OR_NO else None


def constant_baseline(call: LossCall) -> float | None:
    """The mean loss of the best constant answer; None if it is not known.

    Equivalent to: the entropy of the shares of classes; for regression, the loss of the targets' mean (l1: median).
    """
    if call.reduction != "mean" or call.options.get("weight") is not None or not isinstance(call.target, Tensor):
        return None
    target = call.target.detach()
    if not target.numel():
        return None
    if call.kind in CLASSES:
        smoothing = float(call.options.get("label_smoothing", 0.0))
        if has_indices(call):
            found = labels(call)
            if not found.numel() or int(found.min()) < 0 or int(found.max()) >= num_classes(call):
                return None
            shares = torch.bincount(found, minlength=num_classes(call)).double() / found.numel()
        else:
            shares = target.double().transpose(1, -1).reshape(-1, num_classes(call)).mean(0)
        return _entropy((1 - smoothing) * shares + smoothing / num_classes(call))
    if call.kind in YES_OR_NO:
        if call.options.get("pos_weight") is not None or bool(((target < 0) | (target > 1)).any()):
            return None
        p = target.double().reshape(target.shape[0], -1).mean(0) if target.dim() else target.double()
        return float(-(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).mean())
    if call.kind in REGRESSION and target.dim() and target.is_floating_point():
        by_sample = target.double().reshape(target.shape[0], -1)
        center = by_sample.median(0).values if call.kind == "l1_loss" else by_sample.mean(0)
        options = {k: v for k, v in call.options.items() if k in ("beta", "delta")}
        return float(getattr(F, call.kind)(center.expand_as(by_sample), by_sample, **options))
    return None


def _entropy(shares: Tensor) -> float:
    return float(-torch.xlogy(shares, shares).sum())
