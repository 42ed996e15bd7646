"""Losses and learning rates: numbers, or tensors of one element."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ..records import values


def check_scalar(name: str, value: Any) -> None:
    """Raises ValueError for what is neither a real number nor a tensor of one. Does not synchronise."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"`{name}` must be a scalar, got a tensor of shape {tuple(value.shape)}. Reduce it first.")
        if value.is_complex() or value.is_meta:
            raise ValueError(f"`{name}` must be a real number, got a tensor of {value.dtype} on {value.device}.")
    elif type(value) is not float:
        scalar(name, value)


def is_loss(value: Any) -> bool:
    """Whether what a closure returned is a loss: a number, or a tensor of one element."""
    if not isinstance(value, (int, float, torch.Tensor)):
        return False
    try:
        check_scalar("loss", value)
    except ValueError:
        return False
    return True


def scalar(name: str, value: Any) -> float:
    """`value` as a number; synchronises if it is a tensor on an accelerator."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        check_scalar(name, value)
        return float(value.detach())
    try:
        return values.real(value.item() if getattr(value, "size", 0) == 1 else value)  # NumPy's
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        what = f"a {type(value).__name__}" + ("" if isinstance(error, TypeError) else f" ({error})")
        raise ValueError(f"`{name}` must be a number or a tensor of one element, got {what}.") from None


def rate_of(optimizer: Optimizer) -> Any:
    """The learning rate of the first group as it is; None if it is neither a number nor a tensor of one element."""
    lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return lr if type(lr) is float or (lr is not None and is_loss(lr)) else None


def learning_rate(optimizer: Optimizer) -> float | None:
    """`rate_of` as a number; synchronises if it is a tensor on an accelerator."""
    lr = rate_of(optimizer)
    return None if lr is None else scalar("lr", lr)
