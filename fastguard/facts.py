"""What model and optimizer say about themselves before and between steps: the arguments of
`TrainingHistory.note_model`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from . import kernels
from .naming import strip_wrappers

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Their decay is not their learning rate times weight_decay: the gradient's own scaling comes after it.
_COUPLED = (torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
            torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop)  # fmt: skip


def of_model(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """What to tell `TrainingHistory.note_model` when the guard is made, before the first step.

    Returns:
        names, names_not_in_optimizer, names_without_gradient, names_with_zero_lr, initialization, dropout; and what
        `of_optimizers` gives.

    Cost: one read of the weight matrices; synchronises on an accelerator.
    """
    named = [(strip_wrappers(name), p) for name, p in model.named_parameters()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(p) for group in groups for p in group["params"]}
    still = {id(p) for group in groups if _number(group.get("lr")) == 0.0 for p in group["params"]}
    return {
        "names": [name for name, _ in named],
        "names_not_in_optimizer": [name for name, p in named if p.requires_grad and id(p) not in held],
        "names_without_gradient": [name for name, p in named if not p.requires_grad],
        "names_with_zero_lr": [name for name, p in named if p.requires_grad and id(p) in still],
        "initialization": _initialization(model, named),
        "dropout": {
            strip_wrappers(name): float(module.p)
            for name, module in model.named_modules()
            if isinstance(module, nn.modules.dropout._DropoutNd)
        },
        **of_optimizers(optimizers),
    }


def of_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """What to tell `note_model` again now and then: schedulers come after the guard, and learning rates change.

    A scheduler leaves `initial_lr` in the groups that it drives.

    Returns:
        has_scheduler, initial_lr (of the first group), decay_per_step (None for optimizers whose decay passes through
        their gradient's scaling).

    Cost: 2 us; reads a learning rate that is a tensor, which synchronises if it is on an accelerator.
    """
    optimizers = list(optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    initial = [_number(group["initial_lr"]) for group in groups if "initial_lr" in group]
    decays = [
        _number(group.get("lr")) * _number(group.get("weight_decay"))
        for optimizer in optimizers
        for group in optimizer.param_groups
        if not _is_coupled(optimizer, group)
    ]
    return {
        "has_scheduler": bool(initial),
        "initial_lr": initial[0] if initial else None,
        "decay_per_step": max(decays) if decays else None,
    }


def _is_coupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    if group.get("decoupled_weight_decay"):
        return False
    return isinstance(optimizer, _COUPLED) and not isinstance(optimizer, torch.optim.AdamW)


def _number(value: Any) -> float:
    return 0.0 if value is None else float(value)


def _initialization(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, tuple[float, float]]:
    """(standard deviation, sqrt(2 / fan_in)) of each weight matrix and kernel; embeddings may be anything."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, _EMBEDDINGS)}
    chosen = [(name, p) for name, p in named if _is_matrix(name, p) and id(p) not in embedded]
    if not chosen:
        return {}
    rows = kernels.tensor_stats([p.detach() for _, p in chosen])
    return {
        name: (row.std, math.sqrt(2.0 * p.shape[0] / p.numel())) for (name, p), row in zip(chosen, rows, strict=True)
    }


def _is_matrix(name: str, p: nn.Parameter) -> bool:
    own = name.rpartition(".")[2]
    return "weight" in own and p.ndim >= 2 and p.numel() >= 16 and p.is_floating_point() and not p.is_meta
