"""Finds the model that an optimizer trains, among all modules that are alive."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..step.wrappers import unwrapped


def find_model(params: Iterable[torch.Tensor]) -> tuple[nn.Module | None, dict[torch.Tensor, str]]:
    """The module that contains most elements of `params`, and names for those that belong to other models.

    It is one that no other module contains. A LightningModule, or any module without a `forward`, only holds the model:
    of its children the one with the same parameters is taken, down to the first whose `forward` is called.

    Cost: one look at every object that Python's garbage collector knows, some 0.1 s for a million.
    """
    wanted = {id(p): p for p in params}
    kinds = _subclasses(nn.Module)
    # `type` and not `isinstance`: `__class__` of a lazy proxy would be computed.
    modules = [m for m in gc.get_objects() if type(m) in kinds and "_modules" in m.__dict__]
    roots = sorted(_roots(modules, wanted), key=lambda root: (-_num_elements(root, wanted), _num_parameters(root)))
    if not roots:
        return None, {}
    names: dict[torch.Tensor, str] = {}
    own = {id(p) for p in roots[0].parameters()}
    for number, root in enumerate(roots[1:], 2):
        others = ((name, p) for name, p in root.named_parameters() if id(p) in wanted and id(p) not in own)
        names.update((p, f"{type(unwrapped(root)).__name__}{number}.{name}") for name, p in others if p not in names)
    return _called(roots[0], wanted), names


def _subclasses(kind: type) -> set[type]:
    found: set[type] = {kind}
    waiting = [kind]
    while waiting:
        new: set[type] = set(type.__subclasses__(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _roots(modules: list[nn.Module], wanted: dict[int, torch.Tensor]) -> Iterator[nn.Module]:
    """The outermost of the modules that contain a parameter in `wanted`."""
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    waiting = [m for m in modules if any(id(p) in wanted for p in m.__dict__.get("_parameters", {}).values())]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if id(module) not in parents:
            yield module
        waiting += parents.get(id(module), ())


def _called(root: nn.Module, wanted: dict[int, torch.Tensor]) -> nn.Module:
    inner = unwrapped(root)
    is_holder = False
    while hasattr(inner, "training_step") or type(inner).forward is nn.Module.forward:
        all_of_it = _num_elements(inner, wanted)
        child = next((m for m in inner.children() if _num_elements(m, wanted) == all_of_it), None)
        if child is None:
            break
        inner, is_holder = child, True
    return inner if is_holder else root


def _num_elements(module: nn.Module, wanted: dict[int, torch.Tensor]) -> int:
    return sum(p.numel() for p in module.parameters() if id(p) in wanted)


def _num_parameters(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())
