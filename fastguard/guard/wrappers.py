"""What stands around an optimizer or a model: wrappers, which are looked through, and shards, which are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_REMEDY = (
    "Each rank holds only a part of the gradients, so a norm taken here would be wrong. Clip with torch's own "
    "clip_grad_norm_ (FSDP1: model.clip_grad_norm_), and use fastguard.tensor_stats for the local shards."
)


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


def refuse_shards(groups: Iterable[Iterable[torch.Tensor]]) -> None:
    """Raises TypeError if a parameter is a DTensor (FSDP2, tensor parallelism)."""
    for params in groups:
        for p in params:
            if type(p) is not torch.nn.Parameter and hasattr(p, "to_local"):
                raise TypeError(f"`optimizer` must hold whole parameters, got a DTensor. {_REMEDY}")


def refuse_sharding_model(model: torch.nn.Module | None) -> None:
    """Raises TypeError if a module of `model` is FSDP1, whose flat local shards look like plain parameters."""
    for module in () if model is None else model.modules():
        if any(c.__name__ == "FullyShardedDataParallel" for c in type(module).__mro__):
            raise TypeError(f"`model` must not be sharded, got a FullyShardedDataParallel module. {_REMEDY}")
