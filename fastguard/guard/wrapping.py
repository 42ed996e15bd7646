"""wrap: makes the guard of an optimizer, or says why it cannot have one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import kernels
from .._text import listed
from ..activations import ActivationMonitor, monitor_for
from ..errors import AlreadyGuardedError
from ..history.model import OBJECTIVES
from ..weights import sampler_settings
from .asked import Asked
from .flight import WHEN_BEHIND
from .guard import GUARD, Guard
from .policies import ClipPolicy, GivenPolicy, GlobalNorm, as_policy
from .ranks import LocalGradients, Parity, Ranks, flat_shards, is_sharded, is_under_fully_shard, ranks_of
from .recovery import Recovery, as_recovery
from .wrappers import innermost, inwards, refuse_sharding_model, unwrapped

_Wrapped = TypeVar("_Wrapped")
_log = logging.getLogger("fastguard")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "objective": (None, *OBJECTIVES),
    "when_behind": WHEN_BEHIND,
    "clip_through": ("scale", "grad_scale"),
    "on_guarded": ("reuse", "raise", "replace"),
    "ranks": ("first", "all"),
}


class _ShownGuard:
    """What `optimizer.guard` is: the optimizer's, or that of the one that it wraps, as accelerate's does; or an error
    that says how to guard it, as for a copy. An attribute of that name that an optimizer has itself goes first."""

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else Guard.of(optimizer)


def clip_policy(max_norm: float | None, clip: ClipPolicy | None) -> ClipPolicy | None:
    """The policy that is asked for by either."""
    if max_norm is not None and clip is not None:
        raise ValueError("`max_norm` and `clip` must not both be given: max_norm=x is short for clip=GlobalNorm(x)")
    if max_norm is not None:
        return GlobalNorm(max_norm)
    return None if clip is None else as_policy(clip)


def check_choices(**given: Any) -> None:
    """Raises ValueError for a setting that none of those known is."""
    for name, value in given.items():
        if value not in _CHOICES[name]:
            known = [choice for choice in _CHOICES[name] if choice is not None]
            either = "None or " if None in _CHOICES[name] else ""
            raise ValueError(f"`{name}` must be {either}one of {known}, got {value!r}")


def check_counts(max_consecutive_skips: Any, check_every: Any) -> None:
    """Raises ValueError for what is no count."""
    if not isinstance(max_consecutive_skips, int) or max_consecutive_skips < 1:
        raise ValueError(f"`max_consecutive_skips` must be an integer >= 1, got {max_consecutive_skips!r}")
    if check_every is not None and (
        isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 0
    ):
        raise ValueError(f"`check_every` must be None or an integer >= 0, got {check_every!r}")


def sinks_of_rank(sinks: list[Any], ranks: str) -> tuple[list[Any], bool]:
    """What of `sinks` this process writes to, and whether it leaves warnings to another."""
    if ranks == "all" or not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        return sinks, False
    if sinks:
        _log.info("rank %d writes to no sink: rank 0 does, and ranks='all' has each write to its own", dist.get_rank())
    return [], True


def as_sinks(sinks: Any) -> list[Any]:
    """`sinks` as a list; raises TypeError for a lone sink, and for the path of a log."""
    if isinstance(sinks, (str, bytes)) or not isinstance(sinks, Iterable):
        raise TypeError(f"`sinks` must be a list of sinks, got {sinks!r}. Pass [sink] for one, [] for none.")
    return list(sinks)


def _check_parted(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ValueError where optimizers share a parameter: its gradient would count twice, and be clipped twice."""
    if len(optimizers) < 2:
        return  # a tenth of a kilobyte a parameter would be needed to find that out
    held = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
    if len(set().union(*held)) < sum(map(len, held)):
        raise ValueError(
            "`optimizer` must be a list of optimizers that share no parameters, whose gradients would count twice in "
            "the norm and be clipped twice. Wrap each by itself."
        )


def met_again(
    given: Sequence[Any],
    inner: Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None,
    asked: Asked,
    sinks: Sequence[Any],
    on_guarded: str,
) -> bool:
    """Whether the optimizers have the guard that they shall have; one that they shall not have is taken away.

    Raises:
        AlreadyGuardedError: they have another, and it is not to be replaced.
    """
    guarded = [o for o in given if any(GUARD in getattr(layer, "__dict__", {}) for layer in inwards(o))]
    if not guarded:
        return False
    guards = {id(guard): guard for guard in map(Guard.of, guarded)}
    guard = next(iter(guards.values()))
    if on_guarded == "replace":
        for guard in guards.values():
            guard.detach()
        return False
    differences = asked.differences(guard.asked)
    if len(guarded) < len(given) or len(guards) > 1 or set(map(id, inner)) != set(map(id, guard.optimizers)):
        differences.insert(0, "optimizers")
    if model is not None and guard.model is not None and unwrapped(model) is not unwrapped(guard.model):
        differences.insert(0, "model")
    if on_guarded == "raise" or differences:
        how = f", with another {listed(differences)}" if on_guarded == "reuse" else ""
        raise AlreadyGuardedError(
            f"this {type(guarded[0]).__name__} is guarded already{how}. Use optimizer.guard, or "
            "optimizer.guard.detach() first; on_guarded='replace' does so."
        )
    if sinks:
        guard.change_sinks(sinks)
    return True


def show(guard: Guard, asked: Asked, inner: Iterable[torch.optim.Optimizer], proxies: Iterable[Any] = ()) -> None:
    """Has the optimizers, and what stands around them, show their guard."""
    guard.asked = asked
    if "guard" not in torch.optim.Optimizer.__dict__:
        torch.optim.Optimizer.guard = _ShownGuard()  # type: ignore[attr-defined]
    for o in inner:
        o.__dict__[GUARD] = guard
    for proxy in proxies:
        if not hasattr(proxy, "guard"):  # most find it in what they wrap, and can be pickled then
            proxy.guard = guard


def _parity(model: torch.nn.Module | None, parity: bool | int | None) -> Parity | None:
    """What compares replicas; None where it was not asked for, or there are none.

    Raises:
        ValueError: no number of steps.
    """
    return Parity(model, None if parity is True else parity) if _is_asked("parity", parity) else None


def _is_asked(argument: str, every: bool | int | None) -> bool:
    """Whether something between ranks was asked for, and there are several."""
    if every is None or every is False:
        return False
    if every is not True and (not isinstance(every, int) or every < 1):
        raise ValueError(f"`{argument}` must be True, False or an integer >= 1, got {every!r}")
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _local(
    model: torch.nn.Module | None, groups: Sequence[Sequence[torch.Tensor]], every: bool | int | None
) -> LocalGradients | None:
    """What reads each rank's own gradients; None where it was not asked for, or there is one rank.

    Raises:
        ValueError: no number of steps.
        TypeError: the model is not what averages gradients.
    """
    if not _is_asked("watch_ranks", every):
        return None
    params = [p for group in groups for p in group]
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        num_ranks = dist.get_world_size(model.process_group)
    elif model is not None and is_under_fully_shard(model):
        num_ranks = len(ranks_of(params))
    else:
        raise TypeError(
            "`watch_ranks` must come with a model under DistributedDataParallel or fully_shard, got "
            f"{'none' if model is None else type(model).__name__}. Pass the wrapped model: wrap(optimizer, ddp_model, "
            "watch_ranks=True)."
        )
    if num_ranks == 1:
        return None
    return LocalGradients(model, params) if every is True or every is None else LocalGradients(model, params, every)


def _copies(
    params: Sequence[torch.Tensor], model: torch.nn.Module | None, group: dist.ProcessGroup | None
) -> list[int] | None:
    """How many ranks of `group` hold each parameter alike: those that DistributedDataParallel averages it over, which
    leaves alone what it was told to, as experts. None where nothing is averaged there."""
    if group is None or not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return None
    ranks = set(dist.get_process_group_ranks(group))
    shared = len(ranks.intersection(dist.get_process_group_ranks(model.process_group)))
    averaged = {id(p) for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore}
    return [shared if id(p) in averaged else 1 for p in params] if shared > 1 else None


def _over_ranks(
    groups: Sequence[Sequence[torch.Tensor]],
    model: torch.nn.Module | None,
    process_group: dist.ProcessGroup | None,
    policy: ClipPolicy | None,
    recovery: Recovery | None,
    weights: Mapping[str, Any] | None,
) -> Ranks | None:
    """The ranks over which the parameters lie; None where all are here, and no DTensors.

    Raises:
        TypeError: for flat parameters without their model, and for what needs whole tensors; for no group, as
            `new_group` gives to processes that are not in it.
    """
    if process_group is not None and not hasattr(process_group, "size"):
        raise TypeError(f"`process_group` must be a process group that this process is in, got {process_group!r}")
    params = [p for group in groups for p in group]
    flat = flat_shards(model, params)
    if flat is None:
        refuse_sharding_model(model)
    has_shards = flat is not None or any(map(is_sharded, params))
    if process_group is None and not has_shards:
        return None
    over = Ranks(params, process_group, flat, _copies(params, model, process_group))
    if over.is_alone and not has_shards:
        return None
    scope = getattr(policy, "scope", "model")
    for argument, is_given, reason in (
        ("recovery", recovery is not None and recovery.recompute, "recompute=True compares the bits of one rank"),
        ("recovery", recovery is not None and flat is not None, "FSDP1 keeps its parameters in storage of its own"),
        ("weights", weights is not None, "rows of a weight lie on several ranks"),
        ("clip", scope in ("unit", "element"), f"{scope}s of a tensor lie on several ranks; clip the norm of tensors"),
    ):
        if is_given:
            raise TypeError(f"`{argument}` must be left out where parameters are sharded: {reason}.")
    return over


def wrap(
    optimizer: _Wrapped,
    model: torch.nn.Module | None = None,
    *,
    max_norm: float | None = None,
    clip: ClipPolicy | None = None,
    skip_nonfinite: bool = True,
    max_consecutive_skips: int = 25,
    sinks: Iterable[Any] = (),
    backend: str = "auto",
    when_behind: str = "wait",
    clip_through: str = "scale",
    activations: bool | str | dict[str, Any] | ActivationMonitor | None = None,
    weights: bool | int | Mapping[str, Any] | None = None,
    check_every: int | None = None,
    objective: str | None = None,
    recovery: bool | Recovery | None = None,
    names: Sequence[str] | Mapping[torch.Tensor, str] | None = None,
    ranks: str = "first",
    on_guarded: str = "reuse",
    process_group: dist.ProcessGroup | None = None,
    parity: bool | int | None = None,
    watch_ranks: bool | int | None = None,
) -> _Wrapped:
    """Guards `optimizer` in place and returns it: the same object, with its `Guard` as `optimizer.guard`.

    From then on `optimizer.step()` reads the gradients once: it records their statistics, clips them, and leaves
    parameters and state untouched if they are not finite. While nothing is clipped or skipped, training is
    bit-identical to training without the guard.

    Args:
        optimizer: any torch.optim.Optimizer, or accelerate's or Lightning's wrapper of one; or a list of optimizers
            that share one norm and one decision (Muon with AdamW), which is then returned. All of them must step
            after each backward pass: the decision is taken when the first of them does. One that holds another and
            does something of its own (Lookahead, SAM) is guarded from outside.
        model: where tensor names come from, and whose buffers a skipped step leaves finite (docs/recovery.md). Without
            it names are the optimizer's own (`named_parameters`) or `group0.param3`.
        max_norm: largest total 2-norm let through; short for `clip=GlobalNorm(max_norm)`.
        clip: a clip policy.
        skip_nonfinite: skip steps whose gradients hold NaN or Inf. Not with LBFGS, which has no step without gradients.
        max_consecutive_skips: so many skipped steps in a row raise NonFiniteGradientsError.
        sinks: where records go: `JsonlSink`, `MemorySink`, objects with `write(record)` and `close()`, functions.
        backend: "auto" or a name from `fastguard.backends()`.
        when_behind: on a GPU, what happens when records of 16 steps are on their way and none has arrived: "wait" for
            the oldest, or "drop" the newest, which the report then counts.
        clip_through: how the gradients of a fused optimizer are clipped. "scale": a pass of its own, which reads and
            writes them once if they are clipped and does nothing if not. "grad_scale": the optimizer divides in its own
            pass, and writes them back once: less traffic where most steps are clipped. On a GPU it then writes them at
            every step. Results agree with "scale" but for the rounding of the factor.
        activations: watch the outputs of the model's modules, sampled, into `StepStats.activations`: True, a regular
            expression of module names, a dict of settings of `ActivationMonitor` (which says at what cost), or one.
        weights: sample weights and updates into `StepStats.weights`: True for every 100th step, a number for every
            so many, or a dict of arguments of `fastguard.weights.WeightSampler`, which says how and at what cost. On
            a GPU a sampled step syncs.
        check_every: steps from one diagnosis to the next; a new finding is logged. None: 50, or more, so that it
            takes at most 1 % of the time. 0: never; `Guard.report` still diagnoses.
        objective: what the rules may take the losses for: "minimise", a loss that is to fall; "game", one that somebody
            else's rising makes fall (a GAN's); "reward", one whose size says little (policy gradients, actor-critic).
            None: not told, so that they find out as far as the losses show.
        recovery: bring the run back when it goes wrong: True, or a `fastguard.Recovery`, which says how and at what
            cost. It raises RecoveryFailedError from `step` where that does not help.
        names: of the parameters, where the model's are not the optimizer's, as with float32 master copies: one for each
            parameter, in the optimizer's order, or a dict from some of the optimizer's parameters to names. They go
            before the model's.
        ranks: which processes of a `torch.distributed` run write to the sinks and log warnings: "first", rank 0 alone,
            or "all". Every one has its guard, its history and its report.
        on_guarded: what to do where `optimizer` has a guard. "reuse": the same settings leave it its guard, whose steps
            go on, with `sinks`, if given, in place of the old ones, as when a notebook's cell is run again; others
            raise. "raise": raise in any case. "replace": detach that guard, and make a new one.
        process_group: of `torch.distributed`, whose ranks hold other tensors of the same model, as pipeline stages and
            experts are: their gradients come into the norm too. What DTensors are on needs no telling; nor does what a
            `model` under DistributedDataParallel averages over ranks of the group, and so counts once.
        parity: compare what ranks are to hold alike, bit for bit: True for gradients at every 20th step and weights at
            every 100th, a number for both at every so many. Found differences are the rule `replicas-differ`. It reads
            the tensors once more at these steps, and reduces 16 bytes a tensor.
        watch_ranks: under DistributedDataParallel or `fully_shard`, read each rank's own gradients before they are
            averaged: a skip then names the rank that brought NaN and its tensor; a rank whose norms are of another size
            is the rule `odd-rank`; and the report has the gradient noise scale. A number: the ranks tell each other
            every so many steps instead of every tenth. All ranks have to ask for it. Bits and communication of the
            training stay as they are; the gradients are read once more (docs/scale.md).

    Raises:
        ValueError: `max_norm` is not > 0; the model has none of the optimizer's parameters; an unknown setting.
        TypeError: no torch.optim.Optimizer, or one that cannot be guarded: with FSDP1's flat parameters and without
            their model, stepping within the backward pass, without Optimizer.__init__; shards with what needs whole
            tensors.
        AlreadyGuardedError: the optimizer has a guard, which `on_guarded` does not allow for.
        BackendUnavailableError: the backend cannot run here.
        NonFiniteGradientsError: from `step`, after `max_consecutive_skips`; parameters are untouched.

    Cost a step: one read of the gradients; one more read and write only if they are clipped. On a GPU two launches, one
    more to clip, and no sync with a fused optimizer; with any other one sync, and none with `skip_nonfinite=False`.
    Once, with a `model`: one read of its weights, to know how they began; on a GPU a sync. On the CPU a hook on the
    model looks at one forward pass in twenty, and a few elements of gradients and weights are compared from step to
    step: some 20 us a step in the first thousand, 5 after (`TrainingHistory.batches`, `grad_cosines`, `model`). A
    model that writes to buffers has them copied at each step: some 12 us for two batch norms, 45 us for fifty.

    >>> import torch, fastguard
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.guard.last.tensors["weight"].norm ** 2
    2.0000000000000004
    """
    given: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("`optimizer` must be an optimizer or a list of at least one, got an empty list")
    check_counts(max_consecutive_skips, check_every)
    check_choices(
        objective=objective, when_behind=when_behind, clip_through=clip_through, on_guarded=on_guarded, ranks=ranks
    )
    sampling, settings = sampler_settings(weights), as_recovery(recovery)
    inner = [innermost(o) for o in given]
    policy = clip_policy(max_norm, clip)
    if len(set(map(id, inner))) != len(inner):
        raise ValueError("`optimizer` must be a list of different optimizers, got one of them twice")
    asked = Asked(
        clip=policy.given if isinstance(policy, GivenPolicy) else policy,  # around which each call puts another
        skip_nonfinite=skip_nonfinite,
        max_consecutive_skips=max_consecutive_skips,
        backend=backend,
        when_behind=when_behind,
        clip_through=clip_through,
        activations=activations,
        weights=weights,
        check_every=check_every,
        objective=objective,
        recovery=settings,
        names=names,
        ranks=ranks,
        process_group=process_group,
        parity=parity,
        watch_ranks=watch_ranks,
    )
    sinks, is_quiet = sinks_of_rank(as_sinks(sinks), ranks)
    if met_again(given, inner, model, asked, sinks, on_guarded):
        return optimizer
    groups = [group["params"] for o in inner for group in o.param_groups]
    _check_parted(inner)
    over = _over_ranks(groups, model, process_group, policy, settings, sampling)
    kernels.require_devices(backend, groups)
    proxies = [o for o, i in zip(given, inner, strict=True) if o is not i]
    monitor = monitor_for(activations, model)
    try:
        guard = Guard(
            inner,
            model,
            proxies=proxies,
            clip=policy,
            skip_nonfinite=skip_nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            sinks=sinks,
            backend=backend,
            when_behind=when_behind,
            clip_through=clip_through,
            activations=monitor,
            weights=sampling,
            check_every=check_every,
            objective=objective,
            recovery=settings,
            names=names,
            is_quiet=is_quiet,
            over=over,
            parity=_parity(model, parity),
            local=_local(model, groups, watch_ranks),
        )
    except BaseException:
        if monitor is not None:
            monitor.detach()
        raise
    show(guard, asked, inner, proxies)
    return optimizer
