"""Experiments one after the other, on copies of model and optimizer: where a process cannot be forked, as on a GPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..recovery.snapshots import load_random_state, random_state
from ..step import Guard, wrap
from .arms import Arm
from .context import Context


def run_on_copies(
    guard: Guard,
    arms: Sequence[Arm],
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    batches: Iterable[Any],
    num_steps: int,
) -> dict[str, list[float]]:
    """The losses of `num_steps` steps as they are, under the name "", and with each arm, by its name.

    Each run starts from copies of the model and its optimizers as they are now, with the same random state. Weights,
    optimizer state and random state of the training stay as they are. Syncs after each run.

    Cost: memory for one copy of the weights and the optimizer state, beside the activations of a step.
    """
    batches = list(itertools.islice(batches, num_steps))
    before = random_state()
    found = {}
    try:
        for arm in (None, *arms):
            load_random_state(before)
            model, optimizers = _copies(guard)
            wrap(optimizers, model, clip=copy.deepcopy(guard.clip), skip_nonfinite=guard.skip_nonfinite, check_every=0)
            own = Guard.of(optimizers[0])
            try:
                if arm is not None:
                    step = guard.history.num_steps
                    arm.apply(Context(optimizers, model, own, step, num_steps, known=guard.history))
                found["" if arm is None else arm.name] = _train(model, optimizers, loss_fn, batches)
            finally:
                own.detach()
    finally:
        load_random_state(before)
    return found


def _copies(guard: Guard) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    """Copies of model and optimizers that share their parameters as these do."""
    if guard.model is None:
        raise ValueError("`experiments` with `loss_fn` needs the model: wrap(optimizer, model, ...)")
    copied: dict[int, Any] = {}
    model = copy.deepcopy(guard.model, copied)
    return model, [copy.deepcopy(one, copied) for one in guard.optimizers]


def _train(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor],
    batches: Sequence[Any],
) -> list[float]:
    losses = []
    for batch in batches:
        for one in optimizers:
            one.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        for one in optimizers:
            one.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist() if losses else []
