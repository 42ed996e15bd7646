"""The history of a run in bounded memory: a window of steps, running aggregates, and the bad steps. Skipped and
non-finite steps are counted, but enter no aggregate and no baseline."""

from __future__ import annotations

import math
import operator
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, get_origin, get_type_hints

from . import codec, values
from .codec import Count, Spread, readers_of
from .columns import norm_parts, picker
from .events import Entry, GradientCosine, LoneElement, NonFiniteEvent, Total, Validation
from .log import LogReader, fill
from .model import ModelNotes
from .running import Bucket, Overview, Running, Summary, Trend, quantiles
from .samples import NUM_BATCHES, NUM_FIRST, ModuleActivity, Sampled, SampledBatch, UpdateRatios, WeightStats, share_of
from .slot import extension
from .table import StepStats
from .tensors import MAX_TENSORS, TensorTracks

VERSION = 3
NUM_FIRST_EVENTS = 16
NUM_LAST_EVENTS = 64
NUM_TOTALS = 64
NUM_LONE = 16
NUM_VALIDATIONS, NUM_COSINES = 256, 256
# Of the toolkit's checks.
NUM_NEWEST = 5
NUM_PLATEAU = 50
MIN_PLATEAU_STEPS = 100
PLATEAU_SPREAD = 0.001
MIN_VALIDATIONS = 20
NUM_EVENT_NAMES = 8
EQUAL_NORMS_TOLERANCE = 1e-3
LONE_SHARE, LONE_AMONG = 0.99, 256  # share of the squares in one element of at least 256; as in csrc/step.cpp
SAMPLES = ("activations", "weights", "batches", "grad_cosine")  # fields of a record

_isfinite = math.isfinite
_COUNTERS = (  # a step changes these before it enters `recent`
    *("num_steps", "num_skipped", "skip_run", "longest_skip_run", "longest_skip_run_end", "num_scaled", "num_timed"),
    *("overhead_total_s", "num_bad_losses", "first_bad_loss_step", "last_bad_loss_step"),
)
# What is counted, and its counter: both are empty, or neither is.
_COUNTED = {"recent": "num_steps", "clean": "num_clean"}
_COUNTED |= dict.fromkeys(("first_events", "last_events"), "num_nonfinite")
_fold_usual = getattr(extension, "fold", None)  # without the extension all steps are taken one by one
_norm_of = operator.attrgetter("norm")
_needed = picker("numel", "sum_sq", "sum", "abs_max")


def _in_window(field: str, doc: str) -> Any:
    found = operator.attrgetter(field)
    return property(lambda self: [value for value in map(found, self.recent) if value is not None], doc=doc)


class TrainingHistory:
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

    num_steps: Count
    num_clean: Count
    num_skipped: Count
    num_clipped: Count
    num_nonfinite: Count
    num_nonfinite_applied: Count
    num_scaled: Count
    skip_run: Count
    longest_skip_run: Count
    longest_skip_run_end: int
    equal_run: Count
    num_timed: Count
    num_bad_losses: Count
    first_bad_loss_step: int
    last_bad_loss_step: int
    norm_min: float
    norm_max: float
    overhead_total_s: float
    _equal_low: Spread
    _equal_high: Spread
    losses: Running
    lrs: Running
    recent: deque[Entry]
    clean: deque[Entry]
    first_events: list[NonFiniteEvent]
    last_events: deque[NonFiniteEvent]
    first_nonfinite: dict[str, Count]
    validations: deque[Validation]
    model: Annotated[ModelNotes, ModelNotes.of]
    loss_trend: Trend
    norm_trend: Trend
    overview: Overview
    tensors: TensorTracks
    updates: UpdateRatios
    activations: Sampled[ModuleActivity]
    weights: Sampled[WeightStats]
    batches: list[SampledBatch]
    grad_cosines: deque[GradientCosine]
    lone_elements: deque[LoneElement]

    def __init__(self, window: int = 512) -> None:
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}")
        for name, make in _KINDS.items():
            setattr(self, name, make())
        self.first_bad_loss_step = self.last_bad_loss_step = -1
        self.norm_min, self.norm_max = math.inf, -math.inf
        self.recent, self.clean = deque(maxlen=window), deque(maxlen=window)
        self.last_events = deque(maxlen=NUM_LAST_EVENTS)
        self.validations = deque(maxlen=NUM_VALIDATIONS)
        self.grad_cosines, self.lone_elements = deque(maxlen=NUM_COSINES), deque(maxlen=NUM_LONE)
        self.activations = Sampled(ModuleActivity.from_dict, lambda module: not module.stats.is_finite)
        self.weights = Sampled(WeightStats.from_dict, lambda weight: weight.num_nonfinite > 0)
        self.window = window
        self.last: StepStats | None = None
        self.revision = 0
        self.lacks_norms = False
        self._totals: deque[Total] = deque(maxlen=NUM_TOTALS)
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

    def _another(self) -> TrainingHistory:
        return type(self)(self.window)

    def state_dict(self) -> dict[str, Any]:
        """Everything but `last`, as plain dicts, lists, strings and numbers that strict JSON can hold.

        Cost: 0.4 KB a step of the window, and the size of the samples.
        """
        return {"version": VERSION, **codec.dump_fields(self, _READERS)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; a smaller window keeps the newest steps. `last` becomes None.

        Raises:
            ValueError: the state is of another version, or lacks an entry or has a wrong one, which it names. Nothing
                is changed then.
        """
        self.become(self.restored(state_dict))

    def restored(self, state_dict: dict[str, Any]) -> TrainingHistory:
        """Another history with this one's window and the past of `state_dict`; raises as `load_state_dict` does."""
        version = values.mapping(state_dict).get("version")
        if version != VERSION or isinstance(version, bool):
            remedy = "It was not made by this version's `TrainingHistory.state_dict`; start a new history."
            raise values.MisfitError(f"must be of version {VERSION}, got {version!r}", ("version",), remedy=remedy)
        twin = self._another()
        codec.load_fields(twin, _READERS, state_dict)
        for items, counter in _COUNTED.items():
            number, held = getattr(twin, counter), len(getattr(twin, items))
            if number < held or bool(number) is not bool(held):
                raise values.MisfitError(f"must be at least the {held} of `{items}`, got {number}", (counter,))
        if not twin.equal_run <= twin.num_clean:
            raise values.MisfitError(f"must be at most {twin.num_clean}, got {twin.equal_run}", ("equal_run",))
        return twin

    def become(self, other: TrainingHistory) -> None:
        """Takes over the past of `other`, which must not be used any more. Cannot fail."""
        revision = self.revision
        self.__dict__.update(other.__dict__)
        self.revision = revision + 1

    def copy(self) -> TrainingHistory:
        """Another history with the same past; `last` is shared.

        Cost: 30 us at a window of 512, and 1 us a tensor, sampled module and sampled weight.
        """
        twin = self._another()
        for name in _READERS:
            setattr(twin, name, codec.copied(getattr(self, name)))
        twin.last, twin._totals, twin.lacks_norms = self.last, self._totals.copy(), self.lacks_norms
        twin.revision += 1
        return twin

    @property
    def newest_step(self) -> int:
        """Number of the newest step; -1 before there was one."""
        return self.recent[-1].step if self.recent else -1

    @property
    def num_skipped_by_policy(self) -> int:
        """How many steps were skipped with finite gradients, and not left out by recovery."""
        skipped_nonfinite = self.num_nonfinite - self.num_nonfinite_applied
        return max(0, self.num_skipped - skipped_nonfinite - self.model.num_left_out)

    @property
    def equal_norm(self) -> float:
        """The norm that the `equal_run` newest clean steps share: the middle of their range."""
        return (self._equal_low + self._equal_high) / 2

    @property
    def has_gradients(self) -> bool:
        """Whether any step had a gradient other than zero: without one nothing is known of a run."""
        return self.norm_max > 0.0 or self.num_nonfinite > 0

    clip_rate = share_of("num_clipped", "num_clean", "Share of the run's clean steps that were clipped; 0.0 if none.")
    skip_rate = share_of("num_skipped", "num_steps", "Share of the run's steps that were skipped; 0.0 without any.")

    def norm_quantiles(self, q: Sequence[float] = (0.05, 0.5, 0.95)) -> tuple[float, ...]:
        """Quantiles of the norms in the window of clean steps; NaNs if it is empty.

        Equivalent to: `numpy.quantile(norms, q)`.

        Cost: sorts the window, 0.1 ms at 512.
        """
        return quantiles([entry.norm for entry in self.clean], q)

    def overhead_quantiles(self, q: Sequence[float] = (0.5,)) -> tuple[float, ...]:
        """Quantiles of the seconds that guarding added to each step of the window; NaNs if none was measured."""
        return quantiles([entry.overhead_s for entry in self.recent if entry.overhead_s is not None], q)

    step = _in_window("step", "Numbers of the steps in the window.")
    grad_norm = _in_window("norm", "Gradient norms in the window, non-finite ones too.")
    loss = _in_window("loss", "Losses in the window, of the steps that have one, non-finite ones too.")
    val_loss = _in_window("val_loss", "Validation losses in the window, of the steps that have one.")
    learning_rate = _in_window("lr", "Learning rates in the window, of the steps that have one.")

    def diagnose(self) -> dict[str, Any]:
        """The toolkit's three checks: a dict of "status", "issues", "recommendations".

        The status is "healthy", "warning", "critical", or, before the first step, "no-evidence".

        `LOSS_EXPLOSION`: NaN or Inf among the last 5 losses. `LOSS_PLATEAU`: from 100 losses on, (max - min) / mean of
        the last 50 is below 0.001. `OVERFITTING`: from 20 validation losses on, the training loss of the last quarter
        is below that of the first quarter, and the validation loss above. The rules of `fastguard.diagnosis` say more.

        >>> import fastguard
        >>> history = fastguard.TrainingHistory()
        >>> history.record(0, loss=float("nan"), grad_norm=1.0, lr=1e-3)
        >>> history.diagnose()["status"]
        'critical'
        """
        losses = self.loss
        found: list[tuple[str, str, str]] = []  # severity, issue, recommendation
        bad = sum(not math.isfinite(loss) for loss in losses[-NUM_NEWEST:])
        if bad:
            issue = f"LOSS_EXPLOSION: {bad} of the last {len(losses[-NUM_NEWEST:])} losses are NaN or Inf"
            found.append(("critical", issue, "Divide the learning rate by 10, and clip the gradients (max_norm=1.0)"))
        newest = [loss for loss in losses[-NUM_PLATEAU:] if math.isfinite(loss)]
        if len(losses) >= min(MIN_PLATEAU_STEPS, self.window) and len(newest) == NUM_PLATEAU:
            mean = sum(newest) / len(newest)
            spread = (max(newest) - min(newest)) / abs(mean) if mean else math.inf
            if spread < PLATEAU_SPREAD:
                within = f"within {100 * spread:.2g} % of their mean {mean:.4g}"
                issue = f"LOSS_PLATEAU: the last {NUM_PLATEAU} losses are {within}"
                found.append(("warning", issue, "Raise the learning rate, or change its schedule"))
        pairs = [v for v in self.validations if math.isfinite(v.train_loss)]
        if len(pairs) >= MIN_VALIDATIONS:
            quarter = len(pairs) // 4
            parts = pairs[:quarter], pairs[-quarter:]
            train = [sum(v.train_loss for v in part) / quarter for part in parts]
            validation = [sum(v.val_loss for v in part) / quarter for part in parts]
            if train[1] < train[0] and validation[1] > validation[0]:
                fell = f"training loss fell from {train[0]:.4g} to {train[1]:.4g}"
                issue = f"OVERFITTING: {fell}, validation loss rose from {validation[0]:.4g} to {validation[1]:.4g}"
                found.append(("warning", issue, "Add dropout or weight decay, get more data, or stop earlier"))
        calm = "healthy" if self.num_steps else "no-evidence"
        status = min((severity for severity, *_ in found), default=calm)  # "critical" comes before "warning"
        return {"status": status, "issues": [one[1] for one in found], "recommendations": [one[2] for one in found]}

    def __repr__(self) -> str:
        return f"TrainingHistory({self.num_steps} steps, window={self.window})"


def entry_of(record: StepStats, overhead_s: float | None = None) -> Entry:
    norm, nans, infs = norm_parts(record.tensors.total_row())
    if nans or infs or not norm < math.inf:
        norm = math.nan if nans else math.inf
    known = record.loss, record.val_loss, record.lr, record.loss_scale
    return Entry(record.step, norm, record.clip_coef, record.skipped, *known, overhead_s)


_READERS = readers_of(TrainingHistory)
_HINTS: dict[str, Any] = get_type_hints(TrainingHistory)
_KINDS = {name: get_origin(hint) or hint for name, hint in _HINTS.items() if get_origin(hint) is not Sampled}
