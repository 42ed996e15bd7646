"""All that a guarded run goes on from, as plain data, and a run that goes on from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import kernels
from ..recovery.randomness import load_random_state, random_state
from ..step import Guard


def state_of(guard: Guard, model: torch.nn.Module | None, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Of the model, the optimizers, the guard, further parts and the random generators."""
    return {
        "model": None if model is None else model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in guard.optimizers],
        "guard": guard.state_dict(),
        "state": {n: p.get_state() if isinstance(p, torch.Generator) else p.state_dict() for n, p in parts.items()},
        "random": random_state(),
    }


def load_state(state: dict[str, Any], guard: Guard, model: torch.nn.Module | None, parts: Mapping[str, Any]) -> None:
    """Loads what `state_of` returned into all of them, or, if one raises, into none. Float32 state stays float32."""
    before = copy.deepcopy(state_of(guard, model, parts))
    try:
        _load_parts(state, guard, model, parts)
        guard.load_state_dict(state["guard"])  # which itself loads all or nothing
    except BaseException:
        _load_parts(before, guard, model, parts)
        raise


def _load_parts(state: dict[str, Any], guard: Guard, model: torch.nn.Module | None, parts: Mapping[str, Any]) -> None:
    if model is not None:
        model.load_state_dict(state["model"])
    for optimizer, saved in zip(guard.optimizers, state["optimizers"], strict=True):
        _load_optimizer(optimizer, saved)
    for name, part in parts.items():
        load = part.set_state if isinstance(part, torch.Generator) else part.load_state_dict
        load(state["state"][name])
    load_random_state(state["random"])


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads it, and puts back what torch has cast to the dtype of its parameter."""
    optimizer.load_state_dict(saved)
    numbers = [i for group in saved.get("param_groups", ()) for i in group.get("params", ())]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, parameters):
        state = optimizer.state.get(p, {})
        for key, value in saved.get("state", {}).get(number, {}).items():
            now = state.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.dtype != now.dtype:
                state[key] = value.to(now.device)


def not_finite(model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Names of parameters with NaN or Inf, and of buffers and optimizer state with NaN: a mask may hold Inf."""
    parameters = dict(model.named_parameters()) if model is not None else {}
    others = dict(model.named_buffers()) if model is not None else {}
    names = {id(p): name for name, p in parameters.items()}
    for k, optimizer in enumerate(optimizers):
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = names.setdefault(id(p), f"optimizer{k}.param{i}")
            parameters[name] = p
            state = optimizer.state[p].items() if p in optimizer.state else ()
            others |= {f"{name}.{key}": v for key, v in state if isinstance(v, torch.Tensor)}
    tensors = {n: t.detach() for n, t in (others | parameters).items() if t.is_floating_point() or t.is_complex()}
    rows = kernels.tensor_stats(list(tensors.values()), names=list(tensors))
    return [name for name, row in zip(tensors, rows) if row.num_nans or (row.num_infs and name in parameters)]
