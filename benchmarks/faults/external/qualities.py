"""How good a model has become, the more the better: 1 is perfect."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .loop import Tensors

Quality = Callable[[nn.Module, Tensors], float]


@torch.no_grad()
def accuracy(model: nn.Module, data: Tensors) -> float:
    """Share of the samples whose largest output is their class's; of all places where there are several a sample."""
    return float((model(data[0]).argmax(-1) == data[1]).float().mean())


def sign_accuracy(threshold: float = 0.0) -> Quality:
    """Share of the samples whose one output lies on the right side of `threshold`; classes are 0 and 1."""

    @torch.no_grad()
    def measure(model: nn.Module, data: Tensors) -> float:
        return float(((model(data[0]).flatten() > threshold) == (data[1].flatten() > 0.5)).float().mean())

    return measure


@torch.no_grad()
def r_squared(model: nn.Module, data: Tensors) -> float:
    """1 - mean squared error / variance of the targets, which are the last tensor."""
    return explained(model(data[0]).flatten(), data[-1].flatten())


def explained(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """1 - mean squared error / variance."""
    return float(1.0 - (found - wanted).double().square().mean() / wanted.double().var(correction=0))


@torch.no_grad()
def reconstruction(model: nn.Module, data: Tensors) -> float:
    """`r_squared` with the inputs as targets."""
    return explained(model(data[0]).flatten(), data[0].flatten())


@torch.no_grad()
def bits(model: nn.Module, data: Tensors) -> float:
    """Minus the mean cross-entropy in bits a symbol."""
    logits = model(data[0]).flatten(0, -2)
    return -float(nn.functional.cross_entropy(logits, data[1].flatten())) / 0.6931471805599453
