"""wrap_backward: makes the guard of optimizers that step within the backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import kernels
from ..clip import ClipPolicy
from ..observers.activations import ActivationMonitor
from .guard import Guard
from .in_backward import BackwardGuard
from .settings import GuardSettings
from .wrappers import innermost, refuse_sharding_model, refuse_shards
from .wrapping import build, has_equal_guard, show, sinks_of_rank


def wrap_backward(
    model: torch.nn.Module,
    optimizers: Mapping[Any, Any] | torch.optim.Optimizer,
    *,
    hooks: bool = True,
    max_norm: float | None = None,
    clip: ClipPolicy | None = None,
    skip_nonfinite: bool = True,
    max_consecutive_skips: int = 25,
    sinks: Iterable[Any] = (),
    backend: str = "auto",
    activations: bool | str | dict[str, Any] | ActivationMonitor | None = None,
    check_every: int | None = None,
    objective: str | None = None,
    ranks: str = "first",
    on_guarded: str = "reuse",
) -> Guard:
    """Guards optimizers that step within the backward pass, tensor by tensor, and returns their one `Guard`.

    Each parameter is stepped and its gradient freed as soon as the gradient is there, so that only a few gradients are
    in memory at a time: torch's recipe of one optimizer for each parameter in `register_post_accumulate_grad_hook`.
    This function registers the hooks. One backward pass makes one record of all the tensors that it stepped.

    The total norm is not known when the first parameter steps. A policy of all gradients together or of groups, such
    as `max_norm`, uses the larger of the norm of the step before and that of the gradients so far. A policy of tensors
    (`AdaGC`), units or elements is exact, and so is the recorded norm. A tensor whose gradient contains NaN or Inf is
    skipped; tensors stepped before it stay stepped, and the record says `skipped`.

    Args:
        model: names the tensors.
        optimizers: a dict from each parameter, or its name in the model, to an optimizer of that parameter alone; or
            optimi's optimizer with `gradient_release=True`.
        hooks: register the hooks that step. False: your own hooks, or optimi's `prepare_for_gradient_release`, call
            `step`. If there are both, each gradient is stepped once.
        max_norm, clip, skip_nonfinite, max_consecutive_skips, sinks, backend, activations, check_every, objective,
            ranks, on_guarded: as in `fastguard.wrap`. `Guard.detach` removes the hooks, too.

    Raises:
        ValueError: an optimizer has other parameters than its key, with `hooks`; or as from `fastguard.wrap`.
        TypeError: an optimizer is not a torch.optim.Optimizer, or is sharded.
        AlreadyGuardedError: an optimizer has another guard.
        NonFiniteGradientsError: from `backward`, after `max_consecutive_skips` steps in which a tensor was skipped.

    A step is a backward pass in which `step` was called. If the last tensors come within a reentrant checkpoint's own
    pass, or `step` is called after the pass, it ends when you use the guard or a tensor comes again. Parameters without
    a gradient are missing from the record. Gradients are freed, so micro-batches cannot be accumulated; with
    `hooks=False`, let your hooks step at the last one. Parameters that are frozen now get no hook. As in torch's
    recipe, hooks keep model and optimizers alive until `detach`. GradScaler, closures and recovery are not supported,
    and gradients are not compared between steps.

    Cost: one read of each gradient as it comes; one more read and write if it is clipped. Some 25 us a tensor on the
    host. On a GPU one sync a tensor.

    >>> import torch, fastguard
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    >>> guard = fastguard.wrap_backward(model, optimizers, max_norm=1.0)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> guard.last.tensors.names, guard.last.norm ** 2, model.weight.grad is None
    (('weight', 'bias'), 2.9999999999999996, True)
    """
    settings = GuardSettings.of(locals())
    pairs = _pairs(model, optimizers, hooks)
    given = list({id(optimizer): optimizer for _, optimizer in pairs}.values())
    sinks, is_quiet = sinks_of_rank(sinks, ranks)
    if has_equal_guard(given, given, model, settings, sinks):
        return Guard.of(given[0])
    refuse_sharding_model(model)
    groups = [group["params"] for o in given for group in o.param_groups]
    refuse_shards(groups)
    kernels.require_devices(backend, groups)
    guard = build(BackwardGuard, given, model, settings, sinks=sinks, is_quiet=is_quiet)
    if hooks:
        by_parameter = not isinstance(optimizers, Mapping)
        guard.step_from([(p, o) for p, o in pairs if p.requires_grad], by_parameter=by_parameter)
    show(guard)
    return guard


def _pairs(model: torch.nn.Module, optimizers: Any, hooks: bool) -> list[tuple[torch.Tensor, torch.optim.Optimizer]]:
    """Each parameter with its optimizer, in the model's order."""
    named = dict(model.named_parameters())
    if not isinstance(optimizers, Mapping):
        optimizer = innermost(optimizers, in_backward=True)
        if "param" not in inspect.signature(optimizer.step).parameters:
            raise ValueError(
                "`optimizers` must map each parameter to an optimizer of it alone, got one "
                f"{type(optimizer).__name__}, which steps all of its parameters at once. Write "
                "{p: " + type(optimizer).__name__ + "([p], ...) for p in model.parameters()}."
            )
        return [(p, optimizer) for group in optimizer.param_groups for p in group["params"]]
    if not optimizers:
        raise ValueError("`optimizers` must map at least one parameter to its optimizer, got an empty dict")
    found = {}
    for key, given in optimizers.items():
        if isinstance(key, str) and key not in named:
            raise ValueError(f"`optimizers` must map the model's parameters, got {key!r}, which it does not have")
        p, optimizer = named[key] if isinstance(key, str) else key, innermost(given, in_backward=True)
        held = [each for group in optimizer.param_groups for each in group["params"]]
        if hooks and (len(held) != 1 or held[0] is not p):
            name = next((name for name, each in named.items() if each is p), "a parameter")
            raise ValueError(
                f"`optimizers` must map each parameter to an optimizer of it alone, got one of {len(held)} for {name!r}"
            )
        found[id(p)] = p, optimizer
    order = {id(p): i for i, p in enumerate(named.values())}
    return sorted(found.values(), key=lambda pair: order.get(id(pair[0]), len(order)))
