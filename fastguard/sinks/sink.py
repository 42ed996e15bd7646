"""The base class of sinks, the flat keys of a record, and a wrapper so that a failing sink does not stop training."""

from __future__ import annotations

import abc
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

from .._text import ended, prose
from ..records import StepStats
from ..records.samples import ModuleActivity, WeightStats

_log = logging.getLogger("fastguard")
_perf_counter = time.perf_counter
MAX_TRIES = 3  # for a record whose writing was broken off
SLOW_S, SLOW_SHARE = 1.0, 0.1  # from where on a sink is told of as slow
TIMED_EVERY = 16  # lines: the clock costs a part of what they do


class Sink(abc.ABC):
    """Takes one record a step. Subclasses implement `write`; the other methods do nothing unless overridden.

    Any object with methods `write(record)` and `close()` counts as a sink, also for `isinstance`.

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
        """Takes a finding of the running training that is new, or more severe than before.

        Args:
            finding: `Finding.to_dict()`: `rule`, `severity`, `summary`, `last_step`, `recommendation` and so on.
        """
        return

    def close(self) -> None:
        """Releases files and connections; may be called more than once."""
        return

    def has_taken(self, step: int) -> bool | None:
        """Whether the newest record that was taken is that of `step`; asked after an interrupt that came in `write`.

        If it was not, the record is given again, up to three times in all. A sink that cannot say (None) is not given
        it again: it counts as lost.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        has_both = all(callable(getattr(kind, name, None)) for name in ("write", "close"))
        return True if cls is Sink and has_both else NotImplemented


class FunctionSink(Sink):
    """A function of a `StepStats`, as a sink. If the function raises, the record counts as lost.

    Cost: 16 us a step to make the record. Training waits for the function itself (see `BackgroundSink`).
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
        TypeError: for a path, an open file, a sink's class, or anything else that can't take a record.

    >>> as_sink(print).write("a record")
    a record
    """
    if not isinstance(target, (type, io.IOBase)):
        if all(callable(getattr(target, name, None)) for name in ("write", "close")):
            return cast(Sink, target)
        if callable(target):
            return FunctionSink(target)
    raise TypeError(
        f"`sink` must be an object with `write(record)` and `close()`, or a function of a record, got {target!r}. "
        "For a log file pass `JsonlSink(path)`."
    )


def flatten(record: StepStats) -> dict[str, Any]:
    """A record under the flat keys of logs; what is not known (None) has no key.

    | key | what it is |
    |---|---|
    | `step` | number of the step, from 0 |
    | `loss`, `val_loss`, `lr`, `loss_scale` | as in `StepStats` |
    | `grad/norm` | norm of all gradients, unscaled, before clipping; NaN or Inf if any element is |
    | `grad/max`, `grad/min` | largest finite absolute value, smallest that is not zero |
    | `grad/mean`, `grad/std` | of the finite elements |
    | `grad/num_zeros`, `grad/num_nans`, `grad/num_infs`, `grad/num_elements` | counts |
    | `grad/cosine` | with the gradient of the step before; only where it was taken |
    | `grad/noise_scale` | the gradient noise scale, in batches of one rank, where it was taken |
    | `clip/coef` | what the gradients were multiplied by |
    | `clip/trigger` | the norm above which the clip policy acts; only if there is one of all gradients together |
    | `grad/clipped_norm` | norm of all gradients after clipping; only where they were clipped |
    | `clipped` | whether they were |
    | `skipped` | the optimizer did nothing at this step |
    | `nonfinite` | names of the tensors holding NaN or Inf, in backward order; only if there are any |
    | `clip/over` | names of the groups or tensors above the clip policy's triggers; only if there are any |

    At a step where they were sampled also, for each module, activation/<module>/mean, /std, /zero_ratio,
    /saturation_ratio and, if units were told apart, /dead_unit_ratio; for attention /entropy and /max_logit, for a
    router /entropy, /max_load and /dead_unit_ratio in their place; and for each parameter weight/<name>/norm, /std
    and, if measured, /gradient_ratio and /update_ratio. Where groups are clipped each, clip/<group>/norm, /clipped_norm
    and /trigger.

    Cost: 2 us; a step with NaN or Inf looks at every row as well; 1 us for each sampled module or tensor.
    """
    flat = flatten_step(record)
    for group in record.groups:
        key = f"clip/{group.name}/"
        flat[key + "norm"], flat[key + "clipped_norm"], flat[key + "trigger"] = group[1:]
    for module in record.activations:
        flat.update(activation_values(module))
    for weight in record.weights:
        flat.update(weight_values(weight))
    return flat


def activation_values(module: ModuleActivity) -> Iterator[tuple[str, float]]:
    """Keys and values of what was sampled of a module."""
    key, stats = f"activation/{module.name}/", module.stats
    if module.entropy is not None:
        yield key + "entropy", module.entropy
    if module.max_logit is not None:
        yield key + "max_logit", module.max_logit
    if module.load is not None:
        yield key + "max_load", max(module.load)
        yield key + "dead_unit_ratio", module.dead_unit_ratio
    if module.is_choice:
        return
    yield key + "mean", stats.mean
    yield key + "std", stats.std
    yield key + "zero_ratio", stats.zero_ratio
    yield key + "saturation_ratio", stats.saturation_ratio
    if module.num_units:
        yield key + "dead_unit_ratio", module.dead_unit_ratio


def weight_values(weight: WeightStats) -> Iterator[tuple[str, float]]:
    """Keys and values of what was sampled of a parameter."""
    key = f"weight/{weight.name}/"
    yield key + "norm", weight.norm
    yield key + "std", weight.std
    for name in ("gradient_ratio", "update_ratio"):
        value = getattr(weight, name)
        if value is not None:
            yield key + name, value


def flatten_step(record: StepStats) -> dict[str, Any]:
    """As `flatten`, without what was sampled beside the gradients."""
    gradients = record.gradients
    flat: dict[str, Any] = {"step": record.step}
    for name in ("loss", "val_loss", "lr", "loss_scale"):
        value = getattr(record, name)
        if value is not None:
            flat[name] = value
    flat["grad/norm"] = gradients.norm
    flat["grad/max"] = gradients.max_val
    flat["grad/min"] = gradients.min_val
    flat["grad/mean"] = gradients.mean
    flat["grad/std"] = gradients.std
    flat["grad/num_zeros"] = gradients.num_zeros
    flat["grad/num_nans"] = gradients.num_nans
    flat["grad/num_infs"] = gradients.num_infs
    flat["grad/num_elements"] = gradients.total_elements
    if record.grad_cosine is not None:
        flat["grad/cosine"] = record.grad_cosine
    if record.noise_scale is not None:
        flat["grad/noise_scale"] = record.noise_scale
    flat["clip/coef"] = record.clip_coef
    if record.trigger is not None:
        flat["clip/trigger"] = record.trigger
    if record.clipped:
        flat["grad/clipped_norm"] = record.clipped_norm
    flat["clipped"] = record.clipped
    flat["skipped"] = record.skipped
    nonfinite = record.nonfinite
    if nonfinite:
        flat["nonfinite"] = nonfinite
    if record.over:
        flat["clip/over"] = list(record.over)
    return flat


def name_of(sink: Sink) -> str:
    """What warnings and reports call `sink`."""
    shown = repr(sink)
    return type(sink).__name__ if shown.startswith("<") else shown  # an address tells nothing


def _takes_lines(sink: Sink) -> bool:
    """Whether `sink` has a `write_line` that goes with its `write`: a subclass's own `write` is to be called."""
    if "write" in getattr(sink, "__dict__", {}):
        return False
    first = next((c for c in type(sink).__mro__ if "write" in c.__dict__ or "write_line" in c.__dict__), object)
    return "write_line" in first.__dict__


class SafeSink(Sink):
    """A sink around another that never raises: it warns once, counts what was lost, and goes on trying.

    A full disk can recover, so every later record is tried again. `KeyboardInterrupt` and `SystemExit` pass through;
    the record counts as lost unless the sink says by `has_taken` what became of it. A sink on which training waits for
    more than a tenth of the time is told of once. Where warnings are errors, the warning is logged to the logger
    `fastguard` instead: a log must not stop training.

    Attributes:
        sink: the sink inside.
        name: what warnings and reports call it.
        takes_lines: whether the sink has a method `write_line(step, line) -> bool`, as `JsonlSink`, for clean steps.
        num_lines, num_lines_timed, line_seconds: lines written, how many were timed, what these took. C++ adds to them.
        num_taken: records that the sink was given: written, left out or lost; without the lines.
        num_lost: records that `sink.write` or `sink.write_line` raised for, and those that the sink says it has lost
            since, by a `num_lost` of its own: on a thread, say.
        last_error: the newest exception, or None.
        newest: number of the last step that is done with: written, or lost; -1 before there was one.
        seconds: spent in `sink.write`.
    """

    def __init__(self, sink: Sink | Callable[[StepStats], object], name: str | None = None) -> None:
        self.sink = as_sink(sink)
        self.name = name_of(self.sink) if name is None else name
        self.takes_lines = _takes_lines(self.sink)
        self._take_line: Callable[[int, bytes], bool] | None = getattr(self.sink, "write_line", None)
        if not self.takes_lines:
            self._take_line = None
        self.num_taken = self._num_lost = self._num_told = 0
        self.last_error: BaseException | None = None
        self.newest = -1
        self._again = (-1, 0)  # a step that is tried again, and how often it was broken off
        self.seconds = self.line_seconds = 0.0
        self.num_lines = self.num_lines_timed = 0
        self._since: float | None = None
        self._has_warned = self._is_known_slow = False

    def write(self, record: StepStats) -> None:
        """Hands the record on; an exception is counted, not raised. Cost: 0.3 us on top of the sink's own."""
        started = _perf_counter()
        try:
            self.sink.write(record)
            self.newest = record.step
        except Exception as error:
            self._lose(record.step, error)
        except BaseException as error:
            self._settle(record.step, error)
            raise
        now = _perf_counter()
        self.seconds += now - started
        self.num_taken += 1
        self._say_lost_later()
        if self._since is None:
            self._since = started
        elif self.seconds > SLOW_S and not self._is_known_slow and self.seconds > SLOW_SHARE * (now - self._since):
            self._say_slow(now - self._since)

    def write_line(self, step: int, line: bytes) -> bool:
        """Hands a clean step on as a line of JSON; False if the sink wants its record instead."""
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
        except Exception as error:
            self._lose(step, error)
        except BaseException as error:
            self._settle(step, error)
            raise
        return True

    def note(self, facts: dict[str, Any]) -> None:
        """Tells the sink what changed of what is known of the model; one by duck typing need not have `note`."""
        self._hand_over("note", facts, "what is known of the model")

    def tell(self, finding: dict[str, Any]) -> None:
        """Tells the sink of a finding; one by duck typing need not have `tell`."""
        self._hand_over("tell", finding, "a finding")

    def _hand_over(self, method: str, item: dict[str, Any], what: str) -> None:
        take = getattr(self.sink, method, None)
        if not callable(take):
            return
        try:
            take(item)
        except Exception as error:
            self._complain(f"could not write {what}", error)

    def close(self) -> None:
        """Closes the sink; an exception is warned of, not raised."""
        try:
            self.sink.close()
        except Exception as error:
            self._complain("could not be closed", error)
        self._say_lost_later()

    @property
    def num_lost(self) -> int:
        return self._num_lost + self._num_lost_later

    @property
    def _num_lost_later(self) -> int:
        later = getattr(self.sink, "num_lost", 0)
        return later if isinstance(later, int) else 0

    def cost(self) -> dict[str, Any]:
        """What the sink costs the thread that trains, for reports.

        Returns:
            `name`; `num_steps`, that it was given; `mean_us`, microseconds a step; `total_s`, seconds in all;
            `num_lost`. Of lines of JSON one in 16 is timed, and stands for the others.
        """
        num_steps = self.num_taken + self.num_lines
        total_s = self.seconds
        if self.num_lines_timed:
            total_s += self.line_seconds * self.num_lines / self.num_lines_timed
        mean_us = 1e6 * total_s / num_steps if num_steps else 0.0
        numbers = {"num_steps": num_steps, "mean_us": mean_us, "total_s": total_s, "num_lost": self.num_lost}
        return {"name": self.name, **numbers}

    def _say_lost_later(self) -> None:
        if self._num_lost_later > self._num_told:
            self._num_told = self._num_lost_later
            self._complain("could not write a record", getattr(self.sink, "last_error", None))

    def _lose(self, step: int, error: BaseException) -> None:
        self._num_lost += 1
        self.newest = step
        self._complain("could not write a record", error)

    def _settle(self, step: int, error: BaseException) -> None:
        """What became of the record of `step`, in whose writing an interrupt came."""
        self.last_error = error
        ask = getattr(self.sink, "has_taken", None)
        try:
            is_taken = ask(step) if callable(ask) else None
        except Exception:  # nobody can say, so that it counts as lost
            is_taken = None
        times = self._again[1] + 1 if self._again[0] == step else 1
        self._again = step, times
        if is_taken is False and times < MAX_TRIES:
            return
        self._num_lost += not is_taken
        self.newest = step

    def _say_slow(self, elapsed_s: float) -> None:
        self._is_known_slow = True
        _log.warning(
            "sink %s takes %.0f %% of the time (%.1f s of %.1f s), and training waits for it. Write less often, or "
            "hand the records on to a thread.",
            self.name,
            100.0 * self.seconds / elapsed_s,
            self.seconds,
            elapsed_s,
        )

    def _complain(self, what: str, error: BaseException | None) -> None:
        self.last_error = error
        if self._has_warned:
            return
        self._has_warned = True
        message = prose(
            f"sink {self.name} {what}: {type(error).__name__}: {ended(error)} Training goes on; records that can't be "
            "written are counted in `num_lost`, and this warning is not repeated."
        )
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        except Exception:  # warnings are errors here
            _log.warning("%s", message)

    def __repr__(self) -> str:
        return f"SafeSink({self.name}, num_lost={self.num_lost})"
