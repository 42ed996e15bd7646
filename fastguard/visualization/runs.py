"""Runs as figures show them, from a guard, a history or a log."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._text import NAME_WIDTH, shown
from ..records import Entry, StepStats, TrainingHistory
from ..records.loading import fill
from ..records.log import LogReader
from .style import Curve, Grid, Stretch

MAX_COLUMNS = 400
MAX_RUNS = 8
_ROOTS = ("", "/", ".", "..")
# The values of a sampled module or weight that figures show; None if it has none.
_OF_MODULES: dict[str, Callable[[Any], float | None]] = {
    "near zero": lambda m: m.stats.near_zero_ratio,
    "saturated": lambda m: m.stats.saturation_ratio,
    "dead": lambda m: m.dead_unit_ratio if m.num_units else None,
}
_OF_WEIGHTS: dict[str, Callable[[Any], float | None]] = {"update": lambda w: w.update_ratio}
_CURVES = ("loss", "val_loss", "lr", "loss_scale", "norm", "clipped norm", "clipped")
_RAILS = ("NaN", "Inf", "skipped", "zero", "bad")  # marked steps
_DRAWN = ("numel", "finite_norm", "abs_max", "num_zeros", "num_nans", "num_infs")


class DrawnRun(TrainingHistory):
    """A history that also keeps the series that figures show: curves by step, of marked steps, too, and grids."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._of: TrainingHistory | None = None
        self.name = name
        self.guard: Any = None  # the guard of the run, or None
        self.curves = {key: Curve() for key in (*_CURVES, *_RAILS)}
        kinds = ("norm", "rms", "max", "zeros", "update", "near zero", "saturated", "dead")
        self.grids = {kind: Grid(MAX_COLUMNS) for kind in kinds}

    @property
    def history(self) -> TrainingHistory:
        """The history for the rules: this one, or the one that it was made from."""
        return self if self._of is None else self._of

    def _another(self) -> DrawnRun:
        return DrawnRun(self.name)

    def extend(self, entries: list[Entry], records: Sequence[StepStats] = ()) -> None:
        super().extend(entries, records)
        self.draw(entries)
        for record in records:
            self._draw_tensors(record)
            self.draw_samples(record.step, record.activations, _OF_MODULES)
            self.draw_samples(record.step, record.weights, _OF_WEIGHTS)

    def draw(self, entries: Iterable[Entry]) -> None:
        """Takes steps into the series. Cost: 5 us each."""
        curves = self.curves
        for step, norm, clip_coef, skipped, *values, _ in entries:
            is_finite = math.isfinite(norm)
            curves["clipped"].add(step, float(is_finite and not skipped and clip_coef != 1.0))
            if skipped:
                curves["skipped"].add(step)
            if not is_finite:
                curves["NaN" if math.isnan(norm) else "Inf"].add(step)
            elif norm == 0.0:
                curves["zero"].add(step)
            else:
                curves["norm"].add(step, norm)
                if not skipped:
                    curves["clipped norm"].add(step, norm * clip_coef)
            for key, value in zip(_CURVES, values):
                if value is not None and math.isfinite(value):
                    curves[key].add(step, value)
                elif value is not None and key == "loss":
                    curves["bad"].add(step)

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
    """The 1 to 8 runs of a figure, each with a name of its own."""
    several = source if isinstance(source, (list, tuple, Mapping)) else [source]
    named = [("", one) for one in several]
    if isinstance(source, Mapping):
        named = [(str(name), one) for name, one in source.items()]
    if not 1 <= len(named) <= MAX_RUNS:
        raise ValueError(f"a figure shows 1 to {MAX_RUNS} runs, got {len(named)}")
    runs = [run_of(one, name) for name, one in named]
    for place, run in enumerate(runs):
        is_new = run.name not in [other.name for other in runs[:place]]
        run.name = (run.name if is_new else f"{run.name} ({place + 1})") or f"run {place + 1}"
    return runs


def run_of(source: Any, name: str = "") -> DrawnRun:
    """The run of a guard, a history or the path of a log; a ValueError if it holds no step."""
    guard = getattr(source, "guard", source)  # of an optimizer
    if isinstance(source, DrawnRun):
        run = source
    elif isinstance(source, (str, os.PathLike)):
        run = from_log(source, name)
    elif hasattr(guard, "history") and hasattr(guard, "flush"):
        run = _of_guard(guard, name)
    elif isinstance(source, TrainingHistory):
        run = _of_history(source, name)
    else:
        raise TypeError(
            "`source` must be a guard, a guarded optimizer, a TrainingHistory or the path of a log, or several in a "
            f"list or a dict, got {type(source).__name__}"
        )
    if not run.history.num_steps:
        raise ValueError(f"there is nothing to plot: {run.name or 'the run'} holds no step yet")
    return run


def from_log(path: str | os.PathLike[str], name: str) -> DrawnRun:
    """The run of a log; one pass over it, in bounded memory.

    Its name is by default that of the file with its folder, such as "demo/run" for `runs/demo/run.jsonl`.
    """
    parts = [part for part in Path(path).with_suffix("").parts[-2:] if part not in _ROOTS]
    run = DrawnRun(name or shown("/".join(parts), NAME_WIDTH))
    fill(run, LogReader(path), path)
    return run


def _of_guard(guard: Any, name: str) -> DrawnRun:
    """From the file of a `JsonlSink`, else from the history."""
    guard.flush()
    sinks = [getattr(sink, "sink", sink) for sink in guard._ledger.sinks]
    path = next((sink.path for sink in sinks if hasattr(sink, "write_line") and hasattr(sink, "path")), None)
    run = _of_history(guard.history, name) if path is None or not os.path.isfile(path) else from_log(path, name)
    run.guard = guard
    return run


def _of_history(history: TrainingHistory, name: str) -> DrawnRun:
    """The newest steps one by one, older ones by their smallest, mean and largest values."""
    run = DrawnRun(name)
    run._of, curves = history, run.curves
    newest = list(history.recent)
    begin = newest[0].step if newest else 0
    for bucket in () if len(newest) == history.num_steps else history.overview.buckets:
        for key, series in (("loss", bucket.loss), ("norm", bucket.norm), ("lr", bucket.lr)):
            if bucket.last_step < begin and series.num:
                steps = bucket.first_step, bucket.last_step
                curves[key].push(Stretch(*steps, series.num, series.min, series.mean, series.max))
    events = {event.step: event for event in (*history.first_events, *history.last_events) if event.step < begin}
    for step, event in sorted(events.items()):
        curves["NaN" if event.num_nans else "Inf"].add(step)
        if event.skipped:
            curves["skipped"].add(step)
    for validation in history.validations:
        if validation.step < begin:
            curves["val_loss"].add(validation.step, validation.val_loss)
    run.draw(newest)
    tracks = {name: track for name, track in history.tensors.items() if not math.isnan(track.log_rms)}
    # Two columns: the gradient of each tensor in its first samples, and recently.
    for step_of, log_of in (("first_step", "first_log_rms"), ("last_step", "log_rms")) if tracks else ():
        step = max(getattr(track, step_of) for track in tracks.values())
        rms = [math.exp(getattr(track, log_of)) for track in tracks.values()]
        norms = [value * math.sqrt(track.numel) for value, track in zip(rms, tracks.values())]
        run.grids["rms"].add(step, tracks, rms)
        run.grids["norm"].add(step, tracks, norms)
    for windows, measures in ((history.activations, _OF_MODULES), (history.weights, _OF_WEIGHTS)):
        by_step: dict[int, list[Any]] = {}
        for _, window in windows.items():
            for point in {p.step: p for p in (window.first, *window.recent)}.values():
                by_step.setdefault(point.step, []).append(point.value)
        for step, items in sorted(by_step.items()):
            run.draw_samples(step, items, measures)
    return run
