"""What a history holds, as plain data that can be saved and loaded, and as rates, quantiles and lists."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from . import codec, values
from .codec import Count, Spread, readers_of
from .events import Entry, LoneElement, NonFiniteEvent, Total, Validation
from .model import ModelNotes
from .running import Overview, Running, Trend, quantiles
from .sampled import NUM_COSINES, GradientCosine, Sampled, SampledBatch, UpdateRatios
from .samples import ModuleActivity, WeightStats, share_of
from .table import StepStats
from .tensors import TensorTracks

_SeriesT = TypeVar("_SeriesT", bound="Series")
VERSION = 3
NUM_FIRST_EVENTS = 16
NUM_LAST_EVENTS = 64
NUM_TOTALS = 64
NUM_LONE = 16
NUM_VALIDATIONS = 256
# Of the toolkit's checks.
NUM_NEWEST = 5
NUM_PLATEAU = 50
MIN_PLATEAU_STEPS = 100
PLATEAU_SPREAD = 0.001
MIN_VALIDATIONS = 20
# What is counted, and its counter: both are empty, or neither is.
_COUNTED = {
    "recent": "num_steps",
    "clean": "num_clean",
    "first_events": "num_nonfinite",
    "last_events": "num_nonfinite",
}


def _in_window(field: str, doc: str) -> Any:
    found = operator.attrgetter(field)
    return property(lambda self: [value for value in map(found, self.recent) if value is not None], doc=doc)


class Series:
    """What is saved of a `TrainingHistory`."""

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

    def __init__(self, window: int) -> None:
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

    def _another(self) -> Any:
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

    def restored(self: _SeriesT, state_dict: dict[str, Any]) -> _SeriesT:
        """Another history with this one's window and the past of `state_dict`; raises as `load_state_dict` does."""
        version = values.mapping(state_dict).get("version")
        if version != VERSION or isinstance(version, bool):
            remedy = "It was not made by this version's `TrainingHistory.state_dict`; start a new history."
            raise values.MisfitError(f"must be of version {VERSION}, got {version!r}", ("version",), remedy=remedy)
        twin: _SeriesT = self._another()
        codec.load_fields(twin, _READERS, state_dict)
        for items, counter in _COUNTED.items():
            number, held = getattr(twin, counter), len(getattr(twin, items))
            if number < held or bool(number) is not bool(held):
                raise values.MisfitError(f"must be at least the {held} of `{items}`, got {number}", (counter,))
        if not twin.equal_run <= twin.num_clean:
            raise values.MisfitError(f"must be at most {twin.num_clean}, got {twin.equal_run}", ("equal_run",))
        return twin

    def become(self, other: Series) -> None:
        """Takes over the past of `other`, which must not be used any more. Cannot fail."""
        revision = self.revision
        self.__dict__.update(other.__dict__)
        self.revision = revision + 1

    def copy(self: _SeriesT) -> _SeriesT:
        """Another history with the same past; `last` is shared.

        Cost: 30 us at a window of 512, and 1 us a tensor, sampled module and sampled weight.
        """
        twin: _SeriesT = self._another()
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


_READERS = readers_of(Series)
_HINTS: dict[str, Any] = get_type_hints(Series)
_KINDS = {name: get_origin(hint) or hint for name, hint in _HINTS.items() if get_origin(hint) is not Sampled}
