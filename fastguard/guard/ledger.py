"""What becomes of the record of a step: its number, history and sinks, the count of skips, and the log."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

from ..diagnosis import RULES
from ..errors import NonFiniteGradientsError
from ..history import NUM_DEFERRED
from ..stats import StepStats
from .checkup import Checkup
from .recorder import Recorder

_log = logging.getLogger("fastguard")
EQUAL_NORMS_RUN = 10  # from so many on, the rule "already-clipped" is asked


class Ledger:
    """Enters records, in the order of their steps. Knows neither the guard nor the optimizers.

    Attributes:
        recorder: where the records go.
        step: number of the next step.
        max_consecutive_skips: from so many skips in a row on, there is an error that is due.
        skipped_run: numbers of the skipped steps in a row, up to now.
        skipped_tensors: what was not finite in them; an ordered set.
        due: the error to raise when too many steps in a row were skipped, which the caller does when it can.
        checkup: what to ask in `steps_to_checkup` steps, when those before it are in the history.
    """

    def __init__(self, sinks: Iterable[Any], max_consecutive_skips: int) -> None:
        self.recorder = Recorder(sinks)
        self.step = 0
        self.max_consecutive_skips = max_consecutive_skips
        self.skipped_run: list[int] = []
        self.skipped_tensors: dict[str, None] = {}
        self.due: NonFiniteGradientsError | None = None
        self._told_already_clipped = False
        self.checkup: Checkup | None = None
        self.steps_to_checkup = 0

    def enter(self, record: StepStats, finite: bool, first: bool, from_scaler: bool) -> None:
        """Takes the record of an evaluation: the first of its step, or another of the step that was entered last.

        Args:
            finite: what `record.is_finite` says.
            from_scaler: a scaler is at work, for which bad gradients are nothing unusual.
        """
        kept = self.recorder.last
        if first or kept is None or kept.step != record.step:
            self.recorder.begin(record)
            self.steps_to_checkup -= 1
            if self.steps_to_checkup == 0 and self.checkup is not None:
                self.steps_to_checkup = self.checkup.interval
                self.checkup.check()
            if record.step % NUM_DEFERRED == NUM_DEFERRED - 1 and not self._told_already_clipped:
                self._say_already_clipped()
            if not finite:
                self._say_nonfinite(record, from_scaler)
        else:
            # Of several evaluations the first bad gradients are what to keep, and the last one decides.
            if kept.is_finite and not finite:
                kept = record
                self._say_nonfinite(record, from_scaler)
            self.recorder.replace(dataclasses.replace(kept, skipped=record.skipped))
        if record.skipped or self.skipped_run:
            self._count_skip(record)

    def raise_due(self) -> None:
        """Raises `due`, once."""
        due, self.due = self.due, None
        if due is not None:
            self.recorder.flush()
            raise due

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this."""
        return {
            "step": self.step,
            "skipped_run": list(self.skipped_run),
            "skipped_tensors": list(self.skipped_tensors),
            "history": self.recorder.history_with_last().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self.recorder.history.load_state_dict(state["history"])
        self.step = int(state["step"])
        self.skipped_run = list(state["skipped_run"])
        self.skipped_tensors = dict.fromkeys(state["skipped_tensors"])
        self.due = None

    def _count_skip(self, record: StepStats) -> None:
        run, step = self.skipped_run, record.step
        if run and run[-1] < step - 1:  # a step was taken in between
            run.clear()
            self.skipped_tensors.clear()
        if not record.skipped:
            if run and run[-1] == step:  # an earlier evaluation of this step was bad
                run.pop()
            return
        if not run or run[-1] != step:
            run.append(step)
        self.skipped_tensors.update(dict.fromkeys(record.nonfinite))
        if len(run) >= self.max_consecutive_skips:
            self.due = NonFiniteGradientsError(run, list(self.skipped_tensors))

    def _say_nonfinite(self, record: StepStats, from_scaler: bool) -> None:
        level = logging.INFO if from_scaler else logging.WARNING  # a scaler finds its scale by overflowing
        names = record.nonfinite
        count = f"{len(names)} tensor" + ("" if len(names) == 1 else "s")
        where = f"first in {names[0]!r}, {count} in all" if names else "only their norm overflowed"
        what = "skipped" if record.skipped else "taken all the same"
        _log.log(level, "step %d: gradients are not finite (%s); the step was %s", record.step, where, what)

    def _say_already_clipped(self) -> None:
        if self.recorder.history.equal_run < EQUAL_NORMS_RUN:
            return
        finding = RULES["already-clipped"](self.recorder.history)
        if finding is not None:
            self._told_already_clipped = True
            _log.warning("%s %s", finding.summary, finding.recommendation)
