"""Runs as figures show them, from a guard, a history or a log."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._text import NAME_WIDTH, shown
from ..records import Entry, StepStats, TrainingHistory
from ..records.loading import fill
from ..records.log import LogReader
from .style import MAX_POINTS, Curve, Grid, Stretch

# From the best to the worst: if steps share a pixel, it shows the worst.
STATES = ("none", "good", "clipped", "resumed", "rolled back", "skipped", "not finite")
_RANK = {state: rank for rank, state in enumerate(STATES)}
_MAX_BYTES = 1 << 22
MAX_COLUMNS = 400
MAX_RUNS = 8
_ROOTS = ("", "/", ".", "..")
# The values of a sampled module or weight that figures show; None if it has none.
_OF_MODULES: dict[str, Callable[[Any], float | None]] = {
    "near zero": lambda m: None if m.is_choice else m.stats.near_zero_ratio,
    "saturated": lambda m: None if m.is_choice else m.stats.saturation_ratio,
    "entropy": lambda m: m.entropy,
    "dead": lambda m: m.dead_unit_ratio if m.num_units else None,
}
_OF_WEIGHTS: dict[str, Callable[[Any], float | None]] = {"update": lambda w: w.update_ratio}
_DRAWN = ("numel", "finite_norm", "abs_max", "num_zeros", "num_nans", "num_infs")


class Ribbon:
    """The state of each step: "good", "clipped", "resumed" (the first after a restart), "rolled back" (its changes to
    the parameters were undone), "skipped" or "not finite" (whether skipped or not).

    >>> ribbon = Ribbon()
    >>> for step in range(100):
    ...     ribbon.add(step, "skipped" if step == 42 else "good")
    >>> ribbon.worst(10)[4], ribbon.worst(10)[5], ribbon.counts["good"]
    ('skipped', 'good', 99)
    """

    def __init__(self) -> None:
        self.first_step = self.last_step = 0  # the steps of the first and the last byte of `states`
        self.width = 1  # steps per byte: 1 up to four million steps, then 2, 4, ...; the worst of them counts
        self.states = bytearray()  # places in `STATES`, one per byte
        self.counts = dict.fromkeys(STATES[1:], 0)  # number of steps in each state

    def add(self, step: int, state: str) -> None:
        """Takes a step; if its number is not above the last one, the run was resumed. Cost: 0.3 us."""
        self.counts[state] += 1
        rank = _RANK[state]
        if not self.states:
            self.first_step = step
        elif step <= self.last_step:
            rank = max(rank, _RANK["resumed"])
            self.counts["resumed"] += 1
        self.last_step = step
        if step < self.first_step:  # before the first one: it has no place
            return
        place = (step - self.first_step) // self.width
        while place >= _MAX_BYTES:
            states = self.states + b"\0" * (len(self.states) % 2)
            self.states = bytearray(map(max, states[::2], states[1::2]))
            self.width *= 2
            place = (step - self.first_step) // self.width
        if place >= len(self.states):
            self.states.extend(b"\0" * (place - len(self.states) + 1))
        if rank > self.states[place]:
            self.states[place] = rank

    def mark(self, first: int, last: int, state: str) -> None:
        """Sets the steps from `first` to `last` to `state`, unless theirs is worse, and counts them."""
        rank, states = _RANK[state], self.states
        begin, end = ((step - self.first_step) // self.width for step in (first, last))
        for place in range(max(0, begin), min(len(states), end + 1)):
            states[place] = max(states[place], rank)
        self.counts[state] += last - first + 1

    def worst(self, num: int) -> list[str]:
        """The worst state in each of `num` equal parts; "none" without steps."""
        states, size = self.states, len(self.states)
        cuts = [i * size // num for i in range(num + 1)]
        return [STATES[max(states[a : max(b, a + 1)], default=0)] for a, b in itertools.pairwise(cuts)]

    def rolling(self, state: str, window: int, num: int) -> list[tuple[int, float]]:
        """At most `num` steps, each with the share in `state` of the last `window` steps up to it."""
        states, rank, size = self.states, _RANK[state], len(self.states)
        found = []
        for end in sorted({-(-size * i // num) for i in range(1, num + 1)}):
            begin = max(0, end - max(1, window // self.width))
            if known := end - begin - states.count(0, begin, end):
                step = min(self.last_step, self.first_step + end * self.width - 1)
                found.append((step, states.count(rank, begin, end) / known))
        return found


class DrawnRun(TrainingHistory):
    """A history that also keeps the series that figures show.

    Attributes:
        name: the name of the run.
        curves: "loss", "val_loss", "norm", "clipped norm", "lr" and "loss_scale" by step; for a log also the "time" at
            which a step was written, in seconds since 1970.
        rails: steps that were "NaN", "Inf" or "skipped", had a norm of "zero", or a loss that is "bad".
        grids: "norm", "rms", "max" and "zeros" of each tensor's gradient; "update" of each weight;
            "near zero", "saturated", "dead" and "entropy" of each module.
        ribbon: the state of each step; for a history, of the steps in its window.
        guard: the guard of the run, or None.
        path: the log that it was read from, or None.
        num_runs: number of runs in that log; this is the last.
        is_whole: whether every step is known; else older ones only by their smallest, mean and largest values.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._of: TrainingHistory | None = None
        self.name = name
        self.path: str | os.PathLike[str] | None = None
        self.num_runs = 1
        self.guard: Any = None
        self.is_whole = True
        keys = ("loss", "val_loss", "norm", "clipped norm", "lr", "loss_scale", "time")
        self.curves = {key: Curve(MAX_POINTS) for key in keys}
        self.rails: dict[str, list[int]] = {key: [] for key in ("NaN", "Inf", "skipped", "zero", "bad")}
        kinds = ("norm", "rms", "max", "zeros", "update", "near zero", "saturated", "dead", "entropy")
        self.grids = {kind: Grid(MAX_COLUMNS) for kind in kinds}
        self.ribbon = Ribbon()

    @property
    def history(self) -> TrainingHistory:
        """The history for the rules: this one, or the one that it was made from."""
        return self if self._of is None else self._of

    def _another(self) -> DrawnRun:
        return DrawnRun(self.name)

    def finish(self) -> None:
        """Marks rolled-back steps; called after the last step."""
        for event in self.history.model.recoveries:
            if event["kind"] == "rollback":
                self.ribbon.mark(event.get("to", event["step"]), event["step"], "rolled back")

    def extend(self, entries: list[Entry], records: Sequence[StepStats] = ()) -> None:
        """Takes steps into the history and the series."""
        super().extend(entries, records)
        self.draw(entries)
        for record in records:
            self._draw_tensors(record)
            self.draw_samples(record.step, record.activations, _OF_MODULES)
            self.draw_samples(record.step, record.weights, _OF_WEIGHTS)

    def draw(self, entries: Iterable[Entry]) -> None:
        """Takes steps into the series. Cost: 2 us each."""
        drawn: dict[str, list[tuple[int, float]]] = {}
        for step, norm, clip_coef, skipped, *values, _ in entries:
            is_finite = math.isfinite(norm)
            state = "skipped" if skipped else "clipped" if clip_coef != 1.0 else "good"
            self.ribbon.add(step, state if is_finite else "not finite")
            if skipped:
                self.rails["skipped"].append(step)
            if not is_finite:
                self.rails["NaN" if math.isnan(norm) else "Inf"].append(step)
            elif norm == 0.0:
                self.rails["zero"].append(step)
            else:
                drawn.setdefault("norm", []).append((step, norm))
                if not skipped:
                    drawn.setdefault("clipped norm", []).append((step, norm * clip_coef))
            for key, value in zip(("loss", "val_loss", "lr", "loss_scale"), values):
                if value is not None and math.isfinite(value):
                    drawn.setdefault(key, []).append((step, value))
                elif value is not None and key == "loss":
                    self.rails["bad"].append(step)
        for key, points in drawn.items():
            self.curves[key].extend(*zip(*points))

    def _draw_tensors(self, record: StepStats) -> None:
        table = record.tensors
        if not len(table) or not any(table.column("numel")):
            return  # names only, without figures
        numels, finite, largest, zeros, nans, infs = (table.column(name).tolist() for name in _DRAWN)
        bad = [nan or inf for nan, inf in zip(nans, infs)]
        norms: list[float] = [math.inf if b else norm for norm, b in zip(finite, bad)]
        drawn: dict[str, list[float]] = {
            "norm": norms,
            "rms": [norm / math.sqrt(numel) if numel else math.nan for norm, numel in zip(norms, numels)],
            "max": [math.inf if b else top for top, b in zip(largest, bad)],
            "zeros": [num / numel if numel else math.nan for num, numel in zip(zeros, numels)],
        }
        for kind, values in drawn.items():
            self.grids[kind].add(record.step, table.names, values)

    def draw_samples(
        self, step: int, sampled: Iterable[Any], measures: Mapping[str, Callable[[Any], float | None]]
    ) -> None:
        """Takes the sampled modules or weights of a step."""
        for kind, measure in measures.items():
            found = {one.name: value for one in sampled if (value := measure(one)) is not None}
            if found:
                self.grids[kind].add(step, found, found.values())

    def in_order(self, names: Iterable[str]) -> list[str]:
        """`names` in the order of the model; names that are not in the model come last."""
        place = {name: i for i, name in enumerate(self.history.model.names)}
        return sorted(names, key=lambda name: place.get(name, len(place)))


def runs_of(source: Any) -> list[DrawnRun]:
    """The 1 to 8 runs of a figure.

    Args:
        source: a guard, a guarded optimizer, a `TrainingHistory`, the path of a log; a list of such; a dict of such
            with labels. If a guard has a `JsonlSink` or a `MemorySink`, figures show the steps and tables of these.

    Raises:
        TypeError: `source` is anything else.
        ValueError: there is no step, or more than eight runs.
        OSError: a log cannot be read.
    """
    if isinstance(source, Mapping):
        named = [(str(name), one) for name, one in source.items()]
    elif isinstance(source, (list, tuple)):
        named = [("", one) for one in source]
    else:
        named = [("", source)]
    if not 1 <= len(named) <= MAX_RUNS:
        raise ValueError(f"a figure shows 1 to {MAX_RUNS} runs, got {len(named)}")
    runs = [_run_of(one, name) for name, one in named]
    for place, run in enumerate(runs):
        is_new = run.name not in [other.name for other in runs[:place]]
        run.name = (run.name if is_new else f"{run.name} ({place + 1})") or f"run {place + 1}"
        if not run.history.num_steps:
            raise ValueError(f"there is nothing to plot: {run.name!r} holds no step yet")
    return runs


def _run_of(source: Any, name: str) -> DrawnRun:
    if isinstance(source, DrawnRun):
        return source
    if isinstance(source, (str, os.PathLike)):
        return from_log(source, name)
    guard = getattr(source, "guard", source)  # of an optimizer
    if hasattr(guard, "history") and hasattr(guard, "flush"):
        return _of_guard(guard, name)
    if isinstance(source, TrainingHistory):
        return _of_history(source, name)
    raise TypeError(
        "`source` must be a guard, a guarded optimizer, a TrainingHistory or the path of a log, or several in a list "
        f"or a dict, got {type(source).__name__}"
    )


class _ClockReader(LogReader):
    """A reader that also keeps the times at which steps were written."""

    def __init__(self, path: str | os.PathLike[str], run: DrawnRun) -> None:
        super().__init__(path)
        self._run = run

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in super().__iter__():
            yield line  # which may begin another run
            step, written = line.get("step"), line.get("time")
            if type(step) is int and type(written) is float:
                self._run.curves["time"].add(step, written)


def from_log(path: str | os.PathLike[str], name: str) -> DrawnRun:
    """The run of a log; one pass over it, in bounded memory.

    Its name is by default that of the file with its folder, such as "demo/run" for `runs/demo/run.jsonl`.
    """
    parts = [part for part in Path(path).with_suffix("").parts[-2:] if part not in _ROOTS]
    run = DrawnRun(name or shown("/".join(parts), NAME_WIDTH))
    reader = _ClockReader(path, run)
    fill(run, reader, path)
    run.path, run.num_runs = path, reader.num_runs
    run.finish()
    return run


def _of_guard(guard: Any, name: str) -> DrawnRun:
    """From the records of a `MemorySink`, else from the file of a `JsonlSink`, else from the history."""
    guard.flush()
    history, sinks = guard.history, [getattr(sink, "sink", sink) for sink in guard._ledger.sinks]
    records = next((sink.records for sink in sinks if hasattr(sink, "records")), ())
    path = next((sink.path for sink in sinks if hasattr(sink, "tensors_every")), None)
    if records and len(records) == history.num_steps:
        run = DrawnRun(name)
        run.model = history.model
        for record in list(records):
            run.add(record)
        run.finish()
    else:
        run = _of_history(history, name) if path is None or not os.path.isfile(path) else from_log(path, name)
    run.guard = guard
    return run


def _of_history(history: TrainingHistory, name: str) -> DrawnRun:
    """The newest steps one by one, older ones by their smallest, mean and largest values."""
    run = DrawnRun(name)
    run._of, curves = history, run.curves
    newest = list(history.recent)
    begin = newest[0].step if newest else 0
    run.is_whole = len(newest) == history.num_steps
    for bucket in () if run.is_whole else history.overview.buckets:
        for key, series in (("loss", bucket.loss), ("norm", bucket.norm), ("lr", bucket.lr)):
            if bucket.last_step < begin and series.num:
                steps = bucket.first_step, bucket.last_step
                curves[key].add_stretch(Stretch(*steps, series.min, series.mean, series.max))
    events = {event.step: event for event in (*history.first_events, *history.last_events) if event.step < begin}
    for step, event in sorted(events.items()):
        run.rails["NaN" if event.num_nans else "Inf"].append(step)
        if event.skipped:
            run.rails["skipped"].append(step)
    for validation in history.validations:
        if validation.step < begin:
            curves["val_loss"].add(validation.step, validation.val_loss)
    run.draw(newest)
    _take_samples(run, history)
    _take_tracks(run, history)
    run.finish()
    return run


def _take_tracks(run: DrawnRun, history: TrainingHistory) -> None:
    """Two columns: the gradient of each tensor in its first samples, and recently."""
    tracks = [(name, track) for name, track in history.tensors.items() if not math.isnan(track.log_rms)]
    for is_late in (False, True):
        logs = [track.log_rms if is_late else track.first_log_rms for _, track in tracks]
        if tracks:
            step = max(track.last_step if is_late else track.first_step for _, track in tracks)
            names, rms = [name for name, _ in tracks], [math.exp(log) for log in logs]
            run.grids["rms"].add(step, names, rms)
            norms = [value * math.sqrt(track.numel) for value, (_, track) in zip(rms, tracks)]
            run.grids["norm"].add(step, names, norms)


def _take_samples(run: DrawnRun, history: TrainingHistory) -> None:
    """The windows of sampled activations and weights, by step."""
    for windows, measures in ((history.activations, _OF_MODULES), (history.weights, _OF_WEIGHTS)):
        by_step: dict[int, list[Any]] = {}
        for _, window in windows.items():
            for point in {p.step: p for p in (window.first, *window.recent)}.values():
                by_step.setdefault(point.step, []).append(point.value)
        for step, items in sorted(by_step.items()):
            run.draw_samples(step, items, measures)
