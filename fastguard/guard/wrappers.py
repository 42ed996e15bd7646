"""Objects that stand in front of an optimizer: the wrappers of accelerate, Lightning and the like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def inwards(optimizer: Any) -> Iterator[Any]:
    """`optimizer`, and what it wraps, outermost first."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        inner = getattr(optimizer, "__dict__", {})
        optimizer = inner.get("optimizer", inner.get("_optimizer"))


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that takes the steps, inside whatever wraps it.

    Raises:
        TypeError: it is not a torch.optim.Optimizer, or one of DeepSpeed's.
    """
    for module in {c.__module__ for c in type(optimizer).__mro__}:
        if module.split(".")[0] == "deepspeed":
            raise TypeError(
                "`optimizer` must be a torch.optim.Optimizer that takes one step a call, got DeepSpeed's "
                f"{type(optimizer).__name__}, which steps group by group on partitioned gradients. Run without ZeRO."
            )
    inner = [optimizer, *inwards(optimizer)][-1]
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"`optimizer` must be a torch.optim.Optimizer, got {type(inner).__name__}")
    return inner
