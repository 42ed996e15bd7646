"""FSDP2: a rank's own gradients, of whole parameters, as they are before they are reduced and cut."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..observers.observer import ModuleHook
from . import shards

_Put = Callable[[int, torch.Tensor], Any]


class Unsharded:
    """Puts hooks on the whole parameters that a model under `fully_shard` computes with, when it first has them.

    `fully_shard` gathers a module's parameters ahead of its forward pass. Their hooks run before it reduces their
    gradients. They are usually the same tensors at each step; new ones get hooks in the next pass.

    Args:
        model: with modules under `fully_shard`, before a forward pass.
        params: the sharded ones.
        put: puts a hook on the whole parameter of a place among `params`, and returns its handle.

    Attributes:
        places: of the parameters that belong to such modules.

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
        """A module is called, and has what it needs: puts hooks on whole parameters that have none."""
        for module, name, place in owned:
            p = module._parameters.get(name)
            known = self._known.get(place)
            if p is None or not p.requires_grad or (known is not None and known[0]() is p):
                continue
            if known is not None:
                known[1].remove()
            self._known[place] = weakref.ref(p), self._put(place, p)

    def remove(self) -> None:
        """Takes all hooks away."""
        for handle in [*self._handles, *(handle for _, handle in self._known.values())]:
            handle.remove()
        self._handles, self._known = [], {}


def is_under_fully_shard(model: nn.Module | None) -> bool:
    """Whether a module of it is."""
    return model is not None and any(map(_is_fsdp2, model.modules()))


def ranks_of(params: Sequence[torch.Tensor]) -> list[int]:
    """All those that hold parts of some of `params`."""
    layouts = shards.layouts_of(params)
    if not layouts:
        return [0]
    ranks: list[int] = max(layouts, key=lambda layout: layout.num_ranks).mesh.mesh.flatten().tolist()
    return ranks


def _is_fsdp2(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _own(module: nn.Module) -> list[nn.Module]:
    """`module` and those in it whose parameters are gathered with its own."""
    return [module, *(m for child in module.children() if not _is_fsdp2(child) for m in _own(child))]
