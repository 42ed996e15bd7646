"""The layout of a model over ranks: DTensors, flat parameters of FSDP1, gradients that DDP and FSDP2 average."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

_FSDP1 = "FullyShardedDataParallel"
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_REMEDY = "Shard with fully_shard (FSDP2), whose parameters can be guarded; or clip with model.clip_grad_norm_."


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor, sharded or replicated."""
    return _is_dtensor(type(tensor))


@functools.cache
def _is_dtensor(cls: type) -> bool:
    return hasattr(cls, "to_local") and hasattr(cls, "device_mesh")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of `tensor`, or itself if it is not a DTensor. Waits for a collective that is under way."""
    if not _is_dtensor(type(tensor)):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    return local.wait() if type(local) is not torch.Tensor and hasattr(local, "trigger_wait") else local


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`local_of` each. Cost: 0.15 us a DTensor."""
    return [local_of(tensor) for tensor in tensors]


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """`gradient`, summed over the ranks with Partial placements, which takes a collective."""
    _, placements = laid_out(gradient)
    if not any(p.is_partial() for p in placements or ()):
        return gradient
    from torch.distributed.tensor import Replicate

    target = [Replicate() if p.is_partial() else p for p in placements]
    return gradient.redistribute(placements=target)  # type: ignore[attr-defined]


class ShardLayout(NamedTuple):
    """The layout of a tensor over the ranks."""

    mesh: Any  # None for a plain tensor
    num_ranks: int  # of the mesh
    num_shards: int  # number of different parts; 1 if each rank has the whole tensor
    cut: frozenset[int]  # dimensions of the mesh that shard it
    is_partial: bool  # whether ranks hold terms of a sum


def layout_of(mesh: Any, placements: Any) -> ShardLayout:
    """The layout of a DTensor with these; of a plain tensor for None and None."""
    if mesh is None:
        return ShardLayout(None, 1, 1, frozenset(), False)
    cut = [i for i, p in enumerate(placements) if not (p.is_replicate() or p.is_partial())]
    shards = math.prod(mesh.size(i) for i in cut)
    return ShardLayout(mesh, mesh.size(), shards, frozenset(cut), any(p.is_partial() for p in placements))


def laid_out(tensor: Any) -> tuple[Any, Any]:
    """The arguments of `layout_of`: mesh and placements of a DTensor, None and None of other tensors."""
    spec = getattr(tensor, "_spec", None)
    return (None, None) if spec is None or not is_sharded(tensor) else (spec.mesh, spec.placements)


def layouts_of(tensors: Iterable[torch.Tensor]) -> list[ShardLayout]:
    """The layouts of the DTensors among `tensors`, each once."""
    return [*dict.fromkeys(layout_of(mesh, how) for mesh, how in map(laid_out, tensors) if mesh is not None)]


def groups_across(layouts: Collection[ShardLayout]) -> list[dist.ProcessGroup]:
    """The groups to sum parts over, if copies of a part are equal: those of the dimensions that shard a tensor."""
    first, world = next(iter(layouts), None), dist.group.WORLD
    if first is not None and all(layout.mesh is first.mesh for layout in layouts):
        cut = frozenset[int]().union(*(layout.cut for layout in layouts))
        if len(cut) < first.mesh.ndim:
            return [group for group in map(first.mesh.get_group, sorted(cut)) if group.size() > 1]
    num_ranks = max((layout.num_ranks for layout in layouts), default=1)
    if world is not None and num_ranks == world.size() > 1:  # the usual case, quickly found
        return [world]
    return groups_of(layout.mesh for layout in layouts)


def groups_of(meshes: Iterable[Any]) -> list[dist.ProcessGroup]:
    """The groups to reduce over, one after the other, to reach all ranks of `meshes`: the world, or one a dimension.

    A TypeError if the meshes have different ranks, and none has all.
    """
    by_ranks = {frozenset(mesh.mesh.flatten().tolist()): mesh for mesh in meshes}
    if not by_ranks:
        return []
    ranks, mesh = max(by_ranks.items(), key=lambda item: len(item[0]))
    if any(not other <= ranks for other in by_ranks):
        raise TypeError(
            "`optimizer` must hold parameters of which one mesh spans all ranks, got meshes of different ones: "
            f"{sorted(map(sorted, by_ranks))}. Put them on a common mesh of more dimensions."
        )
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        return [] if world is None or len(ranks) == 1 else [world]
    groups = [mesh.get_group(i) for i in range(mesh.ndim)]
    return [group for group in groups if dist.get_world_size(group) > 1]


class FlatShards(NamedTuple):
    """The layout of the flat parameters of a model over the ranks."""

    groups: list[dist.ProcessGroup]  # to reduce over, one after the other: of shards, then of their replicas
    num_shards: torch.Tensor  # number of different parts of each parameter, float64 [T, 1]; 1 of those that are whole


def flat_shards(model: torch.nn.Module | None, params: Sequence[torch.Tensor]) -> FlatShards | None:
    """The layout of the flat parameters, or of views of them, among `params`; None if there are none.

    A TypeError if `model` does not own them, or they do not all lie on the same ranks in the same way.
    """
    are_flat = [bool(getattr(p, "_fsdp_flattened", False)) for p in params]
    if not any(are_flat):
        return None
    modules: list[Any] = [m for m in (() if model is None else model.modules()) if _is_fsdp1(m)]
    if not modules:
        raise TypeError(
            f"`model` must be the {_FSDP1} module whose flat parameters `optimizer` holds, got another or none. "
            f"Without it a norm would cover one rank only. Call wrap(optimizer, fsdp_model). {_REMEDY}"
        )
    layouts = []
    for module in (module for module in modules if getattr(module, "_handle", None) is not None):
        strategy, groups = module.sharding_strategy.name, [module.process_group]
        if strategy in _HYBRID:
            groups.append(module._inter_node_pg)
        layouts.append((groups, strategy != "NO_SHARD"))
    if len({(*map(id, groups), is_cut) for groups, is_cut in layouts}) != 1:
        raise TypeError(
            f"`model` must have all its {_FSDP1} modules over the same process group, with one sharding strategy. "
            f"{_REMEDY}"
        )
    groups, is_cut = layouts[0]
    sizes = [dist.get_world_size(group) for group in groups]
    several = [group for group, size in zip(groups, sizes) if size > 1]
    counts = [sizes[0] if is_cut and is_flat else 1 for is_flat in are_flat]
    return FlatShards(several, torch.tensor(counts, dtype=torch.float64, device="cpu").unsqueeze(1))


def _is_fsdp1(module: torch.nn.Module) -> bool:
    return any(c.__name__ == _FSDP1 for c in type(module).__mro__)


def refuse_shards(groups: Iterable[Iterable[torch.Tensor]]) -> None:
    """Raises TypeError if a parameter has become a DTensor, or is a flat one of FSDP1, or a view of it."""
    for p in (p for params in groups for p in params):
        if type(p) is not nn.Parameter and hasattr(p, "to_local"):
            raise TypeError(
                "`optimizer` must hold whole parameters as it did when it was wrapped, got a DTensor. Shard the "
                "model first, then make the optimizer, then wrap it. (wrap_backward takes no shards.)"
            )
        if getattr(p, "_fsdp_flattened", False):
            raise TypeError(f"`optimizer` must hold whole parameters, got one of a {_FSDP1} module. {_REMEDY}")


def refuse_sharding_model(model: nn.Module | None) -> None:
    """Raises TypeError if a module of `model` is FSDP1, whose flat local shards look like plain parameters."""
    if model is not None and any(map(_is_fsdp1, model.modules())):
        raise TypeError(f"`model` must not be sharded, got a {_FSDP1} module. {_REMEDY}")


def is_under_fully_shard(model: nn.Module | None) -> bool:
    """Whether one of its modules is under `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    return model is not None and any(isinstance(module, FSDPModule) for module in model.modules())


def has_other_ranks() -> bool:
    """Whether this process is one of several in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def copies_of(
    params: Sequence[torch.Tensor], model: nn.Module | None, group: dist.ProcessGroup | None
) -> list[int] | None:
    """How many ranks of `group` hold a copy of each parameter, because DistributedDataParallel averages its gradient;
    None if it averages nothing over these ranks."""
    if group is None or not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    ranks = set(dist.get_process_group_ranks(group))
    shared = len(ranks.intersection(dist.get_process_group_ranks(model.process_group)))
    averaged = {id(p) for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore}
    return [shared if id(p) in averaged else 1 for p in params] if shared > 1 else None


def ranks_of(params: Sequence[torch.Tensor]) -> list[int]:
    """All ranks with parts of some of `params`."""
    layouts = layouts_of(params)
    if not layouts:
        return [0]
    ranks: list[int] = max(layouts, key=lambda layout: layout.num_ranks).mesh.mesh.flatten().tolist()
    return ranks
