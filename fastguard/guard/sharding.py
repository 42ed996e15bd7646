"""Gradients of which a rank holds a part only: their norm takes a reduction over ranks, so they are refused for now."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_REMEDY = (
    "Each rank holds only a part of the gradients, so a norm taken here would be wrong. Clip with torch's own "
    "clip_grad_norm_ (FSDP1: model.clip_grad_norm_), and use fastguard.tensor_stats for the local shards."
)


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
