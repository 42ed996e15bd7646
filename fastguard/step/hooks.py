"""The two step hooks on one optimizer: judge the gradients before the step, put things back after it.

Most steps go the short way, one call: nothing about them is unusual, and whatever could be asked was answered at the
step before. With the extension, torch calls hooks in C++ (`csrc/step_hooks.cpp`), which take the short way where
nothing else is due, and call these for every other step.

The long way asks everything, and undoes what was done for a step when it ends. A step with a closure is wrapped: its
gradients do not exist before the closure has run.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from .. import kernels
from ..clip import Limits
from ..kernels import cpu
from ..kernels.cpu import HooksState, StepPostHook, StepPreHook
from ..records import NUM_LONE
from ..records.slot import HEADER_WORDS, NORM, OVERHEAD_S
from ..recovery import Rescue, Slowed
from .judge import Judge
from .ledger import Ledger
from .observed import Observed
from .ring import FINGERPRINT, POSITIONS, WRITTEN
from .run import Member, Run
from .scalars import learning_rate
from .skip import DryRunStep, Skip, SkippedCall, SkipStrategy, Undo, interceptor_of
from .wrappers import Handed, ScalerContract, is_nested, is_state_initialisation, left_to_python, may_nest

_perf_counter = time.perf_counter
_get_num_threads = torch.get_num_threads
_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
_Arguments: TypeAlias = tuple[_Args, _Kwargs]  # of a step, as a pre-hook returns them

# Bits of what `_C.take_step` returns.
_ODD, _OTHER_PARAMETERS, _NOT_FINITE, _SCALED, _ODD_LR, _DROPPED, _OVER, _UNSUITED, _LONE, _MISSING = (
    1 << bit for bit in range(10)
)


class _Attended(SkippedCall):
    """A step with a closure, or a slower one: what is done within it is undone as it ends, also where it raises."""

    def __init__(self, optimizer: Optimizer, hooks: Hooks) -> None:
        super().__init__(optimizer)
        self._hooks = hooks

    def take(self, step: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
        hooks = self._hooks
        try:
            hooks._slow_down()
            return step(self.optimizer, *args, **kwargs)
        except Exception as error:  # of a skipped step, for want of gradients: undone, and told; all others are raised
            if hooks._is_evaluating or not isinstance(hooks._undo, DryRunStep) or hooks._undo.backup is None:
                raise
            said = "a skipped step raised without its gradients, and was undone: %r"
            hooks._skip_strategy.warn_once(self.optimizer, said, error)
            return hooks._loss
        finally:
            hooks._end_attended()

    def close(self) -> None:
        self._hooks._end_attended()  # again, if that was interrupted


class Hooks(HooksState):
    """The guard's hooks on one optimizer, which owns them."""

    def __init__(
        self, run: Run, member: Member, judge: Judge, ledger: Ledger, observed: Observed, rescue: Rescue | None = None
    ) -> None:
        optimizer = member.optimizer
        self._run, self._member, self._judge, self._ledger, self._observed = run, member, judge, ledger, observed
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
        is_alone = len(run.members) == 1 and not run.proxies and not may_nest(type(optimizer))
        is_served = cpu.take_step is not None and run.backend in ("auto", "cpu")
        self._may_be_short = is_alone and is_served and member.can_skip
        self._met_odd = False
        self._odd: int | None = None  # fingerprint of parameters whose gradients the short way cannot read
        self._take_step: Any = cpu.take_step
        self._scales = not judge.divides(optimizer)
        self._num_lone = 0
        before, after, *_ = [left_to_python(one) for one in (self._before, self._after, self._finish, ledger.write)]
        if StepPreHook is not None:
            before, after = StepPreHook(self, before), StepPostHook(self, after)
        self._handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._undo is not None:
            self._undo.give_back_late()
            self._undo = None
        if self._member.is_alive:
            self._scaler.leave(self._member.optimizer)

    def _before(self, optimizer: Optimizer, args: _Args, kwargs: _Kwargs) -> _Arguments | None:
        try:
            run, attributes = self._run, optimizer.__dict__
            if (
                not run.is_short
                or kwargs
                or (len(args) > 1 and args[1:] != (None,))  # accelerate's wrapper calls step(None)
                or self._undo is not None
                or self._depth  # a step raised that had gone the long way
                or "found_inf" in attributes
                or "grad_scale" in attributes
                or (self._rescue is not None and self._rescue.begin_step(run.step, False))
            ):
                return self._go_the_long_way(optimizer, args, kwargs)
            started = _perf_counter()
            ring, step = run.ring, run.step
            clip: Any = run.clip
            if step >= run.wakes_at:
                self._observed.observers.begin_step(step)
            if ring.num_open:
                self._ledger.open()
            if not self._handles:
                return None  # a sink has detached the guard
            limits: Any = math.inf if clip is None else clip.limit
            if limits is None:
                loss, limits = ring.loss, clip.next_limits()
                if limits is None:
                    return self._go_the_long_way(optimizer, args, kwargs)
            slot, threads, skips = ring.num_open, _get_num_threads(), run.skip_nonfinite
            ring.made = None
            outcome = self._take_step(
                optimizer.param_groups, ring.headers, slot, ring.found, step, threads, limits, skips, self._scales
            )
            if limits.__class__ is Limits and not outcome & (_ODD | _UNSUITED):
                clip.observe_step(ring.words[HEADER_WORDS * slot + NORM], loss)
            given = self._finish(optimizer, args, kwargs, outcome, _perf_counter() - started)
            has_parts = limits.__class__ is Limits and clip.norms is not None and self._ledger.sinks and ring.num_open
            if has_parts and (outcome & _OVER or clip.scope == "group"):
                self._ledger.want_record()  # the groups, and which were over, are in no line
            return given
        except BaseException as error:
            if self._is_kept(error):
                return None
            self._scaler.abandon(optimizer)
            raise

    def _finish(self, optimizer: Optimizer, args: Any, kwargs: Any, outcome: int, elapsed: float) -> Any:
        """Counts a step that was measured in `elapsed` seconds as taken, and does what `outcome` asks for. C++ calls
        this too, unless the step was clean."""
        started = _perf_counter() - elapsed
        run, ring = self._run, self._run.ring
        if outcome & (_ODD | _UNSUITED):
            self._met_odd = outcome == _ODD
            self._ledger.deliver_without_table()
            return self._go_the_long_way(optimizer, args, kwargs)
        step, slot = run.step, ring.num_open
        ring.newest, ring.num_open, run.step = slot, slot + 1, step + 1
        if not outcome & _NOT_FINITE:
            run.follow_buffers(step, False)
        given = self._follow(optimizer, outcome, args, kwargs) if outcome else None
        ring.words[HEADER_WORDS * slot + OVERHEAD_S] = _perf_counter() - started
        return given

    def _follow(self, optimizer: Optimizer, outcome: int, args: _Args, kwargs: _Kwargs) -> _Arguments | None:
        """Does what is left to do for a step that was measured but is not clean."""
        run, ring = self._run, self._run.ring
        if outcome & _SCALED and not self._scales and not outcome & _OVER:
            self._undo = undo = self._judge.scale(optimizer, ring.header(ring.newest).clip_coef)
            if undo is not None:
                undo.apply()
        elif outcome & _SCALED:
            written, ring.found[WRITTEN] = ring.found[WRITTEN], None
            kernels.tell_autograd(written)
        if outcome & _OTHER_PARAMETERS:
            ring.names = run.names(ring.found[FINGERPRINT])
        if outcome & (_OTHER_PARAMETERS | _MISSING):
            ring.seen.take(ring.found[POSITIONS], ring.names)
        if outcome & _ODD_LR:
            ring.note("lr", learning_rate(optimizer))
        if outcome & (_NOT_FINITE | _DROPPED):
            if outcome & _NOT_FINITE:
                run.follow_buffers(run.step - 1, ring.is_skipped)
            self._ledger.enter(is_bad=bool(outcome & _NOT_FINITE), from_scaler=False)
            try:
                self._ledger.raise_due()
            except BaseException:
                self._observed.end_step()  # too many skips in a row: what was sampled belongs to this step
                raise
            if ring.is_skipped:
                return self._leave_out(optimizer, args, kwargs)
        if outcome & _LONE and self._num_lone < NUM_LONE:
            self._num_lone += 1
            self._ledger.enter(is_bad=False, from_scaler=False, is_lone=True)
        return None

    def _after(self, optimizer: Optimizer, args: _Args, kwargs: _Kwargs) -> None:
        try:
            if self._depth:
                self._depth -= 1
                if self._depth:
                    return
                if self._slowed is not None:  # `_end_attended`, without its frames
                    self._speed_up()
                if self._closure_backup is not None:
                    self._closure_backup.end()
                self._loss = None
            if self._undo is not None:
                self._undo.give_back()
                self._undo = None
            if self._scaler.holds or self._scaler.is_skipped:
                self._scaler.give_back(optimizer)
            run = self._run
            is_due = run.has_more_to_do or run.marks_ends or run.step > run.ends_at
            if is_due and not self._silent and not self._member.is_paused:
                run.has_more_to_do = self._observed.end_step()
            if self._rescue is not None and self._judge.is_between_steps and not self._member.is_paused:
                self._rescue.end_step()
            self._silent = False
        except BaseException as error:
            if self._is_kept(error):
                return
            self._scaler.abandon(optimizer)
            raise

    def _leave_out(self, optimizer: Optimizer, args: _Args, kwargs: _Kwargs) -> _Arguments | None:
        """Has the step not be taken; where that can't be, has it do nothing that lasts."""
        interceptor = self._skip_strategy.interceptor(optimizer)
        if interceptor is None:
            self._undo = change = self._skip_strategy.neutralize(optimizer)
            change.apply()
            return None
        self._scaler.withhold(optimizer)
        return interceptor.intercept(SkippedCall(optimizer), args), kwargs

    def _go_the_long_way(self, optimizer: Optimizer, args: _Args, kwargs: _Kwargs) -> _Arguments | None:
        started = _perf_counter()
        if self._depth and is_nested(optimizer):
            self._depth += 1
            return None  # the outer step has been judged, or its closure will be
        if self._slowed is not None:
            self._speed_up()
        if self._undo is not None:  # of a step that raised before its post-hook ran
            self._undo.give_back_late()
            self._undo = None
        self._depth, self._evaluations = int(not self._member.is_paused), 0
        if self._member.is_paused:
            self._observed.observers.forget()
            return None
        handed = self._scaler.receive(optimizer, kwargs)
        self._run.has_scaler = self._run.has_scaler or handed is None or handed.from_scaler
        self._silent = handed is None or (bool(kwargs) and is_state_initialisation(optimizer, kwargs))
        if handed is None or self._silent:
            self._observed.observers.forget()
            return None
        run, is_first = self._run, self._judge.is_between_steps
        run.is_alike = run.is_alike or run.alike is None or run.alike.are_compared()
        if run.step >= run.wakes_at and is_first:
            self._observed.observers.begin_step(run.step)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self._rescue is not None and is_first:
            self._rescue.begin_step(run.step, callable(closure))
        if callable(closure):
            judged = self._judging(closure, optimizer, handed)
            if len(args) > 1:
                return self._attended(optimizer, (args[0], judged, *args[2:]), kwargs)
            return self._attended(optimizer, args, {**kwargs, "closure": judged})
        undo, given = self._judge_gradients(optimizer, handed), None
        if isinstance(undo, Skip):
            self._scaler.is_skipped = handed.from_scaler
            given = self._leave_out(optimizer, args, kwargs)
        elif undo is not None:
            self._undo = undo
            undo.apply()
        if self._rescue is not None and self._rescue.lr_factor != 1.0 and given is None:
            given = self._attended(optimizer, args, kwargs)
        self._judge.add_overhead(_perf_counter() - started)
        return given

    def _attended(self, optimizer: Optimizer, args: _Args, kwargs: _Kwargs) -> _Arguments:
        interceptor = interceptor_of(optimizer)
        if interceptor is not None:
            return interceptor.intercept(_Attended(optimizer, self), args), kwargs
        self._slow_down()
        return args, kwargs

    def _slow_down(self) -> None:
        """Multiplies the learning rate for the step that begins, if that is due."""
        if self._rescue is not None and self._rescue.lr_factor != 1.0 and self._slowed is None:
            self._slowed = Slowed(self._member.optimizer, self._rescue.lr_factor)
            self._slowed.apply()

    def _speed_up(self) -> None:
        if self._slowed is not None:
            self._slowed.give_back()
            self._slowed = None

    def _judging(self, closure: Callable[[], Any], optimizer: Optimizer, handed: Handed) -> Callable[[], Any]:
        """The closure, which judges the gradients of this step: they do not exist before it has run."""
        self._is_evaluating, self._loss = False, None
        if self._closure_backup is not None:
            self._closure_backup.begin(optimizer)

        @functools.wraps(closure)
        def judged() -> Any:
            self._is_evaluating = True
            if self._closure_backup is not None:
                self._closure_backup.look()
            loss = self._loss = closure()
            started = _perf_counter()
            if self._undo is not None:  # the closure has computed new gradients
                self._undo.forget()
                self._undo = None
            undo = self._judge_gradients(optimizer, handed, loss)
            if isinstance(undo, Skip):
                undo = self._skip_strategy.neutralize(optimizer)
            if undo is not None:
                self._undo = undo
                undo.apply()
            self._judge.add_overhead(_perf_counter() - started)
            self._is_evaluating = False
            return loss

        return judged

    def _judge_gradients(self, optimizer: Optimizer, handed: Handed, loss: Any = None) -> Undo | Skip | None:
        try:
            undo = self._judge.judge(self._member, optimizer, handed, self._evaluations == 0, loss)
        except BaseException as error:  # a verdict that raises, Ctrl-C: half a step is let go of
            self._judge.abandon(self._member)
            if self._is_kept(error):
                return None
            self._scaler.abandon(optimizer)  # here too: a closure may catch this
            self._observed.end_step()  # too many skips in a row: what was sampled belongs to this step
            raise
        if not self._handles:
            return None  # a sink has detached the guard
        self._evaluations += 1
        run = self._run
        if self._may_be_short and run.waits and not run.is_vetoed:
            if self._met_odd:
                self._met_odd, self._odd = False, run.fingerprint
            run.is_short = run.ranks is None and run.is_alike and run.fingerprint not in (None, self._odd)
        return undo

    def _is_kept(self, error: BaseException) -> bool:
        """Whether an error of the guard is kept from the training. It is not if the gradients are left scaled."""
        on_error = self._run.on_error
        return on_error is not None and isinstance(error, Exception) and not self._scaler.holds and on_error(error)

    def _end_attended(self) -> None:
        """A step that was attended to is over, or has raised."""
        self._speed_up()
        if self._undo is not None:
            self._undo.give_back()
            self._undo = None
        if self._closure_backup is not None:
            self._closure_backup.end()
        self._loss = None
