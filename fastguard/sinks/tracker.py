"""The base class of sinks for experiment trackers: which steps and tensors are logged, and under which names."""

from __future__ import annotations

import abc
import importlib
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .._text import listed, prose
from ..errors import missing_package
from ..records import StepStats, TensorStats, values
from .sink import Sink, flatten

MAX_LAYERS = 16
_OWN = "fastguard/"  # section of keys without one, such as "loss", which are likely names of your own metrics


class Layers:
    """Chooses the tensors that get a curve of their own, at most `most` in a run.

    The tensors with the largest norms at the first call get half of the curves. The others go to tensors with NaN or
    Inf, the first in backward order first, and to each tensor that becomes the largest. A chosen tensor stays chosen.
    """

    def __init__(self, most: int) -> None:
        self._most = values.at_least(0, "layers", most)
        self.names: dict[str, None] = {}  # chosen so far; an ordered set

    def choose(self, tensors: TensorStats, nonfinite: Iterable[str] = ()) -> list[int]:
        """Indices of the tensors to show, in their order."""
        names = tensors.names
        if len(self.names) < min(self._most, len(names)):
            norms = tensors.column("finite_norm").tolist()
            first = max(1, self._most // 2) if not self.names else 1
            largest = sorted(range(len(norms)), key=norms.__getitem__, reverse=True)[:first]
            for name in (*nonfinite, *(names[i] for i in largest)):
                if len(self.names) < self._most:
                    self.names[name] = None
        return [i for i, name in enumerate(names) if name in self.names] if self.names else []

    def has_module(self, module: str) -> bool:
        """Whether a chosen tensor belongs to `module`."""
        return any(name.startswith(f"{module}.") for name in self.names)


class TrackerSink(Sink):
    """Passes records to an experiment tracker, as scalars and texts under the keys of logs.

    | key | what it is |
    |---|---|
    | `grad/…`, `clip/…` | as in `fastguard.sinks.flatten` |
    | `fastguard/loss`, `/val_loss`, `/lr`, `/loss_scale` | as in `fastguard.sinks.flatten` |
    | `fastguard/clipped`, `/skipped` | 0.0 or 1.0 |
    | `fastguard/event` | text: a step with NaN or Inf, or a skipped one |
    | `fastguard/finding/<rule>` | text: a finding about the running training, once each |
    | `grad/norm/<tensor>`, `weight/<name>/…`, `activation/<module>/…` | of the tensors that `layers` chooses |

    `grad/norm/<tensor>` comes every `tensors_every` steps and at each bad step; `weight/…` and `activation/…` at the
    steps where they were sampled.
    In a distributed run only the sinks of rank 0 get records, unless you pass `wrap(…, ranks="all")`.

    Args:
        prefix: prefix of all names, such as "train/".
        every: log one step in this number. Steps with NaN or Inf and skipped steps are always logged.
        layers: the largest number of tensors with curves of their own: those with the largest norms, and those that
            contain NaN or Inf.
        tensors_every: log curves of tensors one step in this number; 0 for never.

    Subclasses implement `log`.
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        every: int = 1,
        layers: int = MAX_LAYERS,
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
    def log(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        """Logs the values of one step; names include the prefix."""

    def write(self, record: StepStats) -> None:
        """Logs the record if it is due, was skipped, or is not finite."""
        step, is_bad = record.step, record.skipped or not record.is_finite
        if step % self.every and not is_bad:
            return
        of_tensors: dict[str, float] = {}
        texts: dict[str, str] = {}
        at = self._tensors_at
        is_due = self.tensors_every > 0 and (at is None or not 0 <= step - at < self.tensors_every)
        if is_due or (is_bad and self.tensors_every):
            tensors = record.tensors
            chosen = self._layers.choose(tensors, record.nonfinite)
            of_tensors = {self.name(f"grad/norm/{tensors.names[i]}"): tensors[i].norm for i in chosen}
        if is_due:
            self._tensors_at = step
        if is_bad:
            texts[self.name("event")] = _event(record)
        self.log(step, {**self._scalars(record), **of_tensors}, texts)
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
        self.log(step, {}, {self.name(f"finding/{finding['rule']}"): prose(text.strip())})

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
            weights = tuple(one for one in record.weights if one.name in self._layers.names)
            record = replace(record, activations=modules, weights=weights)
        return {
            self.name(key): float(value)
            for key, value in flatten(record).items()
            if key != "step" and value.__class__ is not list and not (key.endswith("/trigger") and value == math.inf)
        }


class RunSink(TrackerSink):
    """Logs rows to the run that `init` of a tracker's package returned; None on ranks that do not log."""

    _package = ""

    def __init__(self, run: Any, **options: Any) -> None:
        super().__init__(**options)
        imported(self._package, type(self).__name__, self._package)
        if run is not None and not callable(getattr(run, "log", None)):
            raise TypeError(f"`run` must be what {self._package}.init returned, got {run!r}")
        self._run = run

    def _row(self, scalars: dict[str, float], texts: dict[str, str]) -> dict[str, Any]:
        """The values of a step; a ValueError if there is no run."""
        if self._run is None:
            init = f"{self._package}.init"
            raise ValueError(f"`run` must be what {init} returned, got None. Call {init} before the sink is made.")
        return {**scalars, **texts}

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
