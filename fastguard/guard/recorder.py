"""Where records go: held until the step's loss is known, then to the history and the sinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..history import TrainingHistory
from ..sinks import SafeSink
from ..stats import StepStats


def check_scalar(name: str, value: Any) -> None:
    """Raises ValueError for a tensor of more than one element. Does not synchronise."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"`{name}` must be a scalar, got a tensor of shape {tuple(value.shape)}. Reduce it first.")


def _scalar(name: str, value: Any) -> float:
    check_scalar(name, value)
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def loss_of(value: Any) -> float | None:
    """What a closure returned, if it is a loss: a number, or a tensor of one element."""
    if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return _scalar("loss", value)
    return None


class Recorder:
    """Holds the newest record back until the next step begins, so that `observe` can add to it."""

    def __init__(self, sinks: Iterable[Any]) -> None:
        self._history = TrainingHistory()
        self.sinks = [SafeSink(sink) for sink in sinks]
        self.last: StepStats | None = None
        self._pending = False
        self._overhead_s = 0.0
        self._attached: dict[int, dict[str, Any]] = {}  # by step, for records that have not come yet
        self._noted: dict[str, Any] = {}
        self._num_noted = 0  # changes of what is known of the model that the sinks were told
        self.fetch: Callable[[], None] | None = None  # attaches what was sampled and has arrived

    @property
    def is_pending(self) -> bool:
        """Whether `last` is held back, so that it can still be added to."""
        return self._pending

    @property
    def history(self) -> TrainingHistory:
        """The run so far, without the record that is held."""
        self._history.settle()
        return self._history

    def begin(self, record: StepStats) -> None:
        """Takes the record of a step; the one before it is complete and is delivered."""
        self.flush()
        if self.fetch is not None:  # what was sampled at the record's step was sent before the record
            self.fetch()
        if self._attached:
            for step in sorted(step for step in self._attached if step <= record.step):
                record = dataclasses.replace(record, **self._attached.pop(step))
        self.last = record
        self._pending = True

    def replace(self, record: StepStats) -> None:
        """Takes another record of the same step, in place of the one that is held."""
        self.last = record

    def attach(self, step: int, **fields: Any) -> None:
        """Adds what was sampled at a step (`activations`, `weights`) to its record, which may still be on its way.

        For a step whose record was delivered already, it goes to the next one.
        """
        last = self.last
        if last is not None and last.step >= step:
            if self._pending:
                self.last = dataclasses.replace(last, **fields)
                return
            step = last.step + 1
        self._attached.setdefault(step, {}).update(fields)

    def add_overhead(self, seconds: float) -> None:
        """Adds time that guarding took to the step just taken."""
        self._overhead_s += seconds

    def observe(self, loss: Any = None, val_loss: Any = None) -> None:
        """Adds a loss to the step just taken."""
        if self.last is None or not self._pending:
            raise RuntimeError(
                "`observe` must follow a step that has not been handed to the sinks yet. Call it after "
                "optimizer.step(), before flush() and before the next step."
            )
        changes: dict[str, Any] = {}
        if loss is not None:
            changes["loss"] = _scalar("loss", loss)
        if val_loss is not None:
            changes["val_loss"] = _scalar("val_loss", val_loss)
        self.last = dataclasses.replace(self.last, **changes)

    def flush(self) -> None:
        """Delivers the record that is held, if there is one."""
        if not self._pending or self.last is None:
            return
        self._pending = False
        overhead, self._overhead_s = self._overhead_s, 0.0
        self._history.defer(self.last, overhead)
        if self._history.model.num_changes != self._num_noted:
            self._note_model()
        for sink in self.sinks:
            sink.write(self.last)

    def _note_model(self) -> None:
        """Tells the sinks what has changed of what is known of the model."""
        known = self._history.model.state()
        self._num_noted = self._history.model.num_changes
        changed = {name: value for name, value in known.items() if value != self._noted.get(name)}
        self._noted = known
        for sink in self.sinks:
            sink.note(changed)

    def history_with_last(self) -> TrainingHistory:
        """The history as it would be after `flush`; the record that is held stays held.

        Cost: a copy of the history's window if a record is held.
        """
        if not self._pending or self.last is None:
            return self.history
        complete = self.history.copy()
        complete.add(self.last, overhead_s=self._overhead_s)
        return complete

    def close(self) -> None:
        """Delivers what is held and closes the sinks."""
        self.flush()
        for sink in self.sinks:
            sink.close()

    def lost(self) -> dict[str, int]:
        """Records that each failing sink could not take."""
        return {sink.name: sink.num_lost for sink in self.sinks if sink.num_lost}
