"""Optimizers that step within the backward pass: each tensor is judged as it comes, and all make one record."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer

from .. import kernels
from ..clip import CheckedPolicy, ClipPolicy, Limits, limits_of, trigger_of
from ..clip.limits import SHRINKS, factor_of, row_norms
from ..observers.activations import ActivationMonitor
from ..ranks.shards import refuse_sharding_model, refuse_shards
from ..records.columns import ROW_BYTES, norm_of, norm_parts
from .clipping import shrink_each
from .guard import Guard
from .ring import JudgedStep
from .run import Member, Run
from .scalars import learning_rate
from .settings import GuardSettings
from .skip import SkippedCall, SkipStrategy, Undo
from .wrappers import callers, innermost
from .wrapping import has_equal_guard, show, sinks_of_rank

_NESTING = torch.autograd.function.BackwardCFunction.apply.__code__


def _norm(table: bytearray) -> float:
    return norm_of(*norm_parts(kernels.fold_rows(table)))


class _Pass:
    """What has been stepped in one backward pass. A place is the index of a parameter."""

    def __init__(self, run: Run) -> None:
        self.places = {id(p): i for i, p in enumerate(run.params())}
        run.names(hash(tuple(self.places)))  # before the policy is asked: it may group other parameters
        self.rows: dict[int, bytes] = {}  # statistics of the gradients that have come, by place
        self.judged: dict[int, weakref.ref[torch.Tensor]] = {}  # these gradients, by id of the parameter
        self.factors: dict[int, float] = {}  # of those that were clipped, by place
        self.skipped: set[int] = set()  # places
        self.over: set[int] = set()  # groups above their triggers
        self.norms: defaultdict[str | None, float] = defaultdict(float)  # so far, of all, under None, and of groups
        self.loss, self.seconds = run.ring.loss, 0.0  # the newest when the pass began; spent on judging
        self.limits = limits_of(run.clip)


class InBackward:
    """The steps of all optimizers in one backward pass, as one step. It begins with the first gradient and ends with
    the backward pass. If the optimizers step outside of one, or the last of them in a reentrant checkpoint's own, it
    ends when the guard is used or a gradient comes again."""

    def __init__(self, guard: Guard) -> None:
        self._run, self._judge, self._ledger, self._observed = guard._run, guard._judge, guard._ledger, guard._observed
        self._lock = threading.RLock()  # devices have threads of their own in a backward pass
        self._task = -1
        self._pass: _Pass | None = None
        self.newest: defaultdict[str | None, float] = defaultdict(float)  # norms of the step before

    def has_come(self, p: torch.Tensor) -> bool:
        """Whether a gradient of `p` has been judged in this step."""
        return self._pass is not None and self._pass.places.get(id(p)) in self._pass.rows

    def step(self, optimizer: Any, arguments: Mapping[str, Any], p: torch.Tensor) -> None:
        """Has a gradient stepped as soon as it is there, and lets go of it, unless another hook has."""
        judged = None if self._pass is None else self._pass.judged.get(id(p))
        if p.grad is not None and (judged is None or judged() is not p.grad):
            optimizer.step(**arguments)
            p.grad = None

    def judge(self, params: Sequence[torch.Tensor]) -> bool:
        """Measures and clips the gradients of `params`, which are about to be stepped. Returns whether to skip the step
        of their optimizer."""
        with self._lock:
            started = time.perf_counter()
            if any(self.has_come(p) for p in params):
                self.end()
            run = self._run
            if self._pass is None:
                self._ledger.open()
                if run.step >= run.wakes_at:
                    self._observed.observers.begin_step(run.step)
                self._pass = _Pass(run)
            current = self._pass
            task = torch._C._current_graph_task_id()
            if task not in (-1, self._task):
                self._task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_has_ended)
            places = [current.places[id(p)] for p in params]
            table, _ = kernels.run_stats([p.grad for p in params], run.backend)
            current.rows.update((place, bytes(table[i * ROW_BYTES :][:ROW_BYTES])) for i, place in enumerate(places))
            current.judged.update((id(p), weakref.ref(p.grad)) for p in params if p.grad is not None)
            is_finite = math.isfinite(_norm(table))
            is_skipped = not self._clip(current, params, places, table) if is_finite else run.skip_nonfinite
            if is_skipped:
                current.skipped.update(places)
            current.seconds += time.perf_counter() - started
            return is_skipped

    def _backward_has_ended(self) -> None:
        # Unless it is part of another pass, as where a reentrant checkpoint runs one of its own.
        if not any(frame.f_code is _NESTING for frame in callers()):
            self.end()

    def _clip(self, current: _Pass, params: Sequence[torch.Tensor], places: Sequence[int], table: bytearray) -> bool:
        """Clips finite gradients as the policy wants; False if it wants their step skipped."""
        run, clip, norms = self._run, self._run.clip, row_norms(table)
        if clip is None:
            return True
        if clip.scope in SHRINKS:
            names = [run.known_names[place] for place in places]
            over, left = shrink_each(cast(CheckedPolicy, clip), names, params, table, 1.0)
            for i in over:
                current.factors[places[i]] = left[i] / norms[i] if norms[i] else 1.0
                current.over.add(places[i])
            return True
        limits = current.limits or Limits()
        factors = [self._factor(current, limits, place, norm) for place, norm in zip(places, norms, strict=True)]
        if 0.0 in factors:
            return False
        for place, p, factor in zip(places, params, factors, strict=True):
            if factor != 1.0:
                current.factors[place] = factor
                kernels.run_scale([p.grad], factor, run.backend)
        return True

    def _factor(self, current: _Pass, limits: Limits, place: int, norm: float) -> float:
        """The factor for one gradient; 0.0 skips its step."""
        estimate, clip = self._estimate(current, None, norm), cast(ClipPolicy, self._run.clip)
        applied = [(estimate, limits.trigger, limits.target)]
        group = -1 if limits.norms is None else place if limits.groups is None else limits.groups[place]
        if group >= 0:
            estimate = norm if limits.groups is None else self._estimate(current, clip.names[group], norm)
            if limits.triggers is not None and limits.targets is not None:
                applied.append((estimate, limits.triggers[group], limits.targets[group]))
                if factor_of(*applied[-1]) != 1.0:
                    current.over.add(group)
        if any(size > trigger and target == 0.0 for size, trigger, target in applied):
            return 0.0
        return math.prod(factor_of(*each) for each in applied)

    def _estimate(self, current: _Pass, group: str | None, norm: float) -> float:
        """The norm of gradients of which some are still to come: that of those that have come, or that of the step
        before if it is larger."""
        current.norms[group] = so_far = math.hypot(current.norms[group], norm)
        return max(self.newest[group], so_far)

    def end(self) -> None:
        """Ends the step and records it. Raises NonFiniteGradientsError after too many steps with skips in a row."""
        with self._lock:
            current, self._pass, self._task = self._pass, None, -1
            if current is None:
                return
            started = time.perf_counter()
            run, ring = self._run, self._run.ring
            places = sorted(current.rows)
            table = bytearray(b"".join(current.rows[place] for place in places))
            positions = None if len(places) == len(current.places) else places
            judged = JudgedStep(run.step, table, positions, run.known_names, _norm(table))
            judged.lr = learning_rate(run.optimizers()[0])
            judged.skipped, judged.over = bool(current.skipped), tuple(sorted(current.over))
            judged.trigger = trigger_of(run.clip, current.limits)
            limits, clip, factors = current.limits, run.clip, current.factors
            if factors and judged.norm and math.isfinite(judged.norm):
                pairs = zip(places, row_norms(table), strict=True)
                left = [(factors.get(place, 1.0) * (size / judged.norm)) ** 2 for place, size in pairs]
                judged.clip_coef = min(1.0, math.sqrt(math.fsum(left)))
            if math.isfinite(judged.norm):
                self.newest[None] = judged.norm
                if limits is not None:
                    limits.apply(judged.norm, row_norms(table), positions)  # writes the norms of groups
                    if limits.groups is not None and limits.norms is not None:
                        named = zip(cast(ClipPolicy, clip).names, limits.norms, strict=True)
                        self.newest.update((name, size) for name, size in named if size >= 0.0)
            if isinstance(clip, CheckedPolicy):
                clip.observe_step(judged.norm, current.loss)
            self._judge.enter(judged)
            if run.has_more_to_do or run.marks_ends or run.step > run.ends_at:
                run.has_more_to_do = self._observed.end_step()
            ring.add_overhead(current.seconds + time.perf_counter() - started)
            self._ledger.raise_due()


class StepHooks:
    """The hooks on one optimizer that steps within the backward pass, which owns them."""

    def __init__(self, member: Member, together: InBackward) -> None:
        optimizer = member.optimizer
        self._member, self._together = member, together
        self._undo: Undo | None = None
        self._skip_strategy = SkipStrategy(optimizer, can_skip=True)
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._handles = [before(self._before), after(self._give_back)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._give_back()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._give_back()  # of a step that raised
        if self._member.is_paused:
            return None
        only = kwargs.get("param")  # optimi's gradient release
        every = [p for group in optimizer.param_groups for p in group["params"]] if only is None else [only]
        params = [p for p in every if p.grad is not None]
        # Without gradients two hooks step it, perhaps, and one was first.
        if not (self._together.judge(params) if params else any(map(self._together.has_come, every))):
            return None
        interceptor = self._skip_strategy.interceptor(optimizer)
        if interceptor is not None:
            return interceptor.intercept(SkippedCall(optimizer), args), kwargs
        self._undo = self._skip_strategy.neutralize(optimizer)
        self._undo.apply()
        return None

    def _give_back(self, *of_the_step: Any) -> None:
        if self._undo is not None:
            self._undo.give_back()
            self._undo = None
        if self._skip_strategy.closure_backup is not None:
            self._skip_strategy.closure_backup.end()


class BackwardGuard(Guard):
    """The guard that `fastguard.wrap_backward` makes: each tensor is judged and stepped within the backward pass."""

    def _attach(self) -> Iterator[Any]:
        self._together = InBackward(self)
        self._kept = self._run.optimizers()  # nobody else has that of a parameter that is frozen
        return (StepHooks(member, self._together) for member in self._run.members)

    def _settle(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # no backward pass is running
            self._together.end()

    def observe(self, loss: Any = None, val_loss: Any = None, **metrics: Any) -> None:
        """Adds a loss to the newest step; as `Guard.observe`."""
        self._settle()
        super().observe(loss, val_loss, **metrics)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Guard.load_state_dict`. Goes on from the norm of the newest step; those of groups are not known."""
        super().load_state_dict(state)
        finite = (entry.norm for entry in reversed(self.history.recent) if math.isfinite(entry.norm))
        self._together.newest.clear()
        self._together.newest[None] = next(finite, 0.0)


def wrap_backward(
    model: torch.nn.Module,
    optimizers: Mapping[Any, Any] | Optimizer,
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
    with contextlib.ExitStack() as made:
        guard = BackwardGuard(given, model, settings, made=made, sinks=sinks, is_quiet=is_quiet)
        guard._made = made.pop_all()
    for p, optimizer in pairs if hooks else ():
        if p.requires_grad:
            arguments = {} if isinstance(optimizers, Mapping) else {"param": p}  # of an optimizer of several
            hook = partial(guard._together.step, optimizer, arguments)
            guard._made.callback(p.register_post_accumulate_grad_hook(hook).remove)
    show(guard)
    return guard


def _pairs(model: torch.nn.Module, optimizers: Any, hooks: bool) -> list[tuple[torch.Tensor, Optimizer]]:
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
