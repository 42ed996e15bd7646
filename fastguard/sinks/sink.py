"""The base class of sinks, the flat keys of a record, and a wrapper so that a failing sink does not stop training."""

from __future__ import annotations

import abc
import io
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

from .._text import ended, prose
from ..records import StepStats
from ..records.log import LineCounts

_log = logging.getLogger("fastguard")
_perf_counter = time.perf_counter
_OF_MODULES = ("mean", "std", "zero_ratio", "saturation_ratio")
_OF_WEIGHTS = ("norm", "std", "gradient_ratio", "update_ratio")
MAX_TRIES = 3  # for a record whose writing was interrupted
TIMED_EVERY = 16  # lines: reading the clock costs a large part of writing one; csrc/log.cpp has the same number


class Sink(abc.ABC):
    """Takes one record a step. Subclasses implement `write`; the other methods do nothing unless overridden.

    Any object with the methods `write(record)` and `close()` counts as a sink.

    >>> class Loud(Sink):
    ...     def write(self, record):
    ...         print(record)
    >>> as_sink(Loud()).write("a record")
    a record
    """

    @abc.abstractmethod
    def write(self, record: StepStats) -> None:
        """Takes the record of one step; called once a step, in order. If it raises, training continues."""

    def note(self, facts: dict[str, Any]) -> None:
        """Takes new or changed facts about the model: fields of `fastguard.records.ModelNotes`, by name."""
        return

    def tell(self, finding: dict[str, Any]) -> None:
        """Takes a finding about the running training that is new, or more severe than before.

        Args:
            finding: `Finding.to_dict()`: `rule`, `severity`, `summary`, `last_step`, `recommendation` and so on.
        """
        return

    def close(self) -> None:
        """Releases files and connections; may be called more than once."""
        return

    def has_taken(self, step: int) -> bool | None:
        """Whether the newest record that was written is that of `step`; called after an interrupt in `write`.

        If it was not, `write` gets the record again, up to three times in all. If the sink does not know (None), the
        record counts as lost.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _has_methods(sink: object) -> bool:
    return all(callable(getattr(sink, name, None)) for name in ("write", "close"))


class FunctionSink(Sink):
    """A function of a `StepStats`, as a sink. If the function raises, the record counts as lost.

    Cost: 16 us a step to make the record. Training waits for the function itself.
    """

    def __init__(self, function: Callable[[StepStats], object]) -> None:
        self.function = function

    def write(self, record: StepStats) -> None:
        """Calls the function."""
        self.function(record)

    def __repr__(self) -> str:
        return f"FunctionSink({getattr(self.function, '__qualname__', self.function)})"


def as_sink(target: Sink | Callable[[StepStats], object]) -> Sink:
    """`target` itself if it is a sink, else the function `target` as one.

    Raises:
        TypeError: `target` is a path, an open file, a sink's class, or anything else that cannot take a record.

    >>> as_sink(print).write("a record")
    a record
    """
    if not isinstance(target, (type, io.IOBase)):
        if _has_methods(target):
            return cast(Sink, target)
        if callable(target):
            return FunctionSink(target)
    raise TypeError(
        f"`sink` must be an object with `write(record)` and `close()`, or a function of a record, got {target!r}. "
        "For a log file pass `JsonlSink(path)`."
    )


def flatten(record: StepStats) -> dict[str, Any]:
    """A record as a dict with the flat keys of logs. A value that is not known (None) has no key.

    | key | what it is |
    |---|---|
    | `step` | number of the step, from 0 |
    | `loss`, `val_loss`, `lr`, `loss_scale` | as in `StepStats` |
    | `grad/norm` | norm of all gradients, unscaled, before clipping; NaN or Inf if any element is |
    | `grad/max`, `grad/min` | largest finite absolute value, smallest that is not zero |
    | `grad/mean`, `grad/std` | of the finite elements |
    | `grad/num_zeros`, `grad/num_nans`, `grad/num_infs`, `grad/num_elements` | counts |
    | `grad/cosine` | cosine with the gradient of the step before, at the steps where it was computed |
    | `clip/coef` | the factor that clipping multiplied the gradients by |
    | `clip/trigger` | the norm of all gradients above which the clip policy acts, if it has one |
    | `grad/clipped_norm` | norm of all gradients after clipping, if they were clipped |
    | `clipped` | whether they were clipped |
    | `skipped` | whether the step was skipped: the optimizer changed nothing |
    | `nonfinite` | names of the tensors with NaN or Inf, in backward order, if there are any |
    | `clip/over` | names of the groups or tensors above the clip policy's triggers, if there are any |

    Sampled modules add activation/<module>/mean, /std, /zero_ratio, /saturation_ratio and, if units were told apart,
    /dead_unit_ratio. Sampled parameters add weight/<name>/norm, /std and, if measured, /gradient_ratio and
    /update_ratio. Groups that are clipped separately add clip/<group>/norm, /clipped_norm and /trigger.

    Cost: 2 us; 1 us for each sampled module or tensor. A step with NaN or Inf also reads every row of the table.
    """
    flat = flatten_step(record)
    for group in record.groups:
        key = f"clip/{group.name}/"
        flat[key + "norm"], flat[key + "clipped_norm"], flat[key + "trigger"] = group[1:]
    for m in record.activations:
        flat.update({f"activation/{m.name}/{name}": getattr(m.stats, name) for name in _OF_MODULES})
        if m.num_units:
            flat[f"activation/{m.name}/dead_unit_ratio"] = m.dead_unit_ratio
    for w in record.weights:
        known = ((name, getattr(w, name)) for name in _OF_WEIGHTS)
        flat.update({f"weight/{w.name}/{name}": value for name, value in known if value is not None})
    return flat


def flatten_step(record: StepStats) -> dict[str, Any]:
    """The keys of `flatten` without those of samples and groups."""
    gradients, nonfinite = record.gradients, record.nonfinite
    flat = {
        "step": record.step,
        "loss": record.loss,
        "val_loss": record.val_loss,
        "lr": record.lr,
        "loss_scale": record.loss_scale,
        "grad/norm": gradients.norm,
        "grad/max": gradients.max_val,
        "grad/min": gradients.min_val,
        "grad/mean": gradients.mean,
        "grad/std": gradients.std,
        "grad/num_zeros": gradients.num_zeros,
        "grad/num_nans": gradients.num_nans,
        "grad/num_infs": gradients.num_infs,
        "grad/num_elements": gradients.total_elements,
        "grad/cosine": record.grad_cosine,
        "clip/coef": record.clip_coef,
        "clip/trigger": record.trigger,
        "grad/clipped_norm": record.clipped_norm if record.clipped else None,
        "clipped": record.clipped,
        "skipped": record.skipped,
        "nonfinite": nonfinite or None,
        "clip/over": list(record.over) or None,
    }
    return {key: value for key, value in flat.items() if value is not None}


def name_of(sink: Sink) -> str:
    """What warnings and reports call `sink`."""
    shown = repr(sink)
    return type(sink).__name__ if shown.startswith("<") else shown  # a default repr says no more than an address


class SafeSink(Sink, LineCounts):
    """A sink around another that never raises: it warns once, counts lost records, and keeps trying.

    Every later record is tried again, because a full disk can recover. `KeyboardInterrupt` and `SystemExit` pass
    through; the record then counts as lost, unless `has_taken` of the sink says otherwise. Where warnings are errors,
    the logger `fastguard` gets the warning instead, because a log must not stop training.

    Attributes:
        sink: the sink inside.
        name: what warnings and reports call it.
        takes_lines: whether the sink has a method `write_line(step, line) -> bool` for clean steps, as `JsonlSink` has.
        num_lines, num_lines_timed, line_seconds: lines written, how many of them were timed, and for how long. C++ adds
            to them.
        num_taken: records that were passed to `sink.write`.
        num_lost: records for which `sink.write` or `sink.write_line` raised, and those in a `num_lost` of the sink's
            own, which were lost on a thread, for example.
        last_error: the newest exception, or None.
        newest: number of the last step that was written or lost; -1 before there was one.
        seconds: time spent in `sink.write`.
    """

    def __init__(self, sink: Sink | Callable[[StepStats], object], name: str | None = None) -> None:
        self.num_lines, self.num_lines_timed, self.line_seconds = 0, 0, 0.0
        self.sink = as_sink(sink)
        self.name = name_of(self.sink) if name is None else name
        # Its `write_line` must belong to its `write`: a subclass's own `write` must be called.
        owners = [self.sink, *type(self.sink).__mro__]
        first = next((one for one in owners if {"write", "write_line"} & getattr(one, "__dict__", {}).keys()), object)
        self.takes_lines = "write_line" in first.__dict__
        self._take_line: Any = cast(Any, self.sink).write_line if self.takes_lines else None
        self.num_taken = self._num_lost = self._num_reported = 0
        self.last_error: BaseException | None = None
        self.newest = -1
        self._interrupted = (-1, 0)  # the step whose writing was interrupted, and how often
        self.seconds = 0.0
        self._has_warned = False

    def write(self, record: StepStats) -> None:
        """Passes the record on; an exception is counted, not raised. Cost: 0.3 us on top of the sink's own."""
        started = _perf_counter()
        try:
            self.sink.write(record)
            self.newest = record.step
        except BaseException as error:
            self._fail(record.step, error)
        self.seconds += _perf_counter() - started
        self.num_taken += 1
        self._report_later_losses()

    def write_line(self, step: int, line: bytes) -> bool:
        """Passes a clean step on as a line of JSON; False if the sink wants its record instead."""
        if self._take_line is None:
            return False
        started = 0.0 if step % TIMED_EVERY else _perf_counter()
        try:
            if not self._take_line(step, line):
                return False
            self.newest = step
            self.num_lines += 1
            if started:
                self.line_seconds += _perf_counter() - started
                self.num_lines_timed += 1
        except BaseException as error:
            self._fail(step, error)
        return True

    def note(self, facts: dict[str, Any]) -> None:
        """Passes facts about the model on. A sink that does not subclass `Sink` need not have `note`."""
        self._try("note", "could not write what is known of the model", facts)

    def tell(self, finding: dict[str, Any]) -> None:
        """Passes a finding on. A sink that does not subclass `Sink` need not have `tell`."""
        self._try("tell", "could not write a finding", finding)

    def close(self) -> None:
        """Closes the sink; an exception becomes a warning."""
        self._try("close", "could not be closed")
        self._report_later_losses()

    def _try(self, method: str, problem: str, *arguments: Any) -> None:
        call = getattr(self.sink, method, None)
        if callable(call):
            try:
                call(*arguments)
            except Exception as error:
                self._warn(problem, error)

    @property
    def num_lost(self) -> int:
        later = getattr(self.sink, "num_lost", 0)
        return self._num_lost + (later if isinstance(later, int) else 0)

    def cost(self) -> dict[str, Any]:
        """What the sink costs the training thread, for reports.

        Returns:
            `name`; `num_steps` that it got; `mean_us`, microseconds a step; `total_s`, seconds in all; `num_lost`. One
            line of JSON in 16 is timed and stands for the others.
        """
        num_steps = self.num_taken + self.num_lines
        total_s = self.seconds + self.line_seconds * self.num_lines / (self.num_lines_timed or 1)
        mean_us = 1e6 * total_s / (num_steps or 1)
        numbers = {"num_steps": num_steps, "mean_us": mean_us, "total_s": total_s, "num_lost": self.num_lost}
        return {"name": self.name, **numbers}

    def _fail(self, step: int, error: BaseException) -> None:
        """Counts the record of `step` as lost. Raises an interrupt again, after which the record may be due again."""
        if isinstance(error, Exception):
            self._num_lost += 1
            self.newest = step
            self._warn("could not write a record", error)
            return
        self.last_error = error
        try:
            is_taken = cast(Any, self.sink).has_taken(step)
        except Exception:  # the sink does not know
            is_taken = None
        times = self._interrupted[1] + 1 if self._interrupted[0] == step else 1
        self._interrupted = step, times
        if is_taken is not False or times >= MAX_TRIES:
            self._num_lost += not is_taken
            self.newest = step
        raise error

    def _report_later_losses(self) -> None:
        later = self.num_lost - self._num_lost
        if later > self._num_reported:
            self._num_reported = later
            self._warn("could not write a record", getattr(self.sink, "last_error", None))

    def _warn(self, problem: str, error: BaseException | None) -> None:
        self.last_error = error
        if self._has_warned:
            return
        self._has_warned = True
        message = prose(
            f"sink {self.name} {problem}: {type(error).__name__}: {ended(error)} Training goes on; records that can't "
            "be written are counted in `num_lost`, and this warning is not repeated."
        )
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        except Exception:  # warnings are errors here
            _log.warning("%s", message)

    def __repr__(self) -> str:
        return f"SafeSink({self.name}, num_lost={self.num_lost})"
