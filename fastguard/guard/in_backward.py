"""Optimizers that step within the backward pass: each tensor is judged as it comes, and all make one record."""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import kernels
from ..stats import values
from ..stats.columns import COLUMNS, INDEX, ROW_BYTES, norm_of, norm_parts
from .backup import Backup
from .clipping import SHRINKS, trigger_of
from .detour import Ticket, junction_of, may_communicate
from .guard import Guard
from .judge import learning_rate
from .policies import GivenPolicy
from .policies.given import TORCHS_FORMULA
from .policies.policy import NO_LIMITS, factor_of
from .policies.ruling import row_norms, rule
from .run import Member
from .undo import Rehearsal, SetAside, Undo, is_content_without_gradients

_NESTING = torch.autograd.function.BackwardCFunction.apply.__code__


def _is_nested() -> bool:
    """Whether the backward pass that ends is part of another, as where a reentrant checkpoint runs one of its own."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NESTING:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _norm(table: bytearray) -> float:
    return norm_of(*norm_parts(kernels.fold_rows(table)))


class _Estimate:
    """The norm of gradients of which some have not come yet: of those that have, or that of the step before if it is
    larger. Nobody knows more when the first of them steps.

    Attributes:
        last: norm of the newest step whose norm was finite.
    """

    def __init__(self) -> None:
        self.last = 0.0
        self._running = 0.0

    def add(self, norm: float) -> float:
        """Another has come; gives the estimate with it."""
        self._running = math.hypot(self._running, norm)
        return max(self.last, self._running)

    def begin(self) -> None:
        self._running = 0.0


class InBackward:
    """The steps of all optimizers in one backward pass, as one step.

    It begins with the first tensor that comes and ends with the backward pass. Where that cannot be told, because the
    optimizers step outside of one, or the last of them in a reentrant checkpoint's own, it ends when somebody looks at
    the guard, or a tensor comes again.

    Args:
        guard: whose run, ledger and sampling these are; its hooks hold this, and it them.
    """

    def __init__(self, guard: Guard) -> None:
        self._run, self._ledger, self._sampling = guard.run, guard.ledger, guard.sampling
        self._lock = threading.RLock()  # devices have threads of their own in a backward pass
        self._task = -1
        self._places: dict[int, int] = {}
        self._rows: dict[int, bytes] = {}
        self._judged: dict[int, weakref.ref[torch.Tensor]] = {}
        self._factors: dict[int, float] = {}
        self._skipped: set[int] = set()
        self._over: set[int] = set()
        self._all, self._parts = _Estimate(), [_Estimate()]
        self._asked: tuple[Any, ...] | None = None
        self._policy: GivenPolicy | None = None  # that is told what it was asked about
        self._loss: float | None = None
        self._seconds = 0.0

    def has_come(self, p: torch.Tensor) -> bool:
        """Whether a gradient of `p` has been judged in the step under way."""
        return self._places.get(id(p)) in self._rows

    def is_judged(self, p: torch.Tensor) -> bool:
        """Whether the gradient that `p` has is one that has been judged."""
        known = self._judged.get(id(p))
        return known is not None and known() is p.grad

    def judge(self, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> bool:
        """Measures the gradients of `params`, which are about to be stepped, and clips them. Whether to leave them out:
        all of an optimizer's are, where one is not finite."""
        with self._lock:
            started = time.perf_counter()
            if any(self.has_come(p) for p in params):
                self.end()
            if not self._rows:
                self._begin()
            self._await_end()
            places = [self._places[id(p)] for p in params]
            gradients: list[Any] = [p.grad for p in params]
            table, _ = kernels.run_stats(gradients, self._run.backend)
            rows = [bytes(table[i : i + ROW_BYTES]) for i in range(0, len(table), ROW_BYTES)]
            norms = row_norms(table)
            self._rows.update(zip(places, rows, strict=True))
            self._judged.update((id(p), weakref.ref(p.grad)) for p in params if p.grad is not None)
            if math.isfinite(_norm(table)):
                is_left_out = not self._clip(params, gradients, places, table, norms)
            else:
                is_left_out = self._run.skip_nonfinite
            if is_left_out:
                self._skipped.update(places)
            self._seconds += time.perf_counter() - started
            return is_left_out

    def _begin(self) -> None:
        run, ledger = self._run, self._ledger
        params = [p for one in run.optimizers() for group in one.param_groups for p in group["params"]]
        self._places = {id(p): i for i, p in enumerate(params)}
        run.names(hash(tuple(self._places)))
        ledger.deliver()
        if run.step >= run.wakes_at:
            self._sampling.begin_step(run.step)
        clip, self._loss = run.clip, run.ring.loss
        self._seconds, self._asked, self._policy = 0.0, None, None
        if clip is not None and clip.limit is not None:
            self._asked = TORCHS_FORMULA, clip.limit
        elif isinstance(clip, GivenPolicy):
            self._asked = clip.ask()
            self._policy = clip if self._asked is not None else None
        num_parts = len(self._asked[2][3]) if self._asked is not None and len(self._asked) > 2 else 0
        if len(self._parts) != num_parts:
            self._parts = [_Estimate() for _ in range(num_parts)]
        for estimate in (self._all, *self._parts):
            estimate.begin()

    def _await_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_has_ended)

    def _backward_has_ended(self) -> None:
        if not _is_nested():
            self.end()

    def _clip(
        self,
        params: Sequence[torch.Tensor],
        gradients: Sequence[Any],
        places: Sequence[int],
        table: bytearray,
        norms: Sequence[float],
    ) -> bool:
        """Clips gradients that are finite, by what the policy says; False if it wants them left out."""
        run, clip = self._run, self._run.clip
        if clip is None:
            return True
        if clip.scope in SHRINKS:
            highest = memoryview(table).cast("d")[INDEX["abs_max"] :: len(COLUMNS)].tolist()
            rows = list(zip(norms, highest, strict=True))
            names = [run.known_names[place] for place in places]
            over, left = clip.given.shrink(names, params, gradients, rows, 1.0, None)  # type: ignore[attr-defined]
            kernels.tell_autograd([gradients[i] for i in over])
            for i in over:
                self._factors[places[i]] = left[i] / norms[i] if norms[i] else 1.0
                self._over.add(places[i])
            return True
        factors = [self._factor(place, norm) for place, norm in zip(places, norms, strict=True)]
        if 0.0 in factors:
            return False
        for place, gradient, factor in zip(places, gradients, factors, strict=True):
            if factor != 1.0:
                self._factors[place] = factor
                kernels.run_scale([gradient], factor, run.backend)
        return True

    def _factor(self, place: int, norm: float) -> float:
        """Of one gradient; 0.0 stands for leaving it out."""
        asked, clip = self._asked, self._run.clip
        assert clip is not None
        estimate = self._all.add(norm)
        if asked is None:
            return clip.coefficient(estimate)
        limits = [(estimate, *asked[:2])] if asked[:2] != NO_LIMITS else []
        if len(asked) > 2:
            groups, triggers, targets, _ = asked[2]
            part = place if groups is None else groups[place]
            if part >= 0:
                estimate = norm if groups is None else self._parts[part].add(norm)
                if triggers is not None:
                    limits.append((estimate, triggers[part], targets[part]))
                    if factor_of(*limits[-1]) != 1.0:
                        self._over.add(part)
        if any(size > trigger and target == 0.0 for size, trigger, target in limits):
            return 0.0
        return math.prod(factor_of(*each) for each in limits)

    def end(self) -> None:
        """The step is over: it is entered.

        Raises:
            NonFiniteGradientsError: too many in a row had something left out.
        """
        with self._lock:
            if not self._rows:
                return
            started = time.perf_counter()
            run, ledger, ring, clip = self._run, self._ledger, self._run.ring, self._run.clip
            places = sorted(self._rows)
            table = bytearray(b"".join(self._rows[place] for place in places))
            positions = None if len(places) == len(self._places) else places
            norm = _norm(table)
            asked, over, step, skipped = self._asked, tuple(sorted(self._over)), run.step, bool(self._skipped)
            coefficient = self._coefficient(places, table, norm)
            if math.isfinite(norm):
                self._all.last = norm
            if self._policy is not None and asked is not None:
                self._tell(self._policy, asked, norm, table, positions)
            self._rows, self._judged, self._factors, self._task = {}, {}, {}, -1
            self._skipped, self._over = set(), set()
            trigger = trigger_of(clip, None if self._policy is None else asked)
            told: dict[str, Any] = {"trigger": trigger, "over": over or None}
            ring.arrive(step, norm, coefficient, skipped, None, table, positions, run.known_names, **told)
            run.step = step + 1
            if ledger.sinks and (over or (clip is not None and clip.scope == "group")):
                ring.limit = min(ring.limit, ring.num_open)  # who was over is in no line
            ring.note("lr", learning_rate(run.optimizers()[0]))
            run.follow_buffers(step, skipped)
            ledger.enter(is_bad=not math.isfinite(norm), from_scaler=False)
            if run.has_more_to_do:
                run.has_more_to_do = self._sampling.end_step()
            ring.add_overhead(self._seconds + time.perf_counter() - started)
            ledger.raise_due()

    def _coefficient(self, places: Sequence[int], table: bytearray, norm: float) -> float:
        """How much smaller the norm of what was stepped became by clipping."""
        if not self._factors or not math.isfinite(norm) or not norm:
            return 1.0
        pairs = zip(places, row_norms(table), strict=True)
        shares = [(self._factors.get(place, 1.0) * (size / norm)) ** 2 for place, size in pairs]
        return min(1.0, math.sqrt(math.fsum(shares)))

    def _tell(
        self, clip: GivenPolicy, asked: tuple[Any, ...], norm: float, table: bytearray, positions: Sequence[int] | None
    ) -> None:
        """Has the policy observe the step, and the norms of its groups known for the next one."""
        if not math.isfinite(norm):
            clip.pass_over()
            return
        rule(asked, norm, row_norms(table), positions)  # writes the norms of groups or tensors
        if len(asked) > 2 and asked[2][0] is not None:
            for estimate, size in zip(self._parts, asked[2][3], strict=True):
                estimate.last = size if size >= 0.0 else estimate.last
        clip.tell(norm, self._loss)

    def state_dict(self) -> dict[str, Any]:
        """The norms that the next step is clipped by."""
        return {"norm": self._all.last, "parts": [part.last for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, which `checked` gave."""
        self._all.last = state["norm"]
        self._parts = [_Estimate() for _ in state["parts"]]
        for part, last in zip(self._parts, state["parts"], strict=True):
            part.last = last


def checked(state: Any) -> dict[str, Any]:
    """What `InBackward.state_dict` gave; a MisfitError for anything else."""
    return {
        "norm": values.entry(state, "norm", values.number),
        "parts": values.entry(state, "parts", lambda plain: values.each(values.number, plain)),
    }


class StepHooks:
    """The hooks on one optimizer that steps within the backward pass, which owns them."""

    def __init__(self, member: Member, together: InBackward) -> None:
        optimizer = member.optimizer
        self._member, self._together = member, together
        self._undo: Undo | None = None
        self._is_content = is_content_without_gradients(optimizer)
        self._handles = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def remove(self) -> None:
        """Leaves the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        self._give_back()

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._give_back()  # of a step that raised
        if self._member.is_paused:
            return None
        only = kwargs.get("param")  # optimi's gradient release
        every = [p for group in optimizer.param_groups for p in group["params"]] if only is None else [only]
        params = [p for p in every if p.grad is not None]
        if params:
            is_left_out = self._together.judge(optimizer, params)
        else:
            is_left_out = any(map(self._together.has_come, every))  # two hooks step it, and one was first
        if not is_left_out:
            return None
        junction = junction_of(optimizer) if self._is_content or not may_communicate() else None
        if junction is not None:
            return junction.admit(Ticket(optimizer), args), kwargs
        self._undo = SetAside(optimizer) if self._is_content else Rehearsal(optimizer, Backup(optimizer))
        self._undo.apply()
        return None

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._give_back()

    def _give_back(self) -> None:
        if self._undo is not None:
            self._undo.give_back()
            self._undo = None


class GradientHook:
    """Steps a parameter as soon as its gradient is there, and lets go of that. Nothing is done where another hook has.

    Args:
        optimizer: of the parameter alone, or one that takes `step(param=...)`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, together: InBackward, *, by_parameter: bool) -> None:
        self._optimizer, self._together, self._by_parameter = optimizer, together, by_parameter

    def __call__(self, p: torch.Tensor) -> None:
        if p.grad is not None and not self._together.is_judged(p):
            if self._by_parameter:
                step: Any = self._optimizer.step
                step(param=p)
            else:
                self._optimizer.step()
            p.grad = None


class BackwardGuard(Guard):
    """The guard that `fastguard.wrap_backward` makes: each tensor is judged and stepped within the backward pass."""

    def _attach(self) -> list[Any]:
        self._together = InBackward(self)
        self._kept = self.run.optimizers()  # nobody else has that of a parameter that is frozen
        return [StepHooks(member, self._together) for member in self.run.members]

    def step_from(self, pairs: Sequence[tuple[torch.Tensor, torch.optim.Optimizer]], *, by_parameter: bool) -> None:
        """Has each parameter stepped by its optimizer as its gradient comes; `detach` ends that."""
        for p, optimizer in pairs:
            hook = GradientHook(optimizer, self._together, by_parameter=by_parameter)
            self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    def settle(self) -> None:
        """Ends a step of which no backward pass has told that it is over."""
        if torch._C._current_graph_task_id() == -1:  # no backward pass is under way
            self._together.end()

    @property
    def last(self) -> Any:
        """The newest record, or None before the first one. Within a backward pass it is that of the step before."""
        self.settle()
        return super().last

    @property
    def history(self) -> Any:
        """The run so far, without the step just taken, to which `observe` may still add."""
        self.settle()
        return super().history

    def observe(self, loss: Any = None, val_loss: Any = None) -> None:
        """Adds a loss to the step just taken; as `Guard.observe`."""
        self.settle()
        super().observe(loss, val_loss)

    def flush(self) -> None:
        """Hands the record of the step just taken to history and sinks."""
        self.settle()
        super().flush()

    def close(self) -> None:
        """Hands over what is held back and closes the sinks; as `Guard.close`."""
        self.settle()
        super().close()

    def report(self) -> Any:
        """What the run looks like so far; as `Guard.report`."""
        self.settle()
        return super().report()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; as `Guard.state_dict`."""
        self.settle()
        return {**super().state_dict(), "in_backward": self._together.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which came from `state_dict`; as `Guard.load_state_dict`."""
        plain = values.mapping(state).get("in_backward")
        norms = None if plain is None else values.entry(state, "in_backward", checked)
        super().load_state_dict(state)
        if norms is not None:
            self._together.load_state_dict(norms)
