"""What a history holds: as rates, quantiles and lists, and as plain data that can be saved and loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from . import codec, values
from .batches import GradientCosine, SampledBatches
from .codec import Count, Kind, Spread, kinds_of
from .entries import Entry, LoneElement, NonFiniteEvent, Total, Validation
from .model import ModelNotes
from .overview import Overview
from .running import Running, quantiles
from .sampled import Sampled
from .samples import ModuleActivity, WeightStats
from .table import StepStats
from .tensors import TensorTracks
from .trend import Trend
from .updates import UpdateRatios

_SeriesT = TypeVar("_SeriesT", bound="Series")
VERSION = 2


# The attributes that `TrainingHistory.state_dict` saves; those of the first three classes have a section each.
class Counters:
    """Counts of a `TrainingHistory`."""

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


class Numbers:
    """Single numbers of a `TrainingHistory`."""

    norm_min: float
    norm_max: float
    overhead_total_s: float
    _equal_low: Spread
    _equal_high: Spread


class Aggregates:
    """Aggregates over the whole run."""

    log_norm: Running
    losses: Running
    val_losses: Running
    lrs: Running


class Contents:
    """Windows, events and the parts of a `TrainingHistory`."""

    recent: deque[Entry]
    clean: deque[Entry]
    first_events: list[NonFiniteEvent]
    last_events: deque[NonFiniteEvent]
    first_nonfinite: dict[str, Count]
    validations: deque[Validation]
    model: Annotated[ModelNotes, Kind(ModelNotes.of, ModelNotes.state)]
    loss_trend: Trend
    norm_trend: Trend
    overview: Overview
    tensors: TensorTracks
    updates: UpdateRatios
    activations: Sampled[ModuleActivity]
    weights: Sampled[WeightStats]


class LaterContents:
    """Parts that states of earlier versions lack, and that then stay empty."""

    batches: SampledBatches
    grad_cosines: deque[GradientCosine]
    lone_elements: deque[LoneElement]


COUNTERS = tuple(Counters.__annotations__)
_SECTIONS = {"counters": kinds_of(Counters), "numbers": kinds_of(Numbers), "running": kinds_of(Aggregates)}
_CONTENTS, _LATER = kinds_of(Contents), kinds_of(LaterContents)
# A counter and what it counts: both are empty, or neither is.
_TOGETHER = (
    ("num_steps", "recent"),
    ("num_clean", "clean"),
    ("num_nonfinite", "first_events"),
    ("num_nonfinite", "last_events"),
)


class Series(Counters, Numbers, Aggregates, Contents, LaterContents):
    """The saved part of a `TrainingHistory`, and what can be read off its windows and counters."""

    window: int
    last: StepStats | None
    revision: int
    lacks_norms: bool
    _totals: deque[Total]

    def _another(self) -> Any:
        """An empty history with the same window."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Everything but `last`, as plain dicts, lists, strings and numbers that strict JSON can hold.

        Cost: 0.4 KB a step of the window, and the size of the samples.
        """
        sections = {name: codec.dump_fields(self, kinds) for name, kinds in _SECTIONS.items()}
        return {"version": VERSION, **sections, **codec.dump_fields(self, {**_CONTENTS, **_LATER})}

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
            raise values.MisfitError(
                f"must be of version {VERSION}, got {version!r}",
                ("version",),
                remedy="It was not made by this version's `TrainingHistory.state_dict`; start a new history.",
            )
        twin: _SeriesT = self._another()
        for name, kinds in _SECTIONS.items():
            values.entry(state_dict, name, partial(codec.load_fields, twin, kinds))
        later = {name: kind for name, kind in _LATER.items() if name in state_dict}
        codec.load_fields(twin, {**_CONTENTS, **later}, state_dict)
        for counter, items in _TOGETHER:
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
        for name in (*(name for kinds in _SECTIONS.values() for name in kinds), *_CONTENTS, *_LATER):
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

    @property
    def clip_rate(self) -> float:
        """Share of the clean steps that were clipped, over the whole run; 0.0 if there was none."""
        return self.num_clipped / self.num_clean if self.num_clean else 0.0

    @property
    def skip_rate(self) -> float:
        """Share of all steps that were skipped, over the whole run; 0.0 if there was none."""
        return self.num_skipped / self.num_steps if self.num_steps else 0.0

    def norm_quantiles(self, q: Sequence[float] = (0.05, 0.5, 0.95)) -> tuple[float, ...]:
        """Quantiles of the norms in the window of clean steps; NaNs if it is empty.

        Equivalent to: `numpy.quantile(norms, q)`.

        Cost: sorts the window, 0.1 ms at 512.
        """
        return quantiles([entry.norm for entry in self.clean], q)

    def overhead_quantiles(self, q: Sequence[float] = (0.5,)) -> tuple[float, ...]:
        """Quantiles of the seconds that guarding added to each step of the window; NaNs if none was measured."""
        return quantiles([entry.overhead_s for entry in self.recent if entry.overhead_s is not None], q)

    @property
    def step(self) -> list[int]:
        """Numbers of the steps in the window."""
        return [entry.step for entry in self.recent]

    @property
    def grad_norm(self) -> list[float]:
        """Gradient norms in the window, non-finite ones too."""
        return [entry.norm for entry in self.recent]

    @property
    def loss(self) -> list[float]:
        """Losses in the window, of the steps that have one, non-finite ones too."""
        return [entry.loss for entry in self.recent if entry.loss is not None]

    @property
    def val_loss(self) -> list[float]:
        """Validation losses in the window, of the steps that have one."""
        return [entry.val_loss for entry in self.recent if entry.val_loss is not None]

    @property
    def learning_rate(self) -> list[float]:
        """Learning rates in the window, of the steps that have one."""
        return [entry.lr for entry in self.recent if entry.lr is not None]
