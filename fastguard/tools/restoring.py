"""Training steps that are undone afterwards, and that the guard does not see."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from .. import kernels
from ..records.columns import norm_of, norm_parts
from ..recovery.snapshots import load_random_state, random_state
from ..step import Guard
from ..step.backup import Backup
from ..step.clipping import HostClipping
from ..step.guard import GUARD


@contextlib.contextmanager
def randomness_restored(loader: Any) -> Iterator[None]:
    """Restores the random generators of torch, Python and NumPy, and those of a DataLoader, afterwards."""
    holders = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    own = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
    state = random_state()
    try:
        yield
    finally:
        load_random_state(state)
        for generator, before in own:
            generator.set_state(before)


@contextlib.contextmanager
def everything_restored(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any, more: Any = None
) -> Iterator[None]:
    """Restores model, optimizer, `more` (if it is a module) and random generators afterwards, whatever happened.

    Of modules that is: parameters, buffers, gradients, modes, and Python attributes that are plain data. Autograd does
    not notice, so a graph that was made before can still be differentiated.
    """
    modules = [*model.modules(), *(more.modules() if isinstance(more, torch.nn.Module) else ())]
    own = [p for module in modules for p in module.parameters(recurse=False)]
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    backup = Backup(optimizer, more=(*own, *buffers, *map(vars, modules)))
    parameters = dict.fromkeys([*own, *(p for group in optimizer.param_groups for p in group["params"])])
    before = [(p, p.grad, p.requires_grad) for p in parameters]
    counted = tuple(t for t in (*parameters, *buffers) if not t.is_inference())
    for p in own:
        p.grad = None  # an accumulation under way is left alone
    try:
        with _unsafe_preserve_version_counter(counted), randomness_restored(loader):
            yield
    finally:
        backup.restore()
        for p, gradient, requires_grad in before:
            p.grad = gradient
            p.requires_grad_(requires_grad)


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Sets the learning rate of a group; a tensor is written in place, because compiled steps hold it."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


@contextlib.contextmanager
def without_guard(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Pauses the guard. Yields a function that clips the gradients as the guard would."""
    guard = getattr(optimizer, "__dict__", {}).get(GUARD)
    if not isinstance(guard, Guard):
        yield lambda: None
        return
    policy = copy.deepcopy(guard._run.clip)

    def clip() -> None:
        groups = [group["params"] for group in optimizer.param_groups]
        gradients, _, _ = kernels.collect_gradients(groups)
        if policy is None or not gradients:
            return
        table, _, positions, _ = kernels.gradient_stats(groups, guard.backend, 1.0)
        norm = norm_of(*norm_parts(kernels.fold_rows(table)))
        clipping = HostClipping(policy, norm, table, positions)
        if clipping.shrink(groups, guard._run.names_now(), 1.0) is None:
            factors = clipping.ruling.factors or [clipping.ruling.coefficient] * len(gradients)
            for gradient, factor in zip(gradients, factors, strict=True):
                kernels.scale_([gradient], factor, backend=guard.backend)

    with guard.paused():
        yield clip
