"""DTensors: local parts, number of parts, and the ranks with the other parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


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
    local: Any = getattr(tensor, "_local_tensor", None)
    if local is None:
        local = tensor.to_local()  # type: ignore[attr-defined]
    return local.wait() if type(local) is not torch.Tensor and hasattr(local, "trigger_wait") else local


def as_part_of(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that makes a DTensor with the layout of `tensor` from a local tensor."""
    from torch.distributed.tensor import DTensor

    one: Any = tensor
    layout = {"shape": one.shape, "stride": one.stride()}
    return functools.partial(DTensor.from_local, device_mesh=one.device_mesh, placements=one.placements, **layout)


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`local_of` each. Cost: 0.15 us a DTensor."""
    return [local_of(tensor) for tensor in tensors]


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """`gradient`, summed over the ranks with Partial placements, which takes a collective."""
    if not any(p.is_partial() for p in placements(gradient) or ()):
        return gradient
    from torch.distributed.tensor import Replicate

    target = [Replicate() if p.is_partial() else p for p in placements(gradient)]
    return gradient.redistribute(placements=target)  # type: ignore[attr-defined]


class ShardLayout(NamedTuple):
    """The layout of a tensor over the ranks.

    Attributes:
        mesh: None for a plain tensor.
        num_ranks: of the mesh.
        num_shards: number of different parts; 1 if each rank has the whole tensor.
        cut: dimensions of the mesh that shard it.
        is_partial: whether ranks hold terms of a sum.
    """

    mesh: Any
    num_ranks: int
    num_shards: int
    cut: frozenset[int]
    is_partial: bool


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


def placements(tensor: torch.Tensor) -> Any:
    """The placements of a DTensor, None of other tensors; cheap, to see whether they have changed."""
    spec = getattr(tensor, "_spec", None)
    return None if spec is None else spec.placements


def layouts_of(tensors: Iterable[torch.Tensor]) -> list[ShardLayout]:
    """The layouts of the DTensors among `tensors`, each once."""
    different: list[ShardLayout] = []
    for mesh, places in map(laid_out, tensors):
        if mesh is not None:
            layout = layout_of(mesh, places)
            if layout not in different:
                different.append(layout)
    return different


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

    Raises:
        TypeError: the meshes have different ranks, and none has all.
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
