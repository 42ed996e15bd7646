"""wrap_backward: makes the guard of optimizers that step within the backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import kernels
from ..activations import ActivationMonitor, monitor_for
from .asked import Asked
from .guard import Guard
from .in_backward import BackwardGuard
from .policies import ClipPolicy, GivenPolicy
from .wrappers import innermost, refuse_sharding_model, refuse_shards
from .wrapping import as_sinks, check_choices, check_counts, clip_policy, met_again, show, sinks_of_rank


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

    Each parameter is stepped as soon as its gradient is there, and the gradient let go, so that never more than a few
    gradients are in memory: torch's recipe of an optimizer for each parameter in
    `register_post_accumulate_grad_hook`. The hooks are set here. One backward pass makes one record, of all tensors
    that it stepped.

    Nobody knows the norm of all gradients when the first is stepped. So `max_norm`, and any policy of all gradients
    together or of groups, goes by the larger of two: the norm of the step before, and that of the gradients that have
    come so far in this one. A policy of tensors (`AdaGC`), units or elements is exact, as is the recorded norm.
    A tensor whose gradient holds NaN or Inf is left out, its parameter and state bit-identical; those that were stepped
    before it stay stepped, and the record says `skipped`.

    Args:
        model: where names come from.
        optimizers: a dict from each parameter, or its name in the model, to an optimizer of it alone; or optimi's
            optimizer with `gradient_release=True`.
        hooks: set the hooks that step. False: your own call `step`, or optimi's `prepare_for_gradient_release` has set
            them. Where both are there, each gradient is stepped once.
        max_norm, clip, skip_nonfinite, max_consecutive_skips, sinks, backend, activations, check_every, objective,
            ranks, on_guarded: as in `fastguard.wrap`. `Guard.detach` takes the hooks away too.

    Raises:
        ValueError: an optimizer holds other parameters than its key, with `hooks`; or as from `fastguard.wrap`.
        TypeError: what is no optimizer, or is sharded.
        AlreadyGuardedError: an optimizer has a guard, which `on_guarded` does not allow for.
        NonFiniteGradientsError: from `backward`, after `max_consecutive_skips` steps in which something was left out.

    A step is a backward pass in which a `step` was called. It ends with the pass; where the last tensors come within a
    reentrant checkpoint's own pass, or `step` is called after the pass, when the guard is looked at or a tensor comes
    again. Parameters without a gradient are missing from the record. Micro-batches cannot be accumulated, as the
    gradients are gone: with `hooks=False`, have your own hooks step at the last of them. A parameter that is frozen
    now gets no hook. As with torch's recipe, hooks keep model and optimizers alive until `detach`. No GradScaler, no
    closures, no recovery; gradients are compared with those of no other step.

    Cost: one read of each gradient as it comes; one more read and write if it is clipped. Some 25 us a tensor on the
    host. On a GPU each tensor waits for its figures: one sync a tensor.

    >>> import torch, fastguard
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    >>> guard = fastguard.wrap_backward(model, optimizers, max_norm=1.0)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> guard.last.tensors.names, guard.last.norm ** 2, model.weight.grad is None
    (('weight', 'bias'), 2.9999999999999996, True)
    """
    check_counts(max_consecutive_skips, check_every)
    check_choices(objective=objective, on_guarded=on_guarded, ranks=ranks)
    pairs = _pairs(model, optimizers, hooks)
    given = list({id(optimizer): optimizer for _, optimizer in pairs}.values())
    by_parameter = not isinstance(optimizers, Mapping)
    policy = clip_policy(max_norm, clip)
    sinks, is_quiet = sinks_of_rank(as_sinks(sinks), ranks)
    asked = Asked(
        clip=policy.given if isinstance(policy, GivenPolicy) else policy,
        skip_nonfinite=skip_nonfinite,
        max_consecutive_skips=max_consecutive_skips,
        backend=backend,
        activations=activations,
        check_every=check_every,
        objective=objective,
        ranks=ranks,
        hooks=hooks,
    )
    if met_again(given, given, model, asked, sinks, on_guarded):
        return Guard.of(given[0])
    refuse_sharding_model(model)
    groups = [group["params"] for o in given for group in o.param_groups]
    refuse_shards(groups)
    kernels.require_devices(backend, groups)
    monitor = monitor_for(activations, model)
    try:
        guard = BackwardGuard(
            given,
            model,
            proxies=(),
            clip=policy,
            skip_nonfinite=skip_nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            sinks=sinks,
            backend=backend,
            when_behind="wait",
            clip_through="scale",
            activations=monitor,
            check_every=check_every,
            objective=objective,
            is_quiet=is_quiet,
        )
    except BaseException:
        if monitor is not None:
            monitor.detach()
        raise
    if hooks:
        guard.step_from([(p, o) for p, o in pairs if p.requires_grad], by_parameter=by_parameter)
    show(guard, asked, given)
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
