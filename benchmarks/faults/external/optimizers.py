"""Optimizers and schedules as plans take them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .loop import MakeOptimizer

Schedule = Callable[[int], Callable[[int], float]]


def of(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    """An optimizer over all parameters of the model."""
    return lambda model, lr: kind(model.parameters(), lr=lr, **options)


SGD = of(torch.optim.SGD)
MOMENTUM = of(torch.optim.SGD, momentum=0.9)
NESTEROV = of(torch.optim.SGD, momentum=0.9, nesterov=True)
ADAM = of(torch.optim.Adam)
ADAMW = of(torch.optim.AdamW)
RMSPROP = of(torch.optim.RMSprop)
ADAGRAD = of(torch.optim.Adagrad)
ADADELTA = of(torch.optim.Adadelta)
NADAM = of(torch.optim.NAdam)
RADAM = of(torch.optim.RAdam)
LBFGS = of(torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")


def cosine(num_steps: int) -> Callable[[int], float]:
    """Down to nearly nothing along half a cosine."""
    return lambda step: 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / num_steps)))


def warm_cosine(num_steps: int) -> Callable[[int], float]:
    """Up over a tenth, then down along half a cosine."""
    warm = max(1, num_steps // 10)
    down = cosine(num_steps - warm)
    return lambda step: (step + 1) / warm if step < warm else down(step - warm)


def one_cycle(num_steps: int) -> Callable[[int], float]:
    """Up over three tenths, then down to nearly nothing, both along straight lines."""
    return lambda step: max(0.01, min((step + 1) / (0.3 * num_steps), (num_steps - step) / (0.7 * num_steps)))


def halving(num_steps: int) -> Callable[[int], float]:
    """A half after each fifth of the run."""
    return lambda step: 0.5 ** (5 * step // max(1, num_steps))


def restarts(num_steps: int) -> Callable[[int], float]:
    """Four cosines, one after another."""
    period = max(1, num_steps // 4)
    return lambda step: 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * (step % period) / period))


def linear_decay(num_steps: int) -> Callable[[int], float]:
    """Down to nothing along a straight line."""
    return lambda step: max(0.0, 1.0 - step / num_steps)


def two_groups(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW without decay on vectors, as most recipes have it."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)
