"""A history seen as rates, quantiles and lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated

from .batches import GradientCosine, SampledBatches
from .codec import Count, Kind, Spread
from .entries import Entry, LoneElement, NonFiniteEvent, Validation
from .model import ModelNotes
from .overview import Overview
from .running import Running, quantiles
from .sampled import Sampled
from .samples import ModuleActivity, WeightStats
from .tensors import TensorTracks
from .trend import Trend
from .updates import UpdateRatios


# The attributes that `TrainingHistory.state_dict` saves; those of the first three classes have a section each.
class Counters:
    """What a `TrainingHistory` counts."""

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
    """Parts that states of earlier versions lack; they stay empty then."""

    batches: SampledBatches
    grad_cosines: deque[GradientCosine]
    lone_elements: deque[LoneElement]


COUNTERS = tuple(Counters.__annotations__)


class Series(Counters, Numbers, Aggregates, Contents, LaterContents):
    """What can be read off the windows and counters of a `TrainingHistory`."""

    window: int

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
