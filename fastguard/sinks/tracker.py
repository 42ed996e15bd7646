"""The base class of sinks for experiment trackers: which steps and tensors are logged, and under which names."""

from __future__ import annotations

import abc
import importlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from .._text import listed, prose
from ..errors import missing_package
from ..records import StepStats, TensorStats, values
from .sink import Sink, flatten

MAX_LAYERS = 16
MAX_BUCKETS = 512  # the maximum of W&B and Trackio
PER_DECADE = 4  # buckets of a histogram of norms
_OWN = "fastguard/"  # section of keys without one, such as "loss", which are likely names of your own metrics
Wanted = int | str | re.Pattern[str]


class Buckets(NamedTuple):
    """A histogram as trackers take it: `edges` has one number more than `counts`."""

    counts: list[int]
    edges: list[float]

    @classmethod
    def from_counts(cls, counts: Mapping[int, int], per_unit: int = 1) -> Buckets | None:
        """From counts by floor(x * per_unit). If there are too many buckets, the lowest ones are merged."""
        if not counts:
            return None
        high = max(counts)
        low = max(min(counts), high + 1 - MAX_BUCKETS)
        made = [0] * (high + 1 - low)
        for place, count in counts.items():
            made[max(place, low) - low] += count
        return cls(made, [place / per_unit for place in range(low, high + 2)])

    def moments(self) -> tuple[int, float, float]:
        """Number of values, and their sum and sum of squares, as if each was in the middle of its bucket."""
        values = [(count, (low + high) / 2) for count, low, high in zip(self.counts, self.edges, self.edges[1:])]
        return sum(self.counts), sum(c * x for c, x in values), sum(c * x * x for c, x in values)


class Layers:
    """Chooses the tensors that get a curve of their own.

    Args:
        wanted: a regular expression to search names for, or the largest number of curves in a run.

    If it is a number, the tensors with the largest norms at the first call get half of the curves. The others go to
    tensors with NaN or Inf, the first in backward order first, and to each tensor that becomes the largest. A chosen
    tensor stays chosen, so the number is never exceeded.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._pattern: re.Pattern[str] | None = None
        self._most = 0
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            self._most = values.at_least(0, "layers", wanted)
        elif isinstance(wanted, (str, re.Pattern)):
            try:
                self._pattern = re.compile(wanted)
            except re.error as error:
                raise ValueError(f"`layers` must be a regular expression, got {wanted!r}: {error}") from None
        else:
            raise TypeError(f"`layers` must be a number or a regular expression, got {wanted!r}")
        self.names: dict[str, None] = {}  # chosen so far; an ordered set

    def choose(self, tensors: TensorStats, nonfinite: Iterable[str] = ()) -> list[int]:
        """Indices of the tensors to show, in their order."""
        names = tensors.names
        if self._pattern is not None:
            self.names = {name: None for name in names if self._pattern.search(name)}
        elif len(self.names) < min(self._most, len(names)):
            norms = tensors.column("finite_norm").tolist()
            first = max(1, self._most // 2) if not self.names else 1
            largest = sorted(range(len(norms)), key=norms.__getitem__, reverse=True)[:first]
            for name in (*nonfinite, *(names[i] for i in largest)):
                if len(self.names) < self._most:
                    self.names[name] = None
        return [i for i, name in enumerate(names) if name in self.names] if self.names else []

    def has(self, name: str) -> bool:
        """Whether the tensor is chosen."""
        return name in self.names if self._pattern is None else self._pattern.search(name) is not None

    def has_module(self, module: str) -> bool:
        """Whether a chosen tensor belongs to `module`, or the regular expression matches the module's name."""
        if self._pattern is None:
            return any(name.startswith(f"{module}.") for name in self.names)
        return self._pattern.search(module) is not None


class TrackerSink(Sink):
    """Passes records to an experiment tracker, as scalars, texts and histograms under the keys of logs.

    | key | what it is |
    |---|---|
    | `grad/…`, `clip/…` | as in `fastguard.sinks.flatten` |
    | `fastguard/loss`, `/val_loss`, `/lr`, `/loss_scale` | as in `fastguard.sinks.flatten` |
    | `fastguard/clipped`, `/skipped` | 0.0 or 1.0 |
    | `fastguard/event` | text: a step with NaN or Inf, or a skipped one |
    | `fastguard/finding/<rule>` | text: a finding about the running training, once each |
    | `grad/log10_norm` | histogram of the norms of all tensors |
    | `grad/num_zero_tensors`, `grad/num_nonfinite_tensors` | tensors that are not in the histogram of norms |
    | `grad/norm/<tensor>`, `weight/<name>/…`, `activation/<module>/…` | of the tensors that `layers` chooses |

    `grad/norm/<tensor>`, the histogram and the two counts come every `tensors_every` steps and at each bad step;
    `weight/…` and `activation/…` at the steps where they were sampled.
    In a distributed run only the sinks of rank 0 get records, unless you pass `wrap(…, ranks="all")`.

    Args:
        prefix: prefix of all names, such as "train/".
        every: log one step in this number. Steps with NaN or Inf and skipped steps are always logged.
        layers: which tensors get curves of their own: a regular expression to search their names for, or the largest
            number of tensors. A number takes those with the largest norms, and those that contain NaN or Inf.
        tensors_every: log curves of tensors and the histogram one step in this number; 0 for never.

    Subclasses implement `log`.
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        every: int = 1,
        layers: Wanted = MAX_LAYERS,
        tensors_every: int = 100,
    ) -> None:
        if not isinstance(prefix, str):
            raise TypeError(
                f"`prefix` must be text, got {prefix!r}. 'train/' puts all metrics into a section of that name."
            )
        self.prefix = prefix
        self.every = values.at_least(1, "every", every)
        self.tensors_every = values.at_least(0, "tensors_every", tensors_every)
        self._layers = Layers(layers)
        self._names: dict[str, str] = {}
        self._newest: int | None = None
        self._tensors_at: int | None = None

    @abc.abstractmethod
    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str], histograms: dict[str, Buckets]) -> None:
        """Logs the values of one step; names include the prefix."""

    def write(self, record: StepStats) -> None:
        """Logs the record if it is due, was skipped, or is not finite."""
        step, is_bad = record.step, record.skipped or not record.is_finite
        if step % self.every and not is_bad:
            return
        of_tensors: dict[str, float] = {}
        texts: dict[str, str] = {}
        histograms: dict[str, Buckets] = {}
        at = self._tensors_at
        is_due = self.tensors_every > 0 and (at is None or not 0 <= step - at < self.tensors_every)
        if is_due or (is_bad and self.tensors_every):
            self._add_tensors(record, of_tensors, histograms)
        if is_due:
            self._tensors_at = step
        if is_bad:
            texts[self.name("event")] = _event(record)
        self.log(step, {**self._scalars(record), **of_tensors}, texts, histograms)
        self._newest = step

    def write_line(self, step: int, line: bytes) -> bool:
        """Returns whether this clean step is not due, so that no record of it is needed."""
        return step % self.every != 0

    def tell(self, finding: dict[str, Any]) -> None:
        """Writes a finding as text."""
        last = finding["last_step"] or 0
        step = last if self._newest is None else max(last, self._newest)
        at = "" if finding["last_step"] is None else f", step {last}"
        text = f"[{finding['severity']}{at}] {finding['summary']} {finding['recommendation']}"
        self.log(step, {}, {self.name(f"finding/{finding['rule']}"): prose(text.strip())}, {})

    def has_taken(self, step: int) -> bool | None:
        """True if the newest record is that of `step`; None if it may have been logged nonetheless."""
        return True if self._newest == step else None

    def name(self, key: str) -> str:
        """The tracker's name for a key of a log."""
        known = self._names.get(key)
        if known is None:
            is_own = "/" not in key or key.startswith("finding/")
            known = self._names[key] = self.prefix + (_OWN + key if is_own else key)
        return known

    def _scalars(self, record: StepStats) -> dict[str, float]:
        if record.activations or record.weights:
            modules = tuple(one for one in record.activations if self._layers.has_module(one.name))
            weights = tuple(one for one in record.weights if self._layers.has(one.name))
            record = replace(record, activations=modules, weights=weights)
        return {
            self.name(key): float(value)
            for key, value in flatten(record).items()
            if key != "step" and value.__class__ is not list and not (key.endswith("/trigger") and value == math.inf)
        }

    def _add_tensors(self, record: StepStats, scalars: dict[str, float], histograms: dict[str, Buckets]) -> None:
        tensors, name = record.tensors, self.name
        chosen = self._layers.choose(tensors, record.nonfinite)
        for i in chosen:
            scalars[name(f"grad/norm/{tensors.names[i]}")] = tensors[i].norm
        nonfinite = set(tensors.nonfinite) if not record.is_finite else set()
        norms = [norm for i, norm in enumerate(tensors.column("finite_norm").tolist()) if i not in nonfinite]
        counts = Counter(math.floor(PER_DECADE * math.log10(norm)) for norm in norms if norm)
        buckets = Buckets.from_counts(counts, PER_DECADE)
        if buckets is not None:
            histograms[name("grad/log10_norm")] = buckets
        scalars[name("grad/num_zero_tensors")] = float(sum(norm == 0.0 for norm in norms))
        scalars[name("grad/num_nonfinite_tensors")] = float(len(nonfinite))


class RunSink(TrackerSink):
    """Logs rows to the run that `init` of a tracker's package returned; None on ranks that do not log."""

    _package = ""

    def __init__(self, run: Any, **options: Any) -> None:
        super().__init__(**options)
        self._histogram = imported(self._package, type(self).__name__, self._package).Histogram
        if run is not None and not callable(getattr(run, "log", None)):
            raise TypeError(f"`run` must be what {self._package}.init returned, got {run!r}")
        self._run = run

    def _row(self, scalars: dict[str, float], texts: dict[str, str], histograms: dict[str, Buckets]) -> dict[str, Any]:
        """The values of a step as the tracker takes them; a ValueError if there is no run."""
        if self._run is None:
            init = f"{self._package}.init"
            raise ValueError(f"`run` must be what {init} returned, got None. Call {init} before the sink is made.")
        made = {name: self._histogram(np_histogram=tuple(buckets)) for name, buckets in histograms.items()}
        return {**scalars, **texts, **made}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self._run, 'name', None) or getattr(self._run, 'id', None)!r})"


def imported(module: str, sink: str, extra: str) -> Any:
    """Imports the module of a tracker; an ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(sink, extra, error) from error


def _event(record: StepStats) -> str:
    if record.nonfinite:
        what = f"gradients are not finite, first in {listed(record.nonfinite)}"
    elif not record.is_finite:
        what = "the norm of all gradients overflowed"
    else:
        what = f"the norm of the gradients was {record.norm:.4g}"
    return prose(f"step {record.step}: {what}; the step was {'' if record.skipped else 'not '}skipped")
