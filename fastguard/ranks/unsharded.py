"""DDP and FSDP2: which ranks average gradients, and hooks on whole parameters before they are reduced and cut."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..observers.observer import ModuleHook
from . import shards

_Put = Callable[[int, torch.Tensor], Any]


class Unsharded:
    """Sets hooks on the whole parameters that `fully_shard` gathers before the forward pass of a module.

    The hooks run before it reduces the gradients. New whole parameters get hooks in the next pass.

    Args:
        model: with modules under `fully_shard`, before a forward pass.
        params: the sharded parameters.
        put: sets a hook on the whole parameter of an index in `params`, and returns its handle.

    Attributes:
        places: indices of the parameters of such modules.

    Cost: a dictionary look-up a parameter and forward pass.
    """

    def __init__(self, model: nn.Module, params: Sequence[torch.Tensor], put: _Put) -> None:
        self._put = put
        index = {id(p): i for i, p in enumerate(params)}
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._handles = []
        self.places: set[int] = set()
        for module in filter(_is_fsdp2, model.modules()):
            owned = [
                (m, name, index[id(p)]) for m in _own(module) for name, p in m._parameters.items() if id(p) in index
            ]
            if owned:
                self.places.update(place for *_, place in owned)
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self.meet, owned)))

    def meet(self, owned: Sequence[tuple[nn.Module, str, int]], *_: Any) -> None:
        """Sets hooks on whole parameters that have none, when a module is called."""
        for module, name, place in owned:
            p = module._parameters.get(name)
            known = self._known.get(place)
            if p is None or not p.requires_grad or (known is not None and known[0]() is p):
                continue
            if known is not None:
                known[1].remove()
            self._known[place] = weakref.ref(p), self._put(place, p)

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in [*self._handles, *(handle for _, handle in self._known.values())]:
            handle.remove()
        self._handles, self._known = [], {}


def is_under_fully_shard(model: nn.Module | None) -> bool:
    """Whether one of its modules is under `fully_shard`."""
    return model is not None and any(map(_is_fsdp2, model.modules()))


def has_other_ranks() -> bool:
    """Whether this process is one of several in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def compares_ranks(argument: str, every: bool | int | None) -> bool:
    """Whether `argument` of `wrap` asks for a comparison between ranks, and there are several."""
    if every is None or every is False:
        return False
    if every is not True and (not isinstance(every, int) or every < 1):
        raise ValueError(f"`{argument}` must be True, False or an integer >= 1, got {every!r}")
    return has_other_ranks()


def num_averaged(model: nn.Module | None, params: Sequence[torch.Tensor]) -> int | None:
    """Number of ranks over which `model` averages gradients; None if nothing says so."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return dist.get_world_size(model.process_group)
    return len(ranks_of(params)) if is_under_fully_shard(model) else None


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
    layouts = shards.layouts_of(params)
    if not layouts:
        return [0]
    ranks: list[int] = max(layouts, key=lambda layout: layout.num_ranks).mesh.mesh.flatten().tolist()
    return ranks


def _is_fsdp2(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _own(module: nn.Module) -> list[nn.Module]:
    """`module`, and the modules in it whose parameters are gathered with its own."""
    return [module, *(m for child in module.children() if not _is_fsdp2(child) for m in _own(child))]
