"""The history of a run in bounded memory: a window of steps, running aggregates, and the bad steps. Skipped and
non-finite steps are counted, but enter no aggregate and no baseline."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from .columns import norm_parts, picker
from .events import Entry, LoneElement, NonFiniteEvent, Total, Validation
from .loading import fill
from .log import LogReader
from .running import Bucket, Summary
from .sampled import NUM_BATCHES, NUM_FIRST, GradientCosine, SampledBatch
from .series import NUM_FIRST_EVENTS, Series
from .slot import extension
from .table import StepStats
from .tensors import MAX_TENSORS

NUM_EVENT_NAMES = 8
EQUAL_NORMS_TOLERANCE = 1e-3
LONE_SHARE, LONE_AMONG = 0.99, 256  # share of the squares in one element of at least 256; as in csrc/step.cpp
SAMPLES = ("activations", "weights", "batches", "grad_cosine")  # fields of a record

_isfinite = math.isfinite
_COUNTERS = (  # a step changes these before it enters `recent`
    *("num_steps", "num_skipped", "skip_run", "longest_skip_run", "longest_skip_run_end", "num_scaled", "num_timed"),
    *("overhead_total_s", "num_bad_losses", "first_bad_loss_step", "last_bad_loss_step"),
)
_fold_usual = getattr(extension, "fold", None)  # without the extension all steps are taken one by one
_norm_of = operator.attrgetter("norm")
_needed = picker("numel", "sum_sq", "sum", "abs_max")


class TrainingHistory(Series):
    """The history of a run so far. It gets one record a step.

    Args:
        window: how many steps each window holds.

    Attributes:
        recent: the newest `window` steps as `Entry`s, including skipped and non-finite ones.
        clean: the newest `window` steps that were neither skipped nor non-finite: the baseline of every rule.
        last: the newest record. Records of a guard's finite steps lack the rows of the tensors. Not saved.
        num_steps, num_clean, num_skipped, num_nonfinite: counts over the whole run.
        num_clipped: clean steps whose gradients were scaled down.
        num_nonfinite_applied: non-finite steps that were not skipped; parameters may contain NaN since then.
        num_scaled: steps whose gradients carried a GradScaler's scale.
        skip_run, longest_skip_run: the number of skipped steps in a row, now and at most; `longest_skip_run_end` is the
            last step of that run.
        losses, lrs: number, smallest, largest, sum and last over the clean steps of the whole run (`Running`).
        norm_min, norm_max: smallest and largest norm of a clean step; inf and -inf before there was one.
        first_events, last_events: the first 16 and the newest 64 non-finite steps; the two may overlap.
        first_nonfinite: for up to 4096 tensors, how often the tensor was the first bad one in backward order.
        equal_run: the newest clean steps in a row whose norms are within 1e-3 of one another.
        overhead_total_s, num_timed: seconds spent on guarding, and the number of steps on which they were measured.
        num_bad_losses, first_bad_loss_step, last_bad_loss_step: steps whose loss was NaN or Inf, also skipped ones.
        loss_trend, norm_trend: `Trend`s of the loss and of ln(norm) over the clean steps: first, current and best
            level, and spikes.
        overview: the whole run in at most 256 buckets (`Overview`).
        tensors: a `TensorTrack` for each gradient, updated at a few steps.
        activations, weights: sampled modules and parameters, in windows of sixteen samples by name.
        batches: sampled forward passes of the whole model: at most 256 pairs of a step and a `BatchSample`,
            the first eight and the newest.
        grad_cosines: the newest 256 pairs of a step and the cosine between its gradient and the one before.
        lone_elements: the newest 16 clean steps at which one element of at least 256 had 99 % of the gradient's square.
            On the CPU all such steps count until there are 16; elsewhere those whose table was read.
        updates: the median update ratio of the sampled steps: the first, the largest, the newest 64 (`UpdateRatios`).
        validations: the newest 256 validation losses, each with the training loss at that time.
        model: facts about the model and its optimizers (`ModelNotes`).
        lacks_norms: whether this is the history of a log without gradient norms; not saved.
        revision: grows with every change; not saved.

    Cost: bounded memory: about 0.4 KB a step of the window, 0.1 MB for the overview, 0.5 KB a tensor, and 1 KB a
    sample of a module or parameter, at most sixteen of each.
    """

    def __init__(self, window: int = 512) -> None:
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}")
        super().__init__(window)
        self._begun: tuple[int, list[Any]] | None = None  # a step, and the counters before it was counted
        self._noted: int | None = None  # a step whose event is noted, but whose numbers are not counted yet

    def extend(self, entries: list[Entry], records: Sequence[StepStats] = ()) -> None:
        """Takes the numbers of some steps, oldest first, and whole records of those steps for which there is one.

        Equivalent to: one call for each step, to the bit.

        Cost: 10 us, and 0.3 us a usual step with the C++ extension, else 4 us. A record costs 3 us more on average,
        however many tensors it has; a non-finite step also reads every row. No sync.
        """
        start = 0
        if records or not _isfinite(sum(map(_norm_of, entries))):
            known = {record.step: record for record in records}
            for place, entry in enumerate(entries):
                record, is_finite = known.get(entry.step), _isfinite(entry.norm)
                if not is_finite:
                    self._fold(entries, start, place)
                    start = place
                if record is not None or not is_finite:
                    self._look(entry, record)
        self._fold(entries, start, len(entries))
        self._noted = None
        self.revision += 1

    def add(self, record: StepStats, overhead_s: float | None = None) -> None:
        """Takes the record of one step, as `extend` does, and the seconds that guarding added to it, if measured."""
        self.extend([entry_of(record, overhead_s)], [record])

    has_ended = property(
        lambda self: self.model.has_ended,
        lambda self, has_ended: self.note_model(has_ended=has_ended),
        doc="Whether the guard was closed, or its framework finished training: `model.has_ended`, which logs hold.",
    )

    def record(self, step: int, loss: float, grad_norm: float, lr: float, val_loss: float | None = None) -> None:
        """Takes a step by its numbers alone, without a guard: the toolkit's interface.

        >>> history = TrainingHistory()
        >>> history.record(0, loss=2.5, grad_norm=1.0, lr=1e-3)
        >>> history.loss, history.grad_norm
        ([2.5], [1.0])
        """
        validation = None if val_loss is None else float(val_loss)
        self.extend([Entry(int(step), float(grad_norm), 1.0, False, float(loss), validation, float(lr), None, None)])

    def note_model(self, **facts: Any) -> None:
        """Takes facts about the model and its optimizer that no record shows. Other facts stay as they are.

        Args:
            facts: any of the fields of `ModelNotes`.

        Raises:
            TypeError: a fact is unknown; lists the known ones.
            ValueError: a value does not fit, such as `steps_per_epoch` below 1.

        >>> history = TrainingHistory()
        >>> history.note_model(without_gradient=["stem.weight"], steps_per_epoch=100)
        >>> history.model.without_gradient
        ('stem.weight',)
        """
        self.model.update(**facts)
        self.revision += 1

    def totals_since(self, step: int) -> list[Total]:
        """Totals of all gradients at clean steps from `step` on whose table was read; at most 64, not saved."""
        return [total for total in self._totals if total.step >= step]

    @classmethod
    def from_jsonl(cls, path: str | os.PathLike[str], window: int = 512) -> TrainingHistory:
        """The history of the run whose log a `JsonlSink` wrote to `path`, even if a crash cut it off.

        The rules see what they saw in training, as far as it was logged: the log has a table of tensors every
        `tensors_every` steps, and `model` has its newest facts.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a log; names the line.

        Cost: 8 us a line with orjson, 12 us without. No lines are kept.
        """
        return cls.from_log(LogReader(path), window, path)

    @classmethod
    def from_log(
        cls, log: Iterable[Mapping[str, Any]], window: int = 512, path: str | os.PathLike[str] = "the log"
    ) -> TrainingHistory:
        """As `from_jsonl`, from the records that `fastguard.sinks.read_jsonl` returned; errors name `path`."""
        history = cls(window)
        fill(history, log, path)
        return history

    def _look(self, entry: Entry, record: StepStats | None) -> None:
        """Takes everything about a step but its numbers."""
        if record is not None:
            self.last = record
        if not _isfinite(entry.norm):
            if self._noted == entry.step:
                return  # an interrupt came in between
            names = () if record is None else record.nonfinite
            nans, infs = (0, 0) if record is None else map(int, norm_parts(record.tensors.total_row())[1:])
            found = tuple(names[:NUM_EVENT_NAMES]), len(names), nans, infs
            event, known = NonFiniteEvent(entry.step, *found, entry.skipped, entry.loss_scale), self.first_nonfinite
            self.num_nonfinite += 1
            self.num_nonfinite_applied += not entry.skipped
            self._noted = entry.step
            self.last_events.append(event)
            if len(self.first_events) < NUM_FIRST_EVENTS:
                self.first_events.append(event)
            if names and (names[0] in known or len(known) < MAX_TENSORS):
                known[names[0]] = known.get(names[0], 0) + 1
        elif record is not None and not record.skipped:
            self._see_tensors(record, entry.norm)
        if record is not None:
            self.take_samples(record.step, record.lr, {name: getattr(record, name) for name in SAMPLES})

    def _see_tensors(self, record: StepStats, norm: float) -> None:
        row = record.tensors.total_row()
        numel, sum_sq, total, largest = _needed(row)
        if numel >= LONE_AMONG and largest * largest >= LONE_SHARE * sum_sq > 0.0:
            lone, of_each = self.lone_elements, record.tensors.abs_max
            is_known = bool(lone) and lone[-1].step >= record.step  # an interrupt came in between
            if not is_known and largest in of_each:  # else the record has only the total
                name = record.tensors.names[of_each.index(largest)]
                usual = self.tensors[name].norm if name in self.tensors else 0.0
                lone.append(LoneElement(record.step, name, largest, usual))
        is_seen = self.tensors.see(record.step, record.tensors)
        if numel and (is_seen or not len(record.tensors)):
            pairs = zip(record.tensors.names, record.tensors.column("abs_max"))  # makes no list of all names
            holders = tuple(islice((name for name, of_one in pairs if of_one == largest), 4))
            self._totals.append(Total(record.step, total, largest, norm * math.sqrt(numel), holders))

    def take_samples(self, step: int, lr: float | None, samples: Mapping[str, Any]) -> None:
        """Takes what was sampled beside the gradients of a step: fields of its record, `SAMPLES` among them."""
        if activations := samples.get("activations"):
            self.activations.add(step, activations)
        if weights := samples.get("weights"):
            self.weights.add(step, weights)
            self.updates.add(step, weights, lr, self.model.judged_weights)
        for batch in samples.get("batches") or ():
            self.batches.append(SampledBatch(step, batch))
            if len(self.batches) > NUM_BATCHES:
                del self.batches[NUM_FIRST]
        if (cosine := samples.get("grad_cosine")) is not None:
            self.grad_cosines.append(GradientCosine(step, cosine))
        self.revision += 1

    def _fold(self, entries: list[Entry], start: int, end: int) -> None:
        """Takes the numbers of `entries[start:end]` into windows and aggregates."""
        while start < end:
            if _fold_usual is not None:
                start = _fold_usual(self, entries, start, end, Bucket, Summary)
                if start == end:
                    return
            self._push(entries[start])
            start += 1

    def _push(self, entry: Entry) -> None:
        step, norm, clip_coef, skipped, loss, val_loss, lr, loss_scale, overhead_s = entry
        if self._begun is None or self._begun[0] != step:
            self._begun = step, [getattr(self, name) for name in _COUNTERS]
        for name, value in zip(_COUNTERS, self._begun[1]):  # of an interrupted call for this step
            setattr(self, name, value)
        self.num_steps += 1
        if not skipped:
            self.recent.append(entry)
            self._begun = None
        if loss is not None and not _isfinite(loss):
            self.num_bad_losses += 1
            self.last_bad_loss_step = step
            if self.first_bad_loss_step < 0:
                self.first_bad_loss_step = step
        if overhead_s is not None:
            self.overhead_total_s += overhead_s
            self.num_timed += 1
        if loss_scale is not None:
            self.num_scaled += 1
        if skipped:
            self.num_skipped += 1
            self.skip_run += 1
            if self.skip_run >= self.longest_skip_run:
                self.longest_skip_run = self.skip_run
                self.longest_skip_run_end = step
            self.overview.add(step, None, None, None)
            self.recent.append(entry)  # comes last: until then an interrupted step is due again
            self._begun = None
            return
        self.skip_run = 0
        if not _isfinite(norm):
            self.overview.add(step, None, None, None)
            return
        self.num_clean += 1
        self.clean.append(entry)
        if clip_coef != 1.0:
            self.num_clipped += 1
        self.overview.add(step, loss, norm, lr)
        if norm > 0.0:
            self.norm_trend.add(step, math.log(norm))
        self.norm_min, self.norm_max = min(self.norm_min, norm), max(self.norm_max, norm)
        self.losses.add(loss)
        if loss is not None:
            self.loss_trend.add(step, loss)
        if val_loss is not None and _isfinite(val_loss):
            train = self.loss_trend.mean if self.loss_trend.count else math.nan
            self.validations.append(Validation(step, val_loss, train))
        self.lrs.add(lr)
        low, high = min(self._equal_low, norm), max(self._equal_high, norm)
        if self.equal_run and high - low <= EQUAL_NORMS_TOLERANCE * low:
            self.equal_run += 1
        else:
            self.equal_run, low, high = 1, norm, norm
        self._equal_low, self._equal_high = low, high

    def __repr__(self) -> str:
        return f"TrainingHistory({self.num_steps} steps, window={self.window})"


def entry_of(record: StepStats, overhead_s: float | None = None) -> Entry:
    norm, nans, infs = norm_parts(record.tensors.total_row())
    if nans or infs or not norm < math.inf:
        norm = math.nan if nans else math.inf
    known = record.loss, record.val_loss, record.lr, record.loss_scale
    return Entry(record.step, norm, record.clip_coef, record.skipped, *known, overhead_s)
