"""What a run has been so far, in bounded memory: a window of steps, running aggregates, and the bad steps.

Skipped and non-finite steps are counted, and enter no aggregate and no baseline.
"""

from __future__ import annotations

import math
import operator
import os
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from ..stats import StepStats
from ..stats.columns import norm_parts, picker
from ..stats.log import LogReader
from ..stats.running import Running
from ..stats.samples import ModuleActivity, WeightStats
from . import state
from .batches import NUM_COSINES, GradientCosine, SampledBatches
from .bulk import extend_equal_run, take_deferred, take_usual
from .checks import diagnose_losses
from .entries import Entries, Entry, LoneElement, NonFiniteEvent, Total, Validation
from .loading import fill
from .model import ModelNotes
from .overview import Overview
from .sampled import Sampled
from .series import COUNTERS, Series
from .tensors import MAX_TENSORS, TensorTracks
from .trend import Trend
from .updates import UpdateRatios

NUM_FIRST_EVENTS = 16
NUM_LAST_EVENTS = 64
NUM_EVENT_NAMES = 8
NUM_DEFERRED = 32
NUM_VALIDATIONS = 256
_AT_ONCE = 4  # deferred steps, from so many on it pays

NUM_TOTALS = 64
NUM_LONE = 16
LONE_SHARE = 0.99  # of the squares, in one element of at least so many; csrc/step.cpp has the same
LONE_AMONG = 256

_isfinite = math.isfinite
_norm_of, _skipped_of = operator.attrgetter("norm"), operator.attrgetter("skipped")
_for_totals = picker("numel", "sum", "abs_max")
_for_lone = picker("numel", "sum_sq", "abs_max")


class TrainingHistory(Series):
    """What a run has been so far, fed with one record a step.

    Args:
        window: how many steps each window holds.

    Attributes:
        recent: the newest `window` steps, whatever they were, as `Entry`s.
        clean: the newest `window` steps that were neither skipped nor non-finite: the baseline of every rule.
        last: the newest record, if it came through `add`; not saved by `state_dict`.
        num_steps, num_clean, num_skipped, num_nonfinite: counts over the whole run.
        num_clipped: clean steps whose gradients were scaled down.
        num_nonfinite_applied: non-finite steps that were not skipped: parameters may hold NaN since.
        num_scaled: steps whose gradients carried a GradScaler's scale.
        skip_run, longest_skip_run: skipped steps in a row, now and at most; `longest_skip_run_end` is that run's
            last step.
        log_norm, losses, val_losses, lrs: `Running` aggregates over the clean steps of the whole run; `log_norm` of
            ln(norm), zero norms left out.
        norm_min, norm_max: least and largest norm of a clean step; inf and -inf before there was one.
        first_events, last_events: the first 16 and the newest 64 non-finite steps (the same ones, while there are few).
        first_nonfinite: how often each tensor was the first bad one in backward order; of the first 4096 such.
        equal_run: clean steps in a row, up to now, whose norms lie within 1e-3 of one another.
        overhead_total_s, num_timed: seconds spent on guarding, and the steps they were measured on.
        num_bad_losses, first_bad_loss_step, last_bad_loss_step: steps whose loss was NaN or Inf, skipped ones too.
        loss_trend, norm_trend: `Trend`s of the loss and of ln(norm) over the clean steps: where they began, stand, were
            at best, and their spikes.
        overview: the whole run in at most 256 buckets (`Overview`).
        tensors: a `TensorTrack` for each gradient, brought up to date at a few steps.
        activations, weights: what was sampled, in windows of sixteen samples by name.
        batches: forward passes of the whole model that were looked at: pairs of step and `BatchSample`, at most 256.
        grad_cosines: pairs of a step and the cosine between its gradient and the one before, where that was taken: the
            newest 256.
        lone_elements: the newest 16 clean steps at which one element of at least 256 held 99 % of the gradient's
            square, where the step's table was looked at: on the CPU all such steps, until there were 16.
        updates: the median update ratio of the sampled steps: the first, the largest, the newest 64 (`UpdateRatios`).
        validations: the newest 256 validation losses, each with the training loss at that time.
        model: what the guard told of the model (`ModelNotes`).
        has_ended: whether this is the whole of a run, as a log is taken to be; not saved.
        lacks_norms: whether this is a log of which no line has a gradient norm; not saved.
        revision: grows with every change; not saved.

    Cost: bounded memory: about 0.4 KB a step of the window, 0.1 MB for the overview, 0.5 KB a tensor, and 1 KB a
    sample of a module or parameter, sixteen of each at most.
    """

    def __init__(self, window: int = 512) -> None:
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}")
        self.window = window
        self.last: StepStats | None = None
        self.revision = 0
        self.has_ended = self.lacks_norms = False
        self._deferred: list[Entry] = []
        self._num_begun = 0  # of them, in whose taking at once an interrupt came
        self._noted: int | None = None  # a step whose NonFiniteEvent is noted while it is not deferred yet
        self._totals: deque[Total] = deque(maxlen=NUM_TOTALS)
        for name in COUNTERS:
            setattr(self, name, 0)
        self.norm_min = math.inf
        self.norm_max = -math.inf
        self.overhead_total_s = 0.0
        self._equal_low = self._equal_high = 0.0
        self.log_norm, self.losses, self.val_losses, self.lrs = Running(), Running(), Running(), Running()
        self.recent: deque[Entry] = deque(maxlen=self.window)
        self.clean: deque[Entry] = deque(maxlen=self.window)
        self.first_events: list[NonFiniteEvent] = []
        self.last_events: deque[NonFiniteEvent] = deque(maxlen=NUM_LAST_EVENTS)
        self.first_nonfinite: dict[str, int] = {}
        self.first_bad_loss_step = self.last_bad_loss_step = -1
        self.loss_trend, self.norm_trend, self.overview, self.tensors = Trend(), Trend(), Overview(), TensorTracks()
        self.activations: Sampled[ModuleActivity] = Sampled(ModuleActivity.from_dict, _holds_nonfinite)
        self.weights: Sampled[WeightStats] = Sampled(WeightStats.from_dict, _is_spoilt)
        self.updates = UpdateRatios()
        self.batches = SampledBatches()
        self.grad_cosines: deque[GradientCosine] = deque(maxlen=NUM_COSINES)
        self.lone_elements: deque[LoneElement] = deque(maxlen=NUM_LONE)
        self.validations: deque[Validation] = deque(maxlen=NUM_VALIDATIONS)
        self.model = ModelNotes()

    def add(self, record: StepStats, overhead_s: float | None = None) -> None:
        """Takes the record of one step.

        Args:
            record: the step, with its loss if there is one.
            overhead_s: seconds that guarding added to the step, if measured.

        Cost: 4 us, and on average 3 us more for the tensors, however many; a non-finite step also looks at every row.
        No sync.
        """
        self.defer(record, overhead_s)
        self.settle()

    def defer(self, record: StepStats, overhead_s: float | None = None) -> None:
        """As `add`, but aggregates and windows follow at the next `settle`, or after 32 steps.

        In training this code is cold, and costs several times what it costs in a loop over itself; thirty-two steps at
        once cost hardly more than one.
        """
        row = record.tensors.total_row()
        norm, nans, infs = norm_parts(row)
        self.last = record
        if nans or infs or not norm < math.inf:
            self.settle()
            norm = math.nan if nans else math.inf
            names = record.nonfinite
            first = tuple(names[:NUM_EVENT_NAMES])
            counts = len(names), int(nans), int(infs)
            if self._noted != record.step:  # else an interrupt came since
                self._note_nonfinite(NonFiniteEvent(record.step, first, *counts, record.skipped, record.loss_scale))
        elif not record.skipped:
            numel, sum_sq, largest = _for_lone(row)
            if numel >= LONE_AMONG and largest * largest >= LONE_SHARE * sum_sq > 0.0:
                self._note_lone(record, largest)
            looked_at = self.tensors.num_samples
            self.tensors.see(record.step, record.tensors)
            if self.tensors.num_samples > looked_at or not len(record.tensors):
                numel, total, largest = _for_totals(row)
                if numel:
                    of_each = zip(record.tensors.names, record.tensors.column("abs_max"))  # no list of all is made
                    holders = tuple(islice((name for name, of_one in of_each if of_one == largest), 4))
                    self._totals.append(Total(record.step, total, largest, norm * math.sqrt(numel), holders))
        if record.activations:
            self.activations.add(record.step, record.activations)
        if record.weights:
            self.weights.add(record.step, record.weights)
            self.updates.add(record.step, record.weights, record.lr, self.model.judged_weights)
        if record.batches:
            self.batches.add(record.step, record.batches)
        if record.grad_cosine is not None:
            self.grad_cosines.append(GradientCosine(record.step, record.grad_cosine))
        self.revision += 1
        known = record.loss, record.val_loss, record.lr, record.loss_scale
        self._deferred.append(Entry(record.step, norm, record.clip_coef, record.skipped, *known, overhead_s))
        self._noted = None
        if len(self._deferred) >= NUM_DEFERRED:
            self.settle()

    def defer_entry(self, entry: Entry) -> None:
        """As `defer`, without the table: for steps that were neither skipped nor non-finite. Cost: 0.3 us."""
        if entry.is_clean:
            self.tensors.let_pass()
        elif not _isfinite(entry.norm):  # counted, though nobody can say any more which tensors
            self.settle()
            if self._noted != entry.step:
                self._note_nonfinite(NonFiniteEvent(entry.step, (), 0, 0, 0, entry.skipped, entry.loss_scale))
        self.revision += 1
        self._deferred.append(entry)
        self._noted = None
        if len(self._deferred) >= NUM_DEFERRED:
            self.settle()

    def defer_all(self, entries: list[Entry]) -> None:
        """As `defer_entry` for each of some. Cost: 1 us, where all are clean."""
        if not _isfinite(sum(map(_norm_of, entries))) or True in map(_skipped_of, entries):
            for entry in entries:
                self.defer_entry(entry)
            return
        self.tensors.let_pass(len(entries))
        self.revision += len(entries)
        self._deferred += entries
        self._noted = None
        if len(self._deferred) >= NUM_DEFERRED:
            self.settle()

    def defer_entries(self, entries: Entries) -> None:
        """As `defer_entry` for each of many, to the bit. Cost: 1.5 us each where all are usual."""
        if entries.are_usual:
            self.settle()
            take_usual(self, entries)
        else:
            for entry in entries:
                self.defer_entry(entry)

    @property
    def newest_step(self) -> int:
        """Number of the newest step, deferred or not; -1 before there was one."""
        entries = self._deferred or self.recent
        return entries[-1].step if entries else -1

    @property
    def num_skipped_by_policy(self) -> int:
        """How many steps were skipped with finite gradients, and not left out by recovery."""
        skipped_nonfinite = self.num_nonfinite - self.num_nonfinite_applied
        return max(0, self.num_skipped - skipped_nonfinite - self.model.num_left_out)

    def settle(self) -> None:
        """Takes into account what was deferred. After an interrupt the next call goes on from there."""
        deferred, recent = self._deferred, self.recent
        if deferred and recent and recent[-1] is deferred[0]:  # the interrupt came when it had been counted
            del deferred[0]
        if len(deferred) >= _AT_ONCE and take_deferred(self):
            return
        deferred = self._deferred
        while deferred:
            self._push(deferred[0])
            del deferred[0]

    def record(self, step: int, loss: float, grad_norm: float, lr: float, val_loss: float | None = None) -> None:
        """Takes a step by its numbers alone, where no guard makes records: the toolkit's interface.

        >>> history = TrainingHistory()
        >>> history.record(0, loss=2.5, grad_norm=1.0, lr=1e-3)
        >>> history.loss, history.grad_norm
        ([2.5], [1.0])
        """
        norm, validation = float(grad_norm), None if val_loss is None else float(val_loss)
        entry = Entry(int(step), norm, 1.0, False, float(loss), validation, float(lr), None, None)
        self.settle()
        if not _isfinite(norm):
            self._note_nonfinite(NonFiniteEvent(entry.step, (), 0, 0, 0, False, None))
            self._noted = None
        self._push(entry)

    def note_model(self, **facts: Any) -> None:
        """Takes facts about the model and its optimizer that no record shows. What is not given stays as it was.

        Args:
            facts: any of the fields of `ModelNotes`.

        Raises:
            TypeError: for a fact that there is not; lists those that there are.
            ValueError: for a value that the fact cannot have, such as `steps_per_epoch` below 1.

        >>> history = TrainingHistory()
        >>> history.note_model(without_gradient=["stem.weight"], steps_per_epoch=100)
        >>> history.model.without_gradient
        ('stem.weight',)
        """
        self.model.update(**facts)
        self.revision += 1

    def totals_since(self, step: int) -> list[Total]:
        """All gradients together at clean steps from `step` on, where they were looked at; at most 64, not saved."""
        return [total for total in self._totals if total.step >= step]

    def diagnose(self) -> dict[str, Any]:
        """The toolkit's three checks: a dict of "status", "issues", "recommendations".

        The status is "healthy", "warning", "critical", or, before the first step, "no-evidence".

        `LOSS_EXPLOSION`: NaN or Inf among the last 5 losses. `LOSS_PLATEAU`: from 100 losses on, (max - min) / mean of
        the last 50 below 0.001. `OVERFITTING`: from 20 validation losses on, the training loss of the last quarter
        below the first's, the validation loss above. The rules of `fastguard.diagnosis` say more.

        >>> history = TrainingHistory()
        >>> history.record(0, loss=float("nan"), grad_norm=1.0, lr=1e-3)
        >>> history.diagnose()["status"]
        'critical'
        """
        return diagnose_losses(self)

    @classmethod
    def from_jsonl(cls, path: str | os.PathLike[str], window: int = 512) -> TrainingHistory:
        """The history of the run whose log a `JsonlSink` wrote to `path`, also of one that a crash cut off.

        The rules see what they saw in training, as far as it was logged: tables of tensors come at every
        `tensors_every`-th step, and `model` is as it was at last.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is no such log; says in which line.

        Cost: 8 us a line where orjson is installed, 12 us where not. No lines are kept.
        """
        return cls.from_log(LogReader(path), window, path)

    @classmethod
    def from_log(
        cls, log: Iterable[Mapping[str, Any]], window: int = 512, path: str | os.PathLike[str] = "the log"
    ) -> TrainingHistory:
        """As `from_jsonl`, of what `fastguard.sinks.read_jsonl` gave; errors name `path`."""
        history = cls(window)
        fill(history, log, path)
        history.has_ended = True
        return history

    def _note_nonfinite(self, event: NonFiniteEvent) -> None:
        self.num_nonfinite += 1
        if not event.skipped:
            self.num_nonfinite_applied += 1
        self._noted = event.step
        self.last_events.append(event)
        if len(self.first_events) < NUM_FIRST_EVENTS:
            self.first_events.append(event)
        known = self.first_nonfinite
        if event.names and (event.names[0] in known or len(known) < MAX_TENSORS):
            known[event.names[0]] = known.get(event.names[0], 0) + 1

    def _note_lone(self, record: StepStats, largest: float) -> None:
        """One element outweighs all others; said before the tensor's track takes it for usual."""
        if self.lone_elements and self.lone_elements[-1].step >= record.step:
            return  # an interrupt came since
        of_each = record.tensors.abs_max
        if largest not in of_each:
            return  # a record of all gradients together
        name = record.tensors.names[of_each.index(largest)]
        usual = self.tensors[name].norm if name in self.tensors else 0.0
        self.lone_elements.append(LoneElement(record.step, name, largest, usual))

    def _push(self, entry: Entry) -> None:
        step, norm, clip_coef, skipped, loss, val_loss, lr, loss_scale, overhead_s = entry
        self.num_steps += 1
        self.revision += 1
        self.recent.append(entry)
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
            log_norm = math.log(norm)
            self.log_norm.add(log_norm)
            self.norm_trend.add(step, log_norm)
        if norm < self.norm_min:
            self.norm_min = norm
        if norm > self.norm_max:
            self.norm_max = norm
        if loss is not None:
            self.losses.add(loss)
            self.loss_trend.add(step, loss)
        if val_loss is not None:
            self.val_losses.add(val_loss)
            if _isfinite(val_loss):
                train = self.loss_trend.mean if self.loss_trend.count else math.nan
                self.validations.append(Validation(step, val_loss, train))
        if lr is not None:
            self.lrs.add(lr)
        extend_equal_run(self, (norm,))

    def state_dict(self) -> dict[str, Any]:
        """Everything but `last`, as plain dicts, lists, strings and numbers that strict JSON can hold.

        Cost: 0.4 KB a step of the window, and what the samples hold.
        """
        return state.dump(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; with a smaller window, the newest steps of it. `last` becomes None.

        Raises:
            ValueError: for a state of another version, or one that lacks an entry or has a wrong one, which it names.
                Nothing is changed then.
        """
        self.become(self.restored(state_dict))

    def restored(self, state_dict: dict[str, Any]) -> TrainingHistory:
        """Another history with this one's window and the past of `state_dict`; raises as `load_state_dict` does."""
        state.check(state_dict)
        twin = TrainingHistory(self.window)
        state.load(twin, state_dict)
        return twin

    def become(self, other: TrainingHistory) -> None:
        """Takes over the past of `other`, which is of no use any more. Cannot fail."""
        revision = self.revision
        self.__dict__.update(other.__dict__)
        self.revision = revision + 1

    def copy(self) -> TrainingHistory:
        """Another history with the same past; `last` is shared.

        Cost: 20 us at a window of 512, and 1 us a tensor, sampled module and sampled weight.
        """
        self.settle()
        twin = TrainingHistory(self.window)
        state.copy(self, twin)
        twin.last = self.last
        twin._totals = self._totals.copy()
        twin.lacks_norms = self.lacks_norms
        twin.revision += 1
        return twin

    def __repr__(self) -> str:
        return f"TrainingHistory({self.num_steps} steps, window={self.window})"


def _holds_nonfinite(module: ModuleActivity) -> bool:
    return not module.stats.is_finite


def _is_spoilt(weight: WeightStats) -> bool:
    return bool(weight.num_nonfinite)
