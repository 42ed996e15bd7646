"""The long way of a step, on one optimizer: everything is asked, and what is done for a step is undone when it ends.

A step that is skipped is not taken. One with a closure is attended to: its gradients do not exist before that has run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ..kernels import cpu
from ..recovery import Rescue, Slowed
from .judge import Judge
from .ledger import Ledger
from .run import Member, Run
from .sampling import Sampling
from .scaler import Handed, ScalerContract
from .skip import DryRunStep, Skip, SkippedCall, SkipStrategy, Undo, interceptor_of
from .state import HooksState
from .wrappers import is_nested, is_state_initialisation, may_nest

_perf_counter = time.perf_counter


class _Attended(SkippedCall):
    """A step with a closure, or a slower one: what is done within it is undone as it ends, also where it raises."""

    def __init__(self, optimizer: torch.optim.Optimizer, hooks: LongWay) -> None:
        super().__init__(optimizer)
        self._hooks = hooks

    def take(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            self._hooks._slow_down()
            return step(self.optimizer, *args, **kwargs)
        except Exception as error:  # of a skipped step, for want of gradients: undone, and told; all others are raised
            if not self._hooks._is_of_skip(error):
                raise
            return self._hooks._loss
        finally:
            self._hooks._end_attended()

    def close(self) -> None:
        self._hooks._end_attended()  # again, if that was interrupted


class LongWay(HooksState):
    """The part of the hooks on one optimizer that asks: has a step judged, attends to it, and undoes what was done.

    Args:
        run, member, judge, ledger: of the guard, and the optimizer.
        sampling: what is sampled beside the gradients.
        rescue: brings the run back; None where that was not asked for.
    """

    def __init__(
        self, run: Run, member: Member, judge: Judge, ledger: Ledger, sampling: Sampling, rescue: Rescue | None = None
    ) -> None:
        optimizer = member.optimizer
        self._run, self._member, self._judge, self._ledger, self._sampling = run, member, judge, ledger, sampling
        self._scaler = ScalerContract(optimizer, run.proxies)
        self._rescue = rescue
        self._slowed: Slowed | None = None
        self._undo: Undo | None = None
        self._evaluations = 0
        self._skip_strategy = SkipStrategy(optimizer, member.can_skip)
        self._closure_backup = self._skip_strategy.closure_backup
        self._is_evaluating = False
        self._loss: Any = None  # what the closure of the step under way returned last
        self._depth = 0  # of steps under way that went the long way; more than 1 where a step calls its parent's
        self._silent = False
        self._may_be_short = (
            len(run.members) == 1
            and not run.proxies
            and member.can_skip
            and cpu.take_step is not None
            and run.backend in ("auto", "cpu")
            and not may_nest(type(optimizer))
        )
        self._met_odd = False
        self._odd: int | None = None  # fingerprint of parameters whose gradients the short way cannot read
        self._handles: list[Any] = []

    def _leave_out(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], repairs: Undo | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Has the step not be taken; where that can't be, has it do nothing that lasts."""
        interceptor = self._skip_strategy.interceptor(optimizer)
        if interceptor is None:
            self._do_without(optimizer, repairs)
            return None
        self._undo = repairs
        self._scaler.withhold(optimizer)
        return interceptor.intercept(SkippedCall(optimizer), args), kwargs

    def _do_without(self, optimizer: torch.optim.Optimizer, repairs: Undo | None) -> None:
        self._undo = change = self._skip_strategy.neutralize(optimizer, repairs)
        change.apply()

    def _go_the_long_way(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        started = _perf_counter()
        if self._depth and is_nested(optimizer):
            self._depth += 1
            return None  # the outer step has been judged, or its closure will be
        if self._slowed is not None:
            self._speed_up()
        if self._undo is not None:
            self._give_back_late()  # of a step that raised before its post-hook ran
        self._depth = 0
        if self._member.is_paused:
            self._sampling.observers.forget()
            return None
        self._depth = 1
        self._evaluations = 0
        handed = self._scaler.receive(optimizer, kwargs)
        self._run.has_scaler = self._run.has_scaler or handed is None or handed.from_scaler
        self._silent = handed is None or (bool(kwargs) and is_state_initialisation(optimizer, kwargs))
        if handed is None or self._silent:
            self._sampling.observers.forget()
            return None
        if not self._run.is_alike:
            self._run.is_alike = self._run.alike is None or self._run.alike.are_compared()
        if self._run.step >= self._run.wakes_at and self._judge.is_between_steps:
            self._sampling.observers.begin_step(self._run.step)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self._rescue is not None and self._judge.is_between_steps:
            self._rescue.begin_step(self._run.step, callable(closure))
        if callable(closure):
            return self._attend(closure, optimizer, handed, args, kwargs)
        undo = self._judge_gradients(optimizer, handed)
        given = None
        if isinstance(undo, Skip):
            self._scaler.is_skipped = handed.from_scaler
            given = self._leave_out(optimizer, args, kwargs, undo.repairs)
        elif undo is not None:
            self._undo = undo
            undo.apply()
        if self._rescue is not None and self._rescue.lr_factor != 1.0 and given is None:
            given = self._attended(optimizer, args, kwargs)
        self._judge.add_overhead(_perf_counter() - started)
        return given

    def _attend(
        self,
        closure: Callable[[], Any],
        optimizer: torch.optim.Optimizer,
        handed: Handed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Has the closure judged: the gradients of this step do not exist before it has run."""
        self._is_evaluating, self._loss = False, None
        if self._closure_backup is not None:
            self._closure_backup.begin(optimizer)
        judged = self._judging(closure, optimizer, handed)
        if len(args) > 1:
            args = (args[0], judged, *args[2:])
        else:
            kwargs = {**kwargs, "closure": judged}
        return self._attended(optimizer, args, kwargs)

    def _attended(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Has the step attended to."""
        interceptor = interceptor_of(optimizer)
        if interceptor is not None:
            return interceptor.intercept(_Attended(optimizer, self), args), kwargs
        self._slow_down()
        return args, kwargs

    def _slow_down(self) -> None:
        """Multiplies the learning rate for the step that begins, if that is due."""
        factor = 1.0 if self._rescue is None else self._rescue.lr_factor
        if factor != 1.0 and self._slowed is None:
            self._slowed = Slowed(self._member.optimizer, factor)
            self._slowed.apply()

    def _speed_up(self) -> None:
        if self._slowed is not None:
            self._slowed.give_back()
            self._slowed = None

    def _judging(
        self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer, handed: Handed
    ) -> Callable[[], Any]:
        @functools.wraps(closure)
        def judged() -> Any:
            self._is_evaluating = True
            if self._closure_backup is not None:
                self._closure_backup.look()
            loss = self._loss = closure()
            started = _perf_counter()
            if self._undo is not None:  # the closure has made gradients anew
                self._undo.forget()
                self._undo = None
            undo = self._judge_gradients(optimizer, handed, loss)
            if isinstance(undo, Skip):
                self._do_without(optimizer, undo.repairs)
            elif undo is not None:
                self._undo = undo
                undo.apply()
            self._judge.add_overhead(_perf_counter() - started)
            self._is_evaluating = False
            return loss

        return judged

    def _judge_gradients(
        self, optimizer: torch.optim.Optimizer, handed: Handed, loss: Any = None
    ) -> Undo | Skip | None:
        try:
            undo = self._judge.judge(self._member, optimizer, handed, self._evaluations == 0, loss)
        except (
            BaseException
        ) as error:  # a verdict that raises, Ctrl-C: half a step is let go of, and the error passed on
            self._judge.abandon(self._member)
            if self._is_kept(error):
                return None
            self._scaler.abandon(optimizer)  # here too: a closure may catch this
            self._sampling.end_step()  # too many skips in a row: what was sampled belongs to this step
            raise
        if not self._handles:
            return None  # a sink has detached the guard
        self._evaluations += 1
        if self._may_be_short and self._run.waits and not self._run.is_vetoed:
            self._look_ahead()
        return undo

    def _is_kept(self, error: BaseException) -> bool:
        """Whether an error of the guard is kept from the training. It is not if the gradients are left scaled."""
        on_error = self._run.on_error
        return on_error is not None and isinstance(error, Exception) and not self._scaler.holds and on_error(error)

    def _is_of_skip(self, error: Exception) -> bool:
        """Whether an error comes of what a step was given instead of its gradients: it is undone anyway, and the error
        is nobody's."""
        if self._is_evaluating or not isinstance(self._undo, DryRunStep):
            return False
        said = "a skipped step raised without its gradients, and was undone: %r"
        self._skip_strategy.warn_once(self._member.optimizer, said, error)
        return True

    def _end_attended(self) -> None:
        """A step that was attended to is over, or has raised."""
        self._speed_up()
        if self._undo is not None:
            self._undo.give_back()
            self._undo = None
        if self._closure_backup is not None:
            self._closure_backup.end()
        self._loss = None

    def _look_ahead(self) -> None:
        """Whether the next step may go the short way."""
        run = self._run
        if self._met_odd:
            self._met_odd, self._odd = False, run.fingerprint
        run.is_short = run.ranks is None and run.is_alike and run.fingerprint not in (None, self._odd)

    def _give_back_late(self) -> None:
        """What a step that raised has left."""
        if self._undo is not None:
            self._undo.give_back_late()
            self._undo = None
