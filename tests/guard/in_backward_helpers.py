"""Optimizers of single parameters, torch's recipe for stepping them within the backward pass, and poisoned passes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from foreign_optimizers import WantsGradients
from guard_helpers import loss_at, make_model
from torch import nn

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def adamw(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05)


MAKERS: dict[str, Make] = {
    "AdamW": adamw,
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "one that needs gradients": lambda p: WantsGradients(p),
}


def each(model: nn.Module, make: Make = adamw) -> dict[torch.Tensor, torch.optim.Optimizer]:
    return {p: make([p]) for p in model.parameters()}


def release(optimizers: dict[torch.Tensor, torch.optim.Optimizer]) -> None:
    """Torch's recipe."""

    def hook(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)


def backward(model: nn.Module, step: int, bad: int | None = None, value: float = math.nan) -> torch.Tensor:
    """One training step; with `bad`, an element of that parameter's gradient is `value`."""
    loss = loss_at(model, step)
    handle = None
    if bad is not None:

        def poisoned(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[0] = value
            return gradient

        handle = list(model.parameters())[bad].register_hook(poisoned)
    try:
        loss.backward()
    finally:
        if handle is not None:
            handle.remove()
    return loss.detach()


def gradients_of(model: nn.Module, step: int) -> list[torch.Tensor]:
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.grad = None
    return list(torch.autograd.grad(loss_at(twin, step), list(twin.parameters())))


def plain_copy(model: nn.Module) -> nn.Module:
    """A model of the same weights without hooks."""
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    return twin
