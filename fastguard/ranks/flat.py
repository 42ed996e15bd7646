"""FSDP1: plain tensors that are shards of flat parameters. The modules of the model know their groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_WHAT = "FullyShardedDataParallel"
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_REMEDY = "Shard with fully_shard (FSDP2), whose parameters say it themselves; or clip with model.clip_grad_norm_."


class FlatShards(NamedTuple):
    """The layout of the flat parameters of a model over the ranks.

    Attributes:
        groups: to reduce over, one after the other: of shards, then of their replicas.
        num_ranks: of all groups together.
        num_shards: number of different parts of each flat parameter.
        are_flat: for each parameter, whether it is flat; others are whole on each rank.
    """

    groups: list[dist.ProcessGroup]
    num_ranks: int
    num_shards: int
    are_flat: list[bool]

    def replication(self, present: Sequence[int] | None) -> torch.Tensor | None:
        """Number of ranks with the same gradient, for `present` parameters: float64, [T, 1]; None if always one."""
        places = range(len(self.are_flat)) if present is None else present
        times = [self.num_ranks / (self.num_shards if self.are_flat[i] else 1) for i in places]
        if all(one == 1.0 for one in times):
            return None
        return torch.tensor(times, dtype=torch.float64, device="cpu").unsqueeze(1)


def flat_shards(model: torch.nn.Module | None, params: Sequence[torch.Tensor]) -> FlatShards | None:
    """The layout of the flat parameters, or of views of them, among `params`; None if there are none.

    Raises:
        TypeError: `model` does not own them, or they do not all lie on the same ranks in the same way.
    """
    are_flat = [bool(getattr(p, "_fsdp_flattened", False)) for p in params]
    if not any(are_flat):
        return None
    modules = [] if model is None else [m for m in model.modules() if _is_fsdp1(m)]
    if not modules:
        raise TypeError(
            f"`model` must be the {_WHAT} module whose flat parameters `optimizer` holds, got another or none. Without "
            f"it a norm would cover one rank only. Call wrap(optimizer, fsdp_model). {_REMEDY}"
        )
    lie = [_lies(module) for module in modules if getattr(module, "_handle", None) is not None]
    if not lie or any([list(map(id, one[0])), one[1]] != [list(map(id, lie[0][0])), lie[0][1]] for one in lie):
        raise TypeError(
            f"`model` must have all its {_WHAT} modules over the same process group, with one sharding strategy. "
            f"{_REMEDY}"
        )
    groups, is_sharded = lie[0]
    sizes = [dist.get_world_size(group) for group in groups]
    num_ranks = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    several = [group for group, size in zip(groups, sizes) if size > 1]
    return FlatShards(several, num_ranks, sizes[0] if is_sharded else 1, are_flat)


def _is_fsdp1(module: torch.nn.Module) -> bool:
    return any(c.__name__ == _WHAT for c in type(module).__mro__)


def _lies(module: Any) -> tuple[list[dist.ProcessGroup], bool]:
    """The groups of a module's shards and, if there are any, of their replicas; and whether it shards at all."""
    strategy = module.sharding_strategy.name
    groups = [module.process_group]
    if strategy in _HYBRID:
        groups.append(module._inter_node_pg)
    return groups, strategy != "NO_SHARD"
