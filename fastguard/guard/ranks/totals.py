"""The norm of sharded tensors by a function: without a guard, and without anything kept from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import kernels
from ...stats.columns import norm_of, norm_parts
from . import shards
from .exchange import Wire, counted, divided, fold


def norm_over_ranks(tensors: Sequence[torch.Tensor], holders: Sequence[torch.Tensor], backend: str) -> float:
    """The 2-norm of `tensors` as wholes, the same bits on every rank.

    Args:
        tensors: DTensors and plain ones; those that are plain are the same on every rank.
        holders: DTensors whose meshes say which ranks take part; of parameters, also where this rank has no gradient.

    Cost: one read of what is here, and a gather of ten numbers a rank.
    """
    wire = Wire(shards.groups_of(holders))
    wholes = [shards.whole(tensor) for tensor in tensors]
    table, _ = kernels.run_stats(shards.locals_of(wholes), backend)
    known: dict[Any, float] = {}
    times = []
    for tensor in wholes:
        key = (id(getattr(tensor, "device_mesh", None)), shards.placements(tensor))
        if key not in known:
            known[key] = wire.num_ranks / shards.num_shards(tensor)
        times.append(known[key])
    if any(one != 1.0 for one in times):
        table = divided(table, torch.tensor(times, dtype=torch.float64).unsqueeze(1))
    row: Sequence[float] = kernels.fold_rows(table)
    for group in wire.groups:
        row = fold(wire.gather(row, group))
    return norm_of(*norm_parts(counted(row)))


def as_everywhere(norm: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`norm` as a DTensor that every rank of `like`'s mesh holds, as torch returns it."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
