"""The two step hooks on one optimizer: judge the gradients before the step, put things back after it.

Most steps go the short way, one call: nothing of them is unusual, and all that could be asked was answered at the step
before. The long way asks.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from .. import kernels
from ..kernels import cpu
from ..stats import TensorStats
from ..stats.slot import HEADER_WORDS, OVERHEAD_S
from .judge import Judge, learning_rate
from .ledger import Ledger
from .ring import FINGERPRINT, WRITTEN
from .run import Member, Run
from .sampling import Sampling
from .scaler import Handed, ScalerContract
from .undo import SetAside, Undo

_perf_counter = time.perf_counter
_get_num_threads = torch.get_num_threads


# Bits of what `_C.take_step` returns.
_ODD, _OTHER_PARAMETERS, _NOT_FINITE, _SCALED, _ODD_LR = (1 << bit for bit in range(5))


class Hooks:
    """The guard's hooks on one optimizer, which owns them.

    Args:
        run, member, judge, ledger: of the guard, and the optimizer.
        sampling: what is sampled beside the gradients.
    """

    def __init__(self, run: Run, member: Member, judge: Judge, ledger: Ledger, sampling: Sampling) -> None:
        optimizer = member.optimizer
        self._run, self._member, self._judge, self._ledger, self._sampling = run, member, judge, ledger, sampling
        self._weights = sampling.weights_of(member)
        self._scaler = ScalerContract(optimizer, run.proxies)
        self._undo: Undo | None = None
        self._evaluations = 0
        self._depth = 0  # of steps under way that went the long way; more than 1 where a step calls its parent's
        self._silent = False
        self._has_more_to_do = True  # after a step; a call saved in each one counts
        self._take_step: Any = cpu.take_step
        self._may_be_short = (
            len(run.members) == 1
            and not run.proxies
            and member.can_skip
            and cpu.take_step is not None
            and run.backend in ("auto", "cpu")
            and not _may_nest(type(optimizer))
        )
        self._scales = not judge.divides(optimizer)
        self._met_odd = False
        self._odd: int | None = None  # fingerprint of parameters whose gradients the short way cannot read
        self._handles = [
            optimizer.register_step_pre_hook(_left_to_python(self._before)),
            optimizer.register_step_post_hook(_left_to_python(self._after)),
        ]

    def remove(self) -> None:
        """Leaves the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        self._give_back()
        if self._member.is_alive:
            self._scaler.leave(self._member.optimizer)

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        run, attributes = self._run, optimizer.__dict__
        if (
            not run.is_short
            or kwargs
            or len(args) > 1
            or self._undo is not None
            or self._depth  # a step raised that had gone the long way
            or "found_inf" in attributes
            or "grad_scale" in attributes
        ):
            return self._go_the_long_way(optimizer, args, kwargs)
        started = _perf_counter()
        ring, clip, step = run.ring, run.clip, run.step
        if ring.num_open >= ring.limit:
            self._ledger.deliver()
        elif ring.num_open and self._ledger.writes_lines:
            self._ledger.write_line()
        limit = math.inf if clip is None else clip.limit
        if limit is None or (self._weights is not None and self._weights.is_due(step)):
            return self._go_the_long_way(optimizer, args, kwargs)
        slot = ring.num_open
        ring.made = None
        outcome = self._take_step(
            optimizer.param_groups,
            ring.headers,
            slot,
            ring.found,
            step,
            _get_num_threads(),
            limit,
            run.skip_nonfinite,
            self._scales,
        )
        if outcome & _ODD:
            self._met_odd = True
            self._ledger.deliver_without_table()
            return self._go_the_long_way(optimizer, args, kwargs)
        ring.newest, ring.num_open, run.step = slot, slot + 1, step + 1
        if outcome:
            self._follow(optimizer, outcome)
        ring.words[HEADER_WORDS * slot + OVERHEAD_S] = _perf_counter() - started
        return None

    def _follow(self, optimizer: torch.optim.Optimizer, outcome: int) -> None:
        """What is left to do where a step that went the short way is not a clean one."""
        run, ring = self._run, self._run.ring
        if outcome & _SCALED and not self._scales:
            self._undo = self._judge.scale(optimizer, ring.header(ring.newest).clip_coef)
        elif outcome & _SCALED:
            written, ring.found[WRITTEN] = ring.found[WRITTEN], None
            kernels.tell_autograd(written)
        if outcome & _OTHER_PARAMETERS:
            ring.names = run.names(ring.found[FINGERPRINT])
        if outcome & _ODD_LR:
            ring.note("lr", learning_rate(optimizer))
        if outcome & _NOT_FINITE:
            self._ledger.enter(is_bad=True, from_scaler=False)
            try:
                self._ledger.raise_due()
            except BaseException:
                self._sampling.end_step()  # too many skips in a row: what was sampled belongs to this step
                raise
            if ring.is_skipped:
                self._undo = SetAside(optimizer)

    def _go_the_long_way(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._member.is_paused:
            return None
        started = _perf_counter()
        if self._depth and _is_nested(optimizer):
            self._depth += 1
            return None  # the outer step has been judged, or its closure will be
        self._depth = 1
        if self._undo is not None:
            self._give_back()  # of a step that raised before its post-hook ran
        self._evaluations = 0
        handed = self._scaler.receive(optimizer, kwargs)
        self._silent = bool(kwargs) and _is_state_initialisation(optimizer, kwargs)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self._silent:
            return None
        if self._weights is not None:
            self._weights.before(optimizer)
            started = _perf_counter()
        if not callable(closure):
            self._judge_gradients(optimizer, handed)
            self._judge.add_overhead(_perf_counter() - started)
            return None
        # The gradients of this step do not exist before the closure has run.
        judged = self._judging(closure, optimizer, handed)
        if len(args) > 1:
            return (args[0], judged, *args[2:]), kwargs
        return args, {**kwargs, "closure": judged}

    def _judging(
        self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer, handed: Handed
    ) -> Callable[[], Any]:
        @functools.wraps(closure)
        def judged() -> Any:
            loss = closure()
            started = _perf_counter()
            if self._undo is not None:  # the closure has made gradients anew
                self._undo.forget()
                self._undo = None
            self._judge_gradients(optimizer, handed, loss)
            self._judge.add_overhead(_perf_counter() - started)
            return loss

        return judged

    def _judge_gradients(self, optimizer: torch.optim.Optimizer, handed: Handed, loss: Any = None) -> None:
        try:
            self._undo = self._judge.judge(self._member, optimizer, handed, self._evaluations == 0, loss)
        except BaseException:
            self._scaler.abandon(optimizer)
            self._sampling.end_step()  # too many skips in a row: what was sampled belongs to this step
            raise
        self._evaluations += 1
        if self._may_be_short and self._judge.waits:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Whether the next step may go the short way."""
        run = self._run
        if self._met_odd:
            self._met_odd, self._odd = False, run.fingerprint
        run.is_short = run.fingerprint not in (None, self._odd)

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth:
            self._depth -= 1
            if self._depth:
                return
            self._give_back()
            if self._weights is not None:
                self._weights.after(optimizer)
            self._scaler.give_back(optimizer)
        elif self._undo is not None:
            self._give_back()
        if self._has_more_to_do and not self._silent and not self._member.is_paused:
            self._has_more_to_do = self._sampling.end_step()
        self._silent = False

    def _give_back(self) -> None:
        if self._undo is not None:
            self._undo.give_back()
            self._undo = None


def _leave_code_to_python() -> bool:
    """Has dynamo run the hooks as they are. Whether it can: an older torch has to be told by a decorator."""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return False
    leave = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for hook in (Hooks._before, Hooks._after):
        frames.set_code_exec_strategy(hook.__code__, leave)
        hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return True


_IS_LEFT_TO_PYTHON = _leave_code_to_python()


def _left_to_python(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that dynamo traced would be compiled into the step, and recompiled at every one."""
    return hook if _IS_LEFT_TO_PYTHON else torch.compiler.disable(hook)


def _may_nest(cls: type) -> bool:
    """Whether the `step` of an optimizer may call that of a parent class, which would run all hooks twice."""
    steps = {inspect.unwrap(c.__dict__["step"]) for c in cls.__mro__ if "step" in c.__dict__}
    return len(steps - {torch.optim.Optimizer.step}) > 1


# The code of the function that torch wraps around every `step`, and that calls the hooks.
_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that runs this hook is part of another step of the same optimizer.

    A subclass's `step` that calls `super().step()` runs all hooks again once torch has wrapped the parent's `step` too,
    which it does when the first optimizer of the parent's class is made. A count alone would not do: a step that raised
    never told that it was over.
    """
    count = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count > 1


def _is_state_initialisation(optimizer: torch.optim.Optimizer, kwargs: dict[str, Any]) -> bool:
    """Whether this is the step by which torch.distributed.checkpoint makes an optimizer create its state.

    It calls `step(closure=None)` on an optimizer without state, with every learning rate and every gradient zero.
    """
    if kwargs.get("closure", True) is not None or optimizer.state:
        return False
    if any(float(group["lr"]) != 0.0 for group in optimizer.param_groups if "lr" in group):
        return False
    groups = [group["params"] for group in optimizer.param_groups]
    total = TensorStats(kernels.gradient_stats(groups, "auto", 1.0)[0]).total()
    return total.num_zeros == total.total_elements
