"""The two step hooks on one optimizer: judge the gradients before the step, put things back after it.

Most steps go the short way, one call: nothing about them is unusual, and whatever could be asked was answered at the
step before. The others go the long way (`long_way.py`), which asks. With the extension, torch calls hooks in C++
(`csrc/step_hooks.cpp`), which take the short way where nothing else is due, and call these for every other step.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from .. import kernels
from ..clip import Limits
from ..kernels import cpu
from ..records import NUM_LONE
from ..records.slot import HEADER_WORDS, NORM, OVERHEAD_S
from ..recovery import Rescue
from .judge import Judge
from .ledger import Ledger
from .long_way import LongWay
from .ring import FINGERPRINT, POSITIONS, WRITTEN
from .run import Member, Run
from .sampling import Sampling
from .scalars import learning_rate
from .state import StepPostHook, StepPreHook
from .wrappers import left_to_python

_perf_counter = time.perf_counter
_get_num_threads = torch.get_num_threads


# Bits of what `_C.take_step` returns.
_ODD, _OTHER_PARAMETERS, _NOT_FINITE, _SCALED, _ODD_LR, _DROPPED, _OVER, _UNSUITED, _LONE, _MISSING = (
    1 << bit for bit in range(10)
)


class Hooks(LongWay):
    """The guard's hooks on one optimizer, which owns them. Arguments: as for `LongWay`."""

    def __init__(
        self, run: Run, member: Member, judge: Judge, ledger: Ledger, sampling: Sampling, rescue: Rescue | None = None
    ) -> None:
        super().__init__(run, member, judge, ledger, sampling, rescue)
        optimizer = member.optimizer
        self._take_step: Any = cpu.take_step
        self._scales = not judge.divides(optimizer)
        self._num_lone = 0
        before, after, *_ = [left_to_python(one) for one in (self._before, self._after, self._finish, ledger.write)]
        if StepPreHook is not None:
            before, after = StepPreHook(self, before), StepPostHook(self, after)
        self._handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def remove(self) -> None:
        """Leaves the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._give_back_late()
        if self._member.is_alive:
            self._scaler.leave(self._member.optimizer)

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
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
                self._sampling.observers.begin_step(step)
            if ring.num_open:
                self._ledger.open()
            if not self._handles:
                return None  # a sink has detached the guard
            limits: Any = math.inf if clip is None else clip.limit
            if limits is None:
                loss, limits = ring.loss, clip.next_limits()
                if limits is None:
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
                limits,
                run.skip_nonfinite,
                self._scales,
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

    def _finish(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, outcome: int, elapsed: float) -> Any:
        """Counts a step that was measured in `elapsed` seconds as taken, and does what `outcome` asks for.

        C++ calls this too, unless the step was clean.
        """
        started = _perf_counter() - elapsed
        run, ring = self._run, self._run.ring
        if outcome & (_ODD | _UNSUITED):
            self._met_odd = outcome == _ODD
            self._ledger.deliver_without_table()
            return self._go_the_long_way(optimizer, args, kwargs)
        step, slot = run.step, ring.num_open
        ring.newest, ring.num_open, run.step = slot, slot + 1, step + 1
        if step >= run.buffers_at and not outcome & _NOT_FINITE:
            run.follow_buffers(step, False)
        given = self._follow(optimizer, outcome, args, kwargs) if outcome else None
        ring.words[HEADER_WORDS * slot + OVERHEAD_S] = _perf_counter() - started
        return given

    def _follow(
        self, optimizer: torch.optim.Optimizer, outcome: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
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
                self._sampling.end_step()  # too many skips in a row: what was sampled belongs to this step
                raise
            if ring.is_skipped:
                return self._leave_out(optimizer, args, kwargs, None)
        if outcome & _LONE and self._num_lone < NUM_LONE:
            self._num_lone += 1
            self._ledger.enter(is_bad=False, from_scaler=False, is_lone=True)
        return None

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if self._depth:
                self._depth -= 1
                if self._depth:
                    return
                if self._slowed is not None:  # `_end_attended`, without its frames
                    self._speed_up()
                if self._undo is not None:
                    self._undo.give_back()
                    self._undo = None
                if self._closure_backup is not None:
                    self._closure_backup.end()
                self._loss = None
                if self._scaler.holds or self._scaler.is_skipped:
                    self._scaler.give_back(optimizer)
            elif self._undo is not None:
                self._undo.give_back()
                self._undo = None
            run = self._run
            is_due = run.has_more_to_do or run.marks_ends or run.step > run.ends_at
            if is_due and not self._silent and not self._member.is_paused:
                run.has_more_to_do = self._sampling.end_step()
            if self._rescue is not None and self._judge.is_between_steps and not self._member.is_paused:
                self._rescue.end_step()
            self._silent = False
        except BaseException as error:
            if self._is_kept(error):
                return
            self._scaler.abandon(optimizer)
            raise
