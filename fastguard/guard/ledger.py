"""What becomes of a step that has arrived: history and sinks, the run of skips, the checkup, and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..diagnosis import RULES, Finding, diagnose
from ..history import NUM_DEFERRED, Entry, TrainingHistory
from ..kernels import cpu
from ..sinks import SafeSink
from ..sinks.sink import TIMED_EVERY
from ..stats import StepStats
from ..stats.failures import Failures
from ..stats.slot import HEADER_WORDS, STEP, read_headers
from .checkup import FIRST_GLANCE, GLANCE_EVERY, Checkup
from .ring import NUM_SLOTS, TABLE, Ring
from .scalars import scalar
from .skips import SkipRun, say_nonfinite, say_skipped_by_policy

_log = logging.getLogger("fastguard")
_time, _perf_counter = time.time, time.perf_counter
_AT_ONCE = 4  # open slots, from so many on it pays
EQUAL_NORMS_RUN = 10  # from so many on, the rule "already-clipped" is asked


class Ledger:
    """Delivers what the ring holds, in the order of the steps. Knows neither the guard nor the optimizers.

    Attributes:
        ring: where steps arrive.
        failures: where rules that raise are counted.
        sinks: each in a `SafeSink`.
        writes_lines: whether some of them take a clean step as a line, so that it goes there before it is delivered.
        is_writing: whether a sink has a record in hand, which then may ask for anything but another record.
        when_idle: called, once, when it has not any more.
        skips: the run of skipped steps; the error that is due is raised by the caller when it can.
        checkup: asked at intervals, when the steps before are in the history.
        fetch: attaches to the ring what was sampled and has arrived.
        seen: told that a step has arrived in the ring; None: nobody wants to know.
        where_among_ranks: says which ranks hold what is not finite; nothing where there is one.
        level: at which it is logged that a step is out of the ordinary; lower where another process says the same.
    """

    def __init__(self, ring: Ring, failures: Failures, sinks: Iterable[Any], max_consecutive_skips: int) -> None:
        self.ring = ring
        self.failures = failures
        self.level = logging.WARNING
        self._left: list[SafeSink] = []  # to the process that forked this one
        self._take_sinks([SafeSink(sink) for sink in sinks])
        self.is_writing = False
        self.when_idle: Callable[[], None] | None = None
        self._is_delivering = False  # stays True where an interrupt came
        self._history = TrainingHistory()
        self.skips = SkipRun(max_consecutive_skips)
        self.checkup: Checkup | None = None
        self.fetch: Callable[[], None] | None = None
        self.seen: Callable[[], None] | None = None
        self.where_among_ranks: Callable[[], str] = str
        self._steps_to_checkup = self._steps_to_glance = 0
        self._told_already_clipped = False
        self._looks_for_clippers_at = NUM_DEFERRED - 1

    def _take_sinks(self, sinks: list[SafeSink]) -> None:
        self.sinks = sinks
        self._due = sinks  # those that the newest record still has to go to; fewer after an interrupt
        self._json_line: Any = cpu.json_line
        self._write_slot: Any = cpu.write_line
        self.writes_lines = cpu.json_line is not None and any(sink.takes_lines for sink in sinks)
        is_alone = self.writes_lines and len(sinks) == 1 and sinks[0].write_slot is not None
        self._slots: Any = sinks[0] if is_alone else None
        self._noted: dict[str, Any] = {}
        self._num_noted = 0  # changes of what is known of the model that the sinks were told

    def change_sinks(self, sinks: Iterable[Any]) -> None:
        """Has the steps to come go to `sinks`; those that are not among them are told all, and closed."""
        new = [SafeSink(sink) for sink in sinks]
        self.deliver()
        kept = {id(sink.sink) for sink in new}
        for sink in self.sinks:
            if id(sink.sink) not in kept:
                sink.close()
        self._take_sinks(new)
        self._set_limit()

    def watch(self, checkup: Checkup) -> None:
        """Has `checkup` asked from now on; first when its interval's last step begins."""
        self.checkup = checkup
        self._steps_to_checkup = max(1, checkup.interval - 1) if checkup.interval else 0
        self._steps_to_glance = FIRST_GLANCE if checkup.interval else 0
        self._set_limit()

    @property
    def history(self) -> TrainingHistory:
        """The run so far, without the step that is held."""
        self.deliver(but_held=not self.ring.is_over)
        self._history.settle()
        return self._history

    def open(self) -> None:
        """Another step begins: what has to be delivered before is delivered. Cost: 5 us every so many steps."""
        if self.ring.num_open >= self.ring.limit:
            self.deliver()

    def deliver(self, *, but_held: bool = False) -> None:
        """Hands open slots to history and sinks; all, or all but the newest, to which more may be added.

        Where an exception breaks it off (Ctrl-C, a sink that exits), the next call goes on from there.
        """
        ring = self.ring
        but_held = but_held or self.is_writing
        if ring.num_open <= but_held:
            return
        if not but_held:
            if self.fetch is not None:
                try:
                    self.fetch()
                except ReferenceError:
                    self.fetch = None  # the guard is gone, and hands over its last record
            if self.sinks:
                self.write()
                if not ring.num_open:
                    return  # a sink has closed the guard
        num_delivered = ring.num_open - but_held
        last, record = ring.step - ring.num_open, None if but_held else ring.latest()
        self._defer(ring.num_open - 1, record)
        if record is None:
            ring.keep_newest()
        else:
            ring.close()
        self._is_delivering = False
        self._follow(num_delivered, last)

    def _defer(self, count: int, record: StepStats | None) -> None:
        """Hands the first `count` open slots to the history, and `record` of the next one, but for what it has."""
        ring, history = self.ring, self._history
        known = history.newest_step if self._is_delivering else -1
        self._is_delivering = True
        entries = None if known >= 0 or count < _AT_ONCE else read_headers(ring.words, count, Entry)
        if entries is None:
            for index in range(count):
                header = ring.header(index)
                if header.step > known:
                    history.defer_entry(Entry(*header))
        else:
            history.defer_all(entries)
        if record is not None and record.step > known:
            history.defer(record, ring.header(count).overhead_s)

    def deliver_without_table(self) -> None:
        """As `deliver`, where the newest table was written over. Nobody wants it: what does is delivered before."""
        ring = self.ring
        count, last = ring.num_open, ring.step
        self._defer(count, None)
        ring.forget()
        self._is_delivering = False
        if count:
            self._follow(count, last)

    def write(self, *, as_lines: bool = False) -> None:
        """Has the sinks take the newest slot, those that have not yet. `deliver` does so too.

        An exception that a sink lets pass is raised when all have had their turn. Whom it broke off is due again.

        Args:
            as_lines: it is a clean step's; a sink that wants no more of it than a line of JSON gets that.

        Cost: 3 us for a log as a line; no record is made.
        """
        ring, line, error = self.ring, None, None
        step = int(ring.words[HEADER_WORDS * ring.newest + STEP])
        if ring.told[0] == step or self.is_writing or not ring.num_open:
            return
        if self._history.model.num_changes != self._num_noted:
            self._note_model()
        if as_lines:
            line = self._json_line(ring.headers, ring.newest, ring.found[TABLE], _time())
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
            if self.when_idle is not None:
                self._call_when_idle()
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame

    def write_line(self) -> None:
        """As `write`, of a clean step. Cost: two frames and one call into C++, where a log is the only sink."""
        ring, sink = self.ring, self._slots
        step = int(ring.words[HEADER_WORDS * ring.newest + STEP])
        is_timed = step % TIMED_EVERY == 0
        started = _perf_counter() if is_timed else 0.0
        if (
            sink is None
            or self._due is not self.sinks
            or self.is_writing
            or ring.told[0] == step
            or self._history.model.num_changes != self._num_noted
            or not sink.write_slot(step, self._write_slot, ring.headers, ring.newest, ring.found[TABLE], ring.told)
        ):
            self.write(as_lines=True)
            return
        sink.num_lines += 1
        if is_timed:
            sink.num_lines_timed += 1
            sink.line_seconds += _perf_counter() - started

    def _call_when_idle(self) -> None:
        call, self.when_idle = self.when_idle, None
        if call is not None:
            call()

    def _follow(self, num_delivered: int, last: int) -> None:
        """What happens now and then, between steps."""
        if not self._told_already_clipped and last % NUM_DEFERRED >= NUM_DEFERRED - num_delivered:
            self._say_already_clipped(last)
        if self._steps_to_checkup:
            self._steps_to_checkup -= num_delivered
            if self._steps_to_checkup <= 0 and self.checkup is not None:
                self._steps_to_checkup = self.checkup.interval
                self._tell(self.checkup.check())
            self._steps_to_glance -= num_delivered
            if self._steps_to_glance <= 0 and self.checkup is not None:
                self._steps_to_glance = GLANCE_EVERY
                self._tell(self.checkup.glance())
        self._set_limit()

    def _tell(self, found: Iterable[Finding]) -> None:
        for finding in found:
            for sink in self.sinks:
                sink.tell(finding.to_dict())

    def _set_limit(self) -> None:
        """How many slots may be open: as many as can wait for history, checkup and samples."""
        limit = min(NUM_SLOTS, self._history.tensors.due_in + 1, self._steps_to_checkup or NUM_SLOTS)
        ring = self.ring
        is_bad = ring.num_open > 0 and (ring.is_skipped or not ring.is_finite)  # its table tells which tensors
        ring.limit = 1 if is_bad or ring.samples or (self.sinks and not self.writes_lines) else limit

    def observe(self, loss: Any = None, val_loss: Any = None) -> None:
        """Adds a loss to the step just taken."""
        ring = self.ring
        if not ring.is_held:
            raise RuntimeError(
                "`observe` must follow a step that has not been handed to the sinks yet. Call it after "
                "optimizer.step(), before flush() and before the next step."
            )
        given = None if loss is None else scalar("loss", loss)
        if val_loss is not None:
            ring.note("val_loss", scalar("val_loss", val_loss))
        if given is not None:
            ring.note("loss", given)

    def enter(self, *, is_bad: bool, from_scaler: bool) -> None:
        """Takes note of a slot that took the long way, or is not a clean step's.

        Args:
            is_bad: its norm is not finite, and that is news.
            from_scaler: a scaler is at work, for which bad gradients are nothing unusual.
        """
        ring = self.ring
        ring.limit = min(ring.limit, ring.num_open)
        num_taken = self._history.num_nonfinite_applied  # of LBFGS, say, of which no step can be skipped
        if is_bad and (ring.is_skipped or num_taken < 8 or num_taken & (num_taken - 1) == 0):
            level = min(self.level, logging.INFO) if from_scaler else self.level  # which overflows to find its scale
            say_nonfinite(ring.latest(), level, self.where_among_ranks())
        elif ring.is_skipped and ring.latest().is_skipped_by_policy:
            say_skipped_by_policy(ring.latest(), self.level, self._history.model.clip_policy)
        if self.skips.steps or ring.is_skipped:
            self.skips.count(ring.latest(), self._history.model.clip_policy)

    def raise_due(self) -> None:
        """Raises the error that is due, once."""
        due = self.skips.take_due()
        if due is not None:
            self.deliver()
            raise due

    def history_with_held(self) -> TrainingHistory:
        """The history as it would be with the step that is held, which stays held.

        Cost: a copy of the history's window if a step is held.
        """
        history, ring = self.history, self.ring
        if not ring.is_held:
            return history
        complete = history.copy()
        complete.add(ring.latest(), overhead_s=ring.header(ring.newest).overhead_s)
        return complete

    def fall_silent(self) -> None:
        """From now on the sinks are another process's, that which forked this one: they are neither told nor closed."""
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
        if self._history.model.num_changes != self._num_noted:  # since the last record, as a report may find
            self._note_model()
        for sink in self.sinks:
            sink.close()

    def lost(self) -> dict[str, int]:
        """Records that each failing sink could not take."""
        return {sink.name: sink.num_lost for sink in (*self._left, *self.sinks) if sink.num_lost}

    def costs(self) -> list[dict[str, Any]]:
        """What each sink that was given a step costs; see `SafeSink.cost`."""
        return [cost for sink in (*self._left, *self.sinks) if (cost := sink.cost())["num_steps"]]

    def lend(self, magnitudes: Callable[[], Any]) -> None:
        """Lets sinks that want them ask for the magnitudes of the gradients there are when a record is handed over."""

        def measure() -> Any:
            with self.failures.kept("magnitudes for trackers", "Their histogram is missing."):
                try:
                    return magnitudes()
                except ReferenceError:
                    return None  # the guard is gone, and hands over its last record
            return None

        for sink in self.sinks:
            if hasattr(sink.sink, "measure"):
                sink.sink.measure = measure

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a run that is resumed at `step` needs of this."""
        return {
            "step": step,
            **self.skips.state(),
            "history": self.history_with_held().state_dict(),
        }

    def go_on(
        self,
        history: TrainingHistory,
        skipped_run: list[int],
        skipped_tensors: list[str],
        skipped_by_policy: Sequence[int] = (),
    ) -> None:
        """Goes on from what was saved. Cannot fail."""
        self.history.become(history)
        self.skips.go_on(skipped_run, skipped_tensors, skipped_by_policy)
        self.ring.told[0] = None  # steps may have the numbers of earlier ones
        for sink in self.sinks:
            sink.newest = -1
        if self._steps_to_glance:
            first = FIRST_GLANCE - history.num_steps
            self._steps_to_glance = first if first > 0 else GLANCE_EVERY
        self._set_limit()

    def _note_model(self) -> None:
        """Tells the sinks what has changed of what is known of the model."""
        known, num_noted = self._history.model.state(), self._history.model.num_changes
        changed = {name: value for name, value in known.items() if value != self._noted.get(name)}
        for sink in self.sinks:
            sink.note(changed)
        self._noted, self._num_noted = known, num_noted  # after it: what an interrupt broke off is told again

    def _say_already_clipped(self, last: int) -> None:
        self._history.settle()
        if self._history.equal_run < EQUAL_NORMS_RUN and last < self._looks_for_clippers_at:
            return
        self._looks_for_clippers_at = last + min(last, self._history.window)
        for finding in diagnose(self._history, rules=[RULES["already-clipped"]], failures=self.failures):
            self._told_already_clipped = True
            _log.log(self.level, "%s %s", finding.summary, finding.recommendation)
