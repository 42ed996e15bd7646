"""What becomes of a step that has arrived: history and sinks, the run of skips, the checkup, and the log."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .._text import count, listed
from ..diagnosis.checkup import Checkup, glance_stride
from ..errors import NonFiniteGradientsError, PolicySkipsError
from ..kernels import cpu
from ..kernels.cpu import LedgerState
from ..records import StepStats, TrainingHistory
from ..records.failures import Failures
from ..records.history import entry_of
from ..records.slot import HEADER_WORDS, NUM_SLOTS, STEP, batch_end, read_headers
from ..records.table import without_rows
from ..sinks import JsonlSink, SafeSink
from ..sinks.jsonl import with_samples
from .ring import TABLE, Ring

_log = logging.getLogger("fastguard")
_time = time.time


class Ledger(LedgerState):
    """Delivers what the ring holds, in the order of the steps. Knows neither the guard nor the optimizers."""

    def __init__(self, ring: Ring, failures: Failures, sinks: Iterable[Any], max_consecutive_skips: int) -> None:
        self.ring = ring
        self.failures = failures
        self.level = logging.WARNING  # of warnings about steps; lower if another process logs the same
        self._left: list[SafeSink] = []  # to the process that forked this one
        self._history = TrainingHistory()
        self._take_sinks([SafeSink(sink) for sink in sinks])
        self.is_writing = False  # a sink is at work on a record; it may ask for anything but another record then
        self.when_idle: Callable[[], None] | None = None  # called once when no sink is at work
        self._is_delivering = False  # stays True where an interrupt came
        self.skips = ConsecutiveSkips(max_consecutive_skips)
        self.checkup: Checkup | None = None  # asked at intervals, when the steps before are in the history
        self.fetch: Callable[[], None] | None = None  # attaches arrived samples to the ring
        self.seen: Callable[[], None] | None = None  # called when a step of a device has arrived in the ring
        self.where_among_ranks: Callable[[], str] = str  # says which ranks hold NaN or Inf
        self._whole_step = -1  # the newest step of which a line does not say all

    def _take_sinks(self, sinks: list[SafeSink]) -> None:
        self.sinks = sinks
        self._due = sinks  # those that the newest record still has to go to; fewer after an interrupt
        self.writes_lines = cpu.json_line is not None and any(sink.takes_lines for sink in sinks)
        self._only_log = sinks[0] if self.writes_lines and len(sinks) == 1 else None
        inner = None if self._only_log is None else self._only_log.sink
        self._only_file = inner if type(inner) is JsonlSink else None  # C++ writes to it, not to one of a subclass
        self._noted: dict[str, Any] = {}
        self._num_noted = -1  # changes of what is known of the model that the sinks were told
        if sinks and not self._history.model.run_id:
            self._history.note_model(run_id=os.urandom(6).hex())

    def change_sinks(self, sinks: Iterable[Any]) -> None:
        """Has the steps to come go to `sinks`; those that are not among them are told all, and closed."""
        new = [SafeSink(sink) for sink in sinks]
        self.deliver()
        kept = {id(sink.sink) for sink in new}
        for sink in self.sinks:
            if id(sink.sink) not in kept:
                sink.close()
        self._take_sinks(new)
        self._begin_batch()

    def watch(self, checkup: Checkup) -> None:
        self.checkup = checkup
        checkup.plan(self._history.newest_step)
        self._begin_batch()

    @property
    def history(self) -> TrainingHistory:
        """The run so far, without the step that is held."""
        self.deliver(but_held=not self.ring.is_over)
        return self._history

    def open(self) -> None:
        """Another step begins, over the newest one's table: makes room for it. Cost: 30 us as a batch ends."""
        if self.ring.num_open >= self.ring.limit:
            self.deliver()
        elif self.writes_lines:
            self.write()

    @property
    def _is_bad(self) -> bool:
        """Whether the newest step was skipped or is not finite: its table tells which tensors."""
        return self.ring.num_open > 0 and (self.ring.is_skipped or not self.ring.is_finite)

    def deliver(self, *, but_held: bool = False) -> None:
        """Hands open slots to history and sinks; all, or all but the newest, to which more may be added. Where an
        exception breaks it off (Ctrl-C, a sink that exits), the next call goes on from there."""
        ring = self.ring
        but_held = but_held or self.is_writing
        if ring.num_open <= but_held:
            return
        if not but_held:
            if self.fetch is not None:
                self.fetch()
            if self.sinks:
                self.write()
            if not ring.num_open:
                return  # a sink has closed the guard
        record = None if but_held else ring.latest()
        self._extend(ring.num_open - but_held, record)
        if record is None:
            ring.keep_newest()
        else:
            ring.close()
        self._end_delivery()

    def _extend(self, count: int, newest: StepStats | None) -> None:
        """Hands the first `count` open slots to the history, but for what it has; `newest` is the last one's record."""
        history, samples = self._history, self.ring.samples
        known = history.newest_step if self._is_delivering else -1
        self._is_delivering = True
        entries = [entry for entry in read_headers(self.ring.headers, count) if entry.step > known]
        for place, entry in enumerate(entries):
            if newest is not None and entry.step == newest.step:
                entries[place] = entry_of(newest, entry.overhead_s)
            elif entry.step in samples:
                history.take_samples(entry.step, entry.lr, samples.pop(entry.step))
        history.extend(entries, () if newest is None else (newest,))
        if history.last is not None and history.last.is_finite:  # else its rows tell which tensors are not
            history.last = replace(history.last, tensors=without_rows(history.last.tensors))

    def _end_delivery(self) -> None:
        """What happens now and then, between steps."""
        self._is_delivering = False
        if self.checkup is not None:
            for finding in self.checkup.look(self._history.newest_step):
                for sink in self.sinks:
                    sink.tell(finding.to_dict())
        self._begin_batch()

    def deliver_without_table(self) -> None:
        """As `deliver`, where the newest table was written over. Nobody wants it: what does is delivered before."""
        ring = self.ring
        if ring.num_open:
            self._extend(ring.num_open, None)
        ring.forget()
        self._end_delivery()

    def write(self) -> None:
        """Hands the newest slot to the sinks that have not had it: as a line of JSON if the sink takes lines and the
        line says all of it. `deliver` calls this, and C++ where it does not write the line itself. An exception that a
        sink lets pass is raised when all have had their turn. Whom it broke off is due again. Cost: 3 us for a log as a
        line; no record is made."""
        ring, line, error = self.ring, None, None
        step = int(ring.words[HEADER_WORDS * ring.newest + STEP])
        if ring.told[0] == step or self.is_writing or not ring.num_open:
            return
        self._note_model()
        if self.writes_lines and step != self._whole_step and not self._is_bad:
            line = cpu.json_line(ring.headers, ring.newest, ring.found[TABLE], _time())
            if step in ring.samples:
                line = with_samples(line, ring.samples[step])
        is_done = False
        try:
            self.is_writing = True
            for sink in self._due:
                try:
                    if line is None or not sink.write_line(step, line):
                        sink.write(ring.latest())
                except BaseException as raised:
                    error = raised
            is_done = error is None
        finally:
            try:
                if not is_done:
                    self._due = [sink for sink in self._due if sink.newest != step]
                if is_done or not self._due:
                    self._due, ring.told[0] = self.sinks, step
            finally:
                self.is_writing = False  # whatever came in between: else nothing would be written any more
            call, self.when_idle = self.when_idle, None
            if call is not None:
                call()
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame

    def _begin_batch(self) -> None:
        """Sets how many slots may be open: up to the end of the batch, and to where the checkup wants a step."""
        ring, checkup, first = self.ring, self.checkup, self._history.newest_step + 1
        last = min(batch_end(first), self._history.tensors.due_at(first))
        if checkup is not None:
            last = max(first, min(last, checkup.check_at))
        limit = end = last - first + 1
        if checkup is not None and checkup.glance_at < last:
            limit = max(first, checkup.glance_at) - first + 1
            ring.calm, ring.stride = checkup.calm_below, glance_stride(first)
        is_alone = self._is_bad or (bool(self.sinks) and not self.writes_lines)
        ring.limit, ring.end = (1, 0) if is_alone else (min(limit, NUM_SLOTS), min(end, NUM_SLOTS))

    def want_record(self) -> None:
        """A line does not say all of the newest step: the sinks get its record."""
        self._whole_step = self.ring.step
        self.ring.samples.setdefault(self._whole_step, {})

    def enter(self, *, is_bad: bool, from_scaler: bool, is_lone: bool = False) -> None:
        """Takes note of a slot that took the long way, or is not a clean step's. `is_bad`: its norm is not finite, and
        that is news; `from_scaler`: a scaler is at work, for which bad gradients are nothing unusual; `is_lone`: one
        element holds nearly all of its gradients, so that the history is to see its table."""
        ring = self.ring
        if is_bad or is_lone or ring.is_skipped:
            ring.limit, ring.end = min(ring.limit, ring.num_open), 0
        num_taken = self._history.num_nonfinite_applied  # of LBFGS, say, of which no step can be skipped
        if is_bad and (ring.is_skipped or num_taken < 8 or num_taken & (num_taken - 1) == 0):
            level = min(self.level, logging.INFO) if from_scaler else self.level  # which overflows to find its scale
            record, among_ranks = ring.latest(), self.where_among_ranks()
            names = record.nonfinite
            first = f"first in {names[0]!r}, {count(len(names), 'tensor')} in all" if names else ""
            where = "; ".join(filter(None, (first or "only their norm overflowed", among_ranks)))
            what = "skipped" if record.skipped else "taken all the same"
            _log.log(level, "step %d: gradients are not finite (%s); the step was %s", record.step, where, what)
        elif ring.is_skipped and ring.latest().is_skipped_by_policy:
            record, policy = ring.latest(), self._history.model.clip_policy
            where = f"{record.norm:.4g}, above {record.trigger:.4g}" if record.trigger else ""
            where = f"for a norm of {where}" if where else "whatever its norm is"  # as after a loss
            where = f"for a norm in {listed(record.over, 4)}" if record.over else where
            _log.log(self.level, "step %d: skipped by the clip policy %s, %s", record.step, policy, where)
        if self.skips.steps or ring.is_skipped:
            self.skips.count(ring.latest(), self._history.model.clip_policy)

    def raise_due(self) -> None:
        """Raises the error of too many skips in a row, once; or hands it to `skips.instead`."""
        due, self.skips.due = self.skips.due, None
        if due is not None and self.skips.instead is not None:
            self.skips.instead(due)
        elif due is not None:
            self.deliver()
            raise due

    def history_with_held(self) -> TrainingHistory:
        """The history with the step that is held, which stays held. Cost: a copy of the window if one is held."""
        history, ring = self.history, self.ring
        if not ring.is_held:
            return history
        complete = history.copy()
        complete.add(ring.latest(), overhead_s=ring.header(ring.newest).overhead_s)
        return complete

    def detach_after_fork(self) -> None:
        """Leaves the sinks to the parent process: does not write to them, and does not close them."""
        self._left, self.writes_lines = self.sinks, False
        self.sinks = self._due = [SafeSink(self._say_silent)]
        self.ring.told[0] = self.ring.step

    def _say_silent(self, record: StepStats) -> None:
        self.sinks = []
        _log.warning(
            "this process was forked from one whose training is guarded, and takes a step itself (%d): no sink is "
            "told. Make the optimizer and its guard here, after the fork, for records of its own.",
            record.step,
        )

    def close(self) -> None:
        """Delivers what is held and closes the sinks; from inside a sink, when that is done with its record."""
        if self.is_writing:
            self.when_idle = self.close
            return
        self.deliver()
        self.note_changes()
        for sink in self.sinks:
            sink.close()

    def lost(self) -> dict[str, int]:
        return {sink.name: sink.num_lost for sink in (*self._left, *self.sinks) if sink.num_lost}

    def costs(self) -> list[dict[str, Any]]:
        """What each sink that was given a step costs; see `SafeSink.cost`."""
        return [cost for sink in (*self._left, *self.sinks) if (cost := sink.cost())["num_steps"]]

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a run that is resumed at `step` needs of this."""
        skips, history = self.skips, self.history_with_held().state_dict()
        run = {"step": step, "skipped_run": [*skips.steps], "skipped_by_policy": [*skips.by_policy]}
        return {**run, "skipped_tensors": [*skips.tensors], "history": history}

    def go_on(self, history: TrainingHistory, *skips: Any) -> None:
        """Goes on from what was saved; `skips` as for `ConsecutiveSkips.go_on`. Cannot fail."""
        self.history.become(history)
        self._noted, self._num_noted = {}, -1
        self.skips.go_on(*skips)
        self.ring.told[0] = None  # steps may have the numbers of earlier ones
        for sink in self.sinks:
            sink.newest = -1
        self._whole_step = -1
        if self.checkup is not None:
            self.checkup.plan(history.newest_step)
        self._begin_batch()

    def note_changes(self) -> None:
        """Tells the sinks what became known of the model since the newest step, such as that the run has ended."""
        if self._history.num_steps:
            self._note_model()

    def _note_model(self) -> None:
        """Tells the sinks what has changed of what is known of the model."""
        num_noted = self._history.model.num_changes
        if num_noted == self._num_noted:
            return
        known = self._history.model.state()
        changed = {name: value for name, value in known.items() if value != self._noted.get(name)}
        for sink in self.sinks:
            sink.note(changed)
        self._noted, self._num_noted = known, num_noted  # after it: what an interrupt broke off is told again


class ConsecutiveSkips:
    def __init__(self, limit: int) -> None:
        self.limit = limit  # number of steps from which an error is due
        self.steps: list[int] = []
        self.by_policy: list[int] = []  # those that the clip policy skipped
        self.tensors: dict[str, None] = {}  # names of those that were not finite; an ordered set
        self.due: NonFiniteGradientsError | None = None
        self.instead: Callable[[NonFiniteGradientsError], None] | None = None  # called instead of raising `due`

    def clear(self) -> None:
        self.steps.clear()
        self.by_policy.clear()
        self.tensors.clear()

    def count(self, record: StepStats, policy: str) -> None:
        """Counts a skipped step, or starts again after one that was taken; `policy` is the repr of the clip policy."""
        run, step = self.steps, record.step
        if run and run[-1] < step - 1:  # a step was taken in between
            self.clear()
        if not record.skipped:
            if run and run[-1] == step:  # an earlier evaluation of this step was bad
                run.pop()
            return
        if not run or run[-1] != step:
            run.append(step)
            if record.is_skipped_by_policy:
                self.by_policy.append(step)
        self.tensors.update(dict.fromkeys(record.nonfinite))
        if len(run) >= self.limit:
            self.due = NonFiniteGradientsError(run, [*self.tensors])
            if self.by_policy:
                self.due = PolicySkipsError(run, [*self.tensors], self.by_policy, policy)

    def go_on(self, steps: list[int], tensors: Sequence[str], by_policy: Sequence[int]) -> None:
        """Resumes from what was saved. Never raises."""
        self.steps, self.tensors = steps, dict.fromkeys(tensors)
        self.by_policy = [step for step in by_policy if step in steps]
        self.due = None
