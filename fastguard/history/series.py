"""A history seen as rates, quantiles and lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..stats import values
from ..stats.part import COUNT, NUMBER, PART, SPREAD, WHOLE, Kind, plain, rows
from ..stats.running import quantiles
from .batches import GradientCosine
from .entries import Entry, LoneElement, NonFiniteEvent, Validation
from .model import ModelNotes


class Counters:
    """What a `TrainingHistory` counts."""

    num_steps: int
    num_clean: int
    num_skipped: int
    num_clipped: int
    num_nonfinite: int
    num_nonfinite_applied: int
    num_scaled: int
    skip_run: int
    longest_skip_run: int
    longest_skip_run_end: int
    equal_run: int
    num_timed: int
    num_bad_losses: int
    first_bad_loss_step: int
    last_bad_loss_step: int


COUNTERS = tuple(Counters.__annotations__)


class Series(Counters):
    """What can be read off the windows and counters of a `TrainingHistory`."""

    window: int
    norm_max: float
    recent: deque[Entry]
    clean: deque[Entry]
    validations: deque[Validation]
    _equal_low: float
    _equal_high: float

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


# What is saved of a history, and how: what stands in a section of its own, and the rest.
SECTIONS: dict[str, dict[str, Kind]] = {
    "counters": {name: WHOLE if name.endswith(("_step", "_end")) else COUNT for name in COUNTERS},
    "numbers": {
        **dict.fromkeys(("norm_min", "norm_max", "overhead_total_s"), NUMBER),
        **dict.fromkeys(("_equal_low", "_equal_high"), SPREAD),
    },
    "running": dict.fromkeys(("log_norm", "losses", "val_losses", "lrs"), PART),
}
_PARTS = ("loss_trend", "norm_trend", "overview", "tensors", "updates", "activations", "weights")
FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("recent", "clean"), rows(values.tuple_of(Entry))),
    **dict.fromkeys(("first_events", "last_events"), rows(values.tuple_of(NonFiniteEvent))),
    "first_nonfinite": plain(values.counts),
    "validations": rows(values.tuple_of(Validation)),
    "model": Kind(ModelNotes.state, lambda plain, now: ModelNotes.of(plain)),
    **dict.fromkeys(_PARTS, PART),
}
# As above; states that were saved before there was such a thing lack it, and it stays empty then.
LATER_FIELDS: dict[str, Kind] = {
    "batches": PART,
    "grad_cosines": rows(values.tuple_of(GradientCosine)),
    "lone_elements": rows(values.tuple_of(LoneElement)),
}
