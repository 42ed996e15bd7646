"""What a run has been so far, in bounded memory: a window of steps, running aggregates, and the bad steps.

Skipped and non-finite steps are counted, and enter no aggregate and no baseline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from . import strict_json
from .running import Running, quantiles
from .stats import StepStats

NUM_FIRST_EVENTS = 16
NUM_LAST_EVENTS = 64
NUM_EVENT_NAMES = 8
NUM_DEFERRED = 32
EQUAL_NORMS_TOLERANCE = 1e-3

_STATE_VERSION = 1
_isfinite = math.isfinite


class Entry(NamedTuple):
    """One step in a window. What is not known is None; `norm` is before clipping and may be NaN or Inf."""

    step: int
    norm: float
    clip_coef: float
    skipped: bool
    loss: float | None
    val_loss: float | None
    lr: float | None
    loss_scale: float | None
    overhead_s: float | None

    @property
    def is_clean(self) -> bool:
        """Whether the step may enter a baseline: not skipped, and its norm finite."""
        return not self.skipped and _isfinite(self.norm)


class NonFiniteEvent(NamedTuple):
    """A step whose gradients held NaN or Inf, or whose norm overflowed.

    `names` are the first eight of `num_tensors` bad tensors, in backward order: the first is the likeliest origin.
    """

    step: int
    names: tuple[str, ...]
    num_tensors: int
    num_nans: int
    num_infs: int
    skipped: bool
    loss_scale: float | None


_COUNTERS = (
    "num_steps",
    "num_clean",
    "num_skipped",
    "num_clipped",
    "num_nonfinite",
    "num_nonfinite_applied",
    "num_scaled",
    "skip_run",
    "longest_skip_run",
    "longest_skip_run_end",
    "equal_run",
    "num_timed",
)
_NUMBERS = ("norm_min", "norm_max", "overhead_total_s", "_equal_low", "_equal_high")
_RUNNING = ("log_norm", "losses", "val_losses", "lrs")


class TrainingHistory:
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
        first_nonfinite: how often each tensor was the first bad one in backward order.
        equal_run: clean steps in a row, up to now, whose norms lie within 1e-3 of one another.
        overhead_total_s, num_timed: seconds spent on guarding, and the steps they were measured on.

    Cost: bounded memory, about 0.4 KB a step of the window.
    """

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

    def __init__(self, window: int = 512) -> None:
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}")
        self.window = window
        self.last: StepStats | None = None
        self._reset()

    def _reset(self) -> None:
        self._deferred: list[Entry] = []
        for name in _COUNTERS:
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

    def add(self, record: StepStats, overhead_s: float | None = None) -> None:
        """Takes the record of one step.

        Args:
            record: the step, with its loss if there is one.
            overhead_s: seconds that guarding added to the step, if measured.

        Cost: 1 us, whatever the number of tensors; a non-finite step also looks at every row. No sync.
        """
        self.defer(record, overhead_s)
        self.settle()

    def defer(self, record: StepStats, overhead_s: float | None = None) -> None:
        """As `add`, but aggregates and windows follow at the next `settle`, or after 32 steps.

        In training this code is cold, and costs several times what it costs in a loop over itself; thirty-two steps at
        once cost hardly more than one.
        """
        _, sum_sq, _, _, _, _, nans, infs = record.tensors.total_row()
        self.last = record
        if nans or infs or not sum_sq < math.inf:
            self.settle()
            norm = math.nan if nans else math.inf
            names = record.nonfinite
            self._note_nonfinite(
                NonFiniteEvent(
                    record.step,
                    tuple(names[:NUM_EVENT_NAMES]),
                    len(names),
                    int(nans),
                    int(infs),
                    record.skipped,
                    record.loss_scale,
                )
            )
        else:
            norm = math.sqrt(sum_sq)
        self._deferred.append(
            Entry(
                record.step,
                norm,
                record.clip_coef,
                record.skipped,
                record.loss,
                record.val_loss,
                record.lr,
                record.loss_scale,
                overhead_s,
            )
        )
        if len(self._deferred) >= NUM_DEFERRED:
            self.settle()

    def settle(self) -> None:
        """Takes into account what was deferred."""
        deferred, self._deferred = self._deferred, []
        for entry in deferred:
            self._push(entry)

    def record(self, step: int, loss: float, grad_norm: float, lr: float, val_loss: float | None = None) -> None:
        """Takes a step by its numbers alone, where no guard makes records: the toolkit's interface.

        >>> history = TrainingHistory()
        >>> history.record(0, loss=2.5, grad_norm=1.0, lr=1e-3)
        >>> history.loss, history.grad_norm
        ([2.5], [1.0])
        """
        norm = float(grad_norm)
        if not _isfinite(norm):
            self._note_nonfinite(NonFiniteEvent(step, (), 0, 0, 0, False, None))
        validation = None if val_loss is None else float(val_loss)
        self._push(Entry(step, norm, 1.0, False, float(loss), validation, float(lr), None, None))

    def _note_nonfinite(self, event: NonFiniteEvent) -> None:
        self.num_nonfinite += 1
        if not event.skipped:
            self.num_nonfinite_applied += 1
        if len(self.first_events) < NUM_FIRST_EVENTS:
            self.first_events.append(event)
        self.last_events.append(event)
        if event.names:
            self.first_nonfinite[event.names[0]] = self.first_nonfinite.get(event.names[0], 0) + 1

    def _push(self, entry: Entry) -> None:
        step, norm, clip_coef, skipped, loss, val_loss, lr, loss_scale, overhead_s = entry
        self.num_steps += 1
        self.recent.append(entry)
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
            return
        self.skip_run = 0
        if not _isfinite(norm):
            return
        self.num_clean += 1
        self.clean.append(entry)
        if clip_coef != 1.0:
            self.num_clipped += 1
        if norm > 0.0:
            self.log_norm.add(math.log(norm))
        if norm < self.norm_min:
            self.norm_min = norm
        if norm > self.norm_max:
            self.norm_max = norm
        if loss is not None:
            self.losses.add(loss)
        if val_loss is not None:
            self.val_losses.add(val_loss)
        if lr is not None:
            self.lrs.add(lr)
        self._extend_equal_run(norm)

    def _extend_equal_run(self, norm: float) -> None:
        low = norm if norm < self._equal_low else self._equal_low
        high = norm if norm > self._equal_high else self._equal_high
        if self.equal_run and high - low <= EQUAL_NORMS_TOLERANCE * low:
            self.equal_run += 1
            self._equal_low, self._equal_high = low, high
        else:
            self.equal_run = 1
            self._equal_low = self._equal_high = norm

    @property
    def equal_norm(self) -> float:
        """The norm that the `equal_run` newest clean steps share: the middle of their range."""
        return (self._equal_low + self._equal_high) / 2

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

    def state_dict(self) -> dict[str, Any]:
        """Everything but `last`, as plain dicts, lists, strings and numbers that strict JSON can hold.

        Cost: 0.4 KB a step of the window.
        """
        return {
            "version": _STATE_VERSION,
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "numbers": {name: strict_json.encode_float(getattr(self, name)) for name in _NUMBERS},
            "running": {name: strict_json.encode(getattr(self, name).state()) for name in _RUNNING},
            "recent": strict_json.encode(list(self.recent)),
            "clean": strict_json.encode(list(self.clean)),
            "first_events": _encode_events(self.first_events),
            "last_events": _encode_events(self.last_events),
            "first_nonfinite": dict(self.first_nonfinite),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; with a smaller window, the newest steps of it. `last` becomes None.

        Raises:
            ValueError: for a state of another version.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"`state` must be of version {_STATE_VERSION}, got {state.get('version')!r} - at `state['version']`. "
                "It was not made by this version's `TrainingHistory.state_dict`; start a new history."
            )
        self._reset()
        self.last = None
        for name in _COUNTERS:
            setattr(self, name, int(state["counters"][name]))
        for name in _NUMBERS:
            setattr(self, name, strict_json.decode_float(state["numbers"][name]))
        for name in _RUNNING:
            getattr(self, name).load(strict_json.decode(state["running"][name]))
        self.recent.extend(Entry._make(strict_json.decode(values)) for values in state["recent"])
        self.clean.extend(Entry._make(strict_json.decode(values)) for values in state["clean"])
        self.first_events.extend(_decode_events(state["first_events"]))
        self.last_events.extend(_decode_events(state["last_events"]))
        self.first_nonfinite.update(state["first_nonfinite"])

    def __repr__(self) -> str:
        return f"TrainingHistory({self.num_steps} steps, window={self.window})"


def _encode_events(events: Iterable[NonFiniteEvent]) -> list[list[Any]]:
    return [[e.step, list(e.names), *e[2:6], strict_json.encode(e.loss_scale)] for e in events]


def _decode_events(events: Iterable[Sequence[Any]]) -> list[NonFiniteEvent]:
    return [NonFiniteEvent._make([e[0], tuple(e[1]), *e[2:6], strict_json.decode_float(e[6])]) for e in events]
