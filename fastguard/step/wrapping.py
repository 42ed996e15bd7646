"""wrap: makes the guard of an optimizer, or says why it cannot have one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .. import kernels
from .._text import listed
from ..clip import ClipPolicy
from ..errors import AlreadyGuardedError, explained
from ..kernels.cpu import guard_attribute
from ..names import check_models
from ..observers.activations import ActivationMonitor
from ..observers.observer import unwrapped
from ..ranks import alike_settings, has_other_ranks, ranks_over
from ..recovery import Recovery
from .guard import GUARD, Guard
from .settings import GuardSettings
from .wrappers import innermost, inwards

AnyOptimizer = TypeVar("AnyOptimizer")
_log = logging.getLogger("fastguard")


class _GuardAttribute:
    """`optimizer.guard`: the guard of the optimizer, or of the one it wraps. Raises NotGuardedError without one. An
    attribute of the optimizer's own of that name takes precedence."""

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else Guard.of(optimizer)


def sinks_of_rank(sinks: Any, ranks: str) -> tuple[list[Any], bool]:
    """The sinks that this process writes to, and whether another process logs the warnings."""
    if isinstance(sinks, (str, bytes)) or not isinstance(sinks, Iterable):
        raise TypeError(f"`sinks` must be a list of sinks, got {sinks!r}. Pass [sink] for one, [] for none.")
    sinks = list(sinks)
    if ranks == "all" or not has_other_ranks() or dist.get_rank() == 0:
        return sinks, False
    if sinks:
        _log.info("rank %d writes to no sink: rank 0 does, and ranks='all' has each write to its own", dist.get_rank())
    return [], True


def has_equal_guard(given: list[Any], inner: list[Optimizer], model: Any, settings: GuardSettings, sinks: Any) -> bool:
    """Whether the optimizers already have the guard that is asked for, which then writes to `sinks`. Detaches other
    guards with `on_guarded="replace"`, and raises AlreadyGuardedError without."""
    guarded = [o for o in given if any(GUARD in getattr(layer, "__dict__", {}) for layer in inwards(o))]
    if not guarded:
        return False
    guards = {id(guard): guard for guard in map(Guard.of, guarded)}
    guard = next(iter(guards.values()))
    if settings.on_guarded == "replace":
        for guard in guards.values():
            guard.detach()
        return False
    differences = settings.differences(guard._asked)
    if len(guarded) < len(given) or len(guards) > 1 or set(map(id, inner)) != set(map(id, guard.optimizers)):
        differences.insert(0, "optimizers")
    if model is not None and guard.model is not None and unwrapped(model) is not unwrapped(guard.model):
        differences.insert(0, "model")
    if settings.on_guarded == "raise" or differences:
        how = f", with another {listed(differences)}" if settings.on_guarded == "reuse" else ""
        raise AlreadyGuardedError(
            f"this {type(guarded[0]).__name__} is guarded already{how}. Use optimizer.guard, or "
            "optimizer.guard.detach() first; on_guarded='replace' does so."
        )
    if sinks:
        guard.change_sinks(sinks)
    return True


def show(guard: Guard, proxies: Iterable[Any] = ()) -> None:
    """Makes the guard the `guard` attribute of its optimizers and of their wrappers."""
    if "guard" not in Optimizer.__dict__:
        shown = _GuardAttribute() if guard_attribute is None else guard_attribute(Guard.of)
        Optimizer.guard = shown  # type: ignore[attr-defined]
    for o in guard.optimizers:
        o.__dict__[GUARD] = guard
    for proxy in proxies:
        if not hasattr(proxy, "guard"):  # most find it in what they wrap, and stay picklable
            proxy.guard = guard


@explained
def wrap(
    optimizer: AnyOptimizer,
    model: torch.nn.Module | None = None,
    *,
    max_norm: float | None = None,
    clip: ClipPolicy | None = None,
    sinks: Iterable[Any] = (),
    recovery: bool | Recovery | None = None,
    skip_nonfinite: bool = True,
    max_consecutive_skips: int = 25,
    activations: bool | str | dict[str, Any] | ActivationMonitor | None = None,
    weights: bool | int | Mapping[str, Any] | None = None,
    check_every: int | None = None,
    objective: str | None = None,
    names: Sequence[str] | Mapping[torch.Tensor, str] | None = None,
    on_guarded: str = "reuse",
    backend: str = "auto",
    clip_through: str = "scale",
    ranks: str = "first",
    process_group: dist.ProcessGroup | None = None,
    experiments: Any = None,
) -> AnyOptimizer:
    """Guards `optimizer` in place and returns the same object, with its `Guard` as `optimizer.guard`.

    `optimizer.step()` then reads the gradients once: it records their statistics, clips them, and skips the step if
    they are not finite. While nothing is clipped or skipped, training is bit-identical to unguarded training. Most
    programs need only the first six arguments.

    Args:
        optimizer: a torch.optim.Optimizer, or its wrapper from accelerate or Lightning; or a list of optimizers that
            share one norm and one decision (Muon with AdamW), which is then returned. The first to step decides for
            all, so all of them must step after the backward pass. An optimizer around another that adds a step of its
            own (Lookahead, SAM) is guarded from outside.
        model: names the tensors. Its buffers are kept finite when a step is skipped (docs/recovery.md). Without a
            model, names come from `named_parameters` of the optimizer, or are `group0.param3`.
        max_norm: the largest total 2-norm; short for `clip=GlobalNorm(max_norm)`.
        clip: a clip policy of `fastguard.clip`.
        sinks: where to send the records: `JsonlSink`, `MemorySink`, objects with `write(record)` and `close()`, or
            functions.
        recovery: roll back when training goes wrong: True, or a `fastguard.Recovery`. `step` raises RecoveryFailedError
            if that does not help.

    Other Args:
        skip_nonfinite: skip steps whose gradients contain NaN or Inf. LBFGS cannot skip.
        max_consecutive_skips: number of skipped steps in a row that raises NonFiniteGradientsError.
        activations: sample the outputs of modules into `StepStats.activations`: True, a regular expression of module
            names, a dict of arguments of `ActivationMonitor`, or a monitor.
        weights: sample weights and updates into `StepStats.weights`: True for every 100th step, the number of steps
            between samples, or a dict of arguments of `fastguard.observers.weights.WeightSampler`. On a GPU a sampled
            step syncs.
        check_every: steps between diagnoses; new findings are logged. None: 50, or more to stay below 1 % of the time.
            0: never; `Guard.report` still diagnoses.
        objective: how the rules read the loss. "minimise": it should fall; "game": it depends on an adversary (a
            GAN's); "reward": its size says little (policy gradients, actor-critic). None: infer it from the losses.
        names: names of the parameters, if the model's parameters are not the optimizer's, as with float32 master
            copies: one for each parameter in the optimizer's order, or a dict from parameters to names. They take
            precedence over the model's names.
        on_guarded: what to do if `optimizer` is guarded already. "reuse": keep its guard if the settings are equal, as
            when you run a notebook cell again, and replace the sinks if any are given; otherwise raise. "raise": always
            raise. "replace": detach the guard and make a new one.
        backend: "auto" or a name from `fastguard.backends()`.
        clip_through: how to clip the gradients of a fused optimizer. "scale": in a pass of its own, only when they have
            to be clipped. "grad_scale": the optimizer divides them in its own pass, which saves a read and a write when
            most steps are clipped; on a GPU it then writes them at every step. Results differ by one rounding.
        ranks: which `torch.distributed` ranks write to the sinks and log warnings: "first" (rank 0) or "all". Every
            rank has a guard and a report of its own. If their settings differ, the first step raises RuntimeError.
        process_group: a `torch.distributed` group whose ranks hold other tensors of the same model, such as pipeline
            stages or experts; the norm includes them. Not needed for DTensors. Gradients that
            DistributedDataParallel averages over ranks of the group count once.
        experiments: try causes that are neither sure nor unlikely: True, or `fastguard.experiments.Experiments`. Forked
            copies of the process take the same steps with one thing changed (docs/guide/try.md).

    Raises:
        ValueError: `max_norm` is not > 0; the model has none of the optimizer's parameters; some belong to lazy modules
            and are not initialized; a setting is unknown.
        TypeError: `optimizer` is not a torch.optim.Optimizer, or cannot be guarded; an option needs whole tensors and
            the parameters are sharded.
        AlreadyGuardedError: the optimizer has another guard.
        BackendUnavailableError: the backend cannot run here.
        NonFiniteGradientsError: from `step`, after `max_consecutive_skips`; parameters are untouched.

    Cost a step: one read of the gradients; one more read and write if they are clipped. On a GPU two launches, one
    more to clip, and one sync; none with a fused optimizer or `skip_nonfinite=False`. Once, with a `model`: one read of
    its weights; on a GPU a sync. On the CPU, looks at forward passes and gradients: some 20 us a step in the first
    thousand, 5 after. Buffers that the model writes to are copied: 2 us a step for two batch norms, 8 us for fifty.

    >>> import torch, fastguard
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.guard.last.tensors["weight"].norm ** 2
    2.0000000000000004
    """
    arguments = locals()
    given: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("`optimizer` must be an optimizer or a list of at least one, got an empty list")
    check_models(given, model)
    settings = GuardSettings.of(arguments)
    inner = [innermost(o) for o in given]
    if len(set(map(id, inner))) != len(inner):
        raise ValueError("`optimizer` must be a list of different optimizers, got one of them twice")
    sinks, is_quiet = sinks_of_rank(sinks, ranks)
    if has_equal_guard(given, inner, model, settings, sinks):
        return optimizer
    groups = [group["params"] for o in inner for group in o.param_groups]
    held = [{id(p) for group in o.param_groups for p in group["params"]} for o in inner if len(inner) > 1]
    if len(set().union(*held)) < sum(map(len, held)):
        raise ValueError(
            "`optimizer` must be a list of optimizers that share no parameters, whose gradients would count twice in "
            "the norm and be clipped twice. Wrap each by itself."
        )
    over = ranks_over(groups, model, settings)
    kernels.require_devices(backend, groups)
    proxies = [o for o, i in zip(given, inner, strict=True) if o is not i]
    told: dict[str, Any] = {"sinks": sinks, "is_quiet": is_quiet, "proxies": proxies, "names": names}
    with contextlib.ExitStack() as made:
        guard = Guard(inner, model, settings, made=made, over=over, **told)
        guard._made = made.pop_all()
    params, run = [p for group in groups for p in group], guard._run
    with run.failures.kept("comparison of the ranks' settings", "They are not compared."):
        has_collectives = settings.recovery is not None
        run.alike = alike_settings(settings.of_all_ranks(), model, params, over, has_collectives)
        run.is_alike = run.alike is None
    show(guard, proxies)
    if experiments:
        from ..experiments.beside import begin  # the one arrow to the right: nothing else needs it

        begin(guard, experiments, wrap)
    return optimizer
