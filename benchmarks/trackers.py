"""What the sinks of trackers cost the thread that trains: `python -m benchmarks.trackers [--steps N] [--cpu-time]`.

About a minute. Takes the packages that are installed, offline: tensorboard, wandb, mlflow (with SQLAlchemy and
alembic), trackio, prometheus-client. Each sink is given one record a step by its `SafeSink`, as by a guard, and between
two steps the thread computes for a millisecond, so that threads and processes of the trackers have their turn. A record
has 20 scalars; then once more as the sinks come, with curves of 16 of 100 tensors every 100 steps. The
time for which a tracker holds Python's lock while the thread computes is not in these figures.

Correct first: no sink may have lost a record.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastguard import tensor_stats
from fastguard.commands.bench import gc_off
from fastguard.records import ClippedGroup, StepStats
from fastguard.sinks import (
    JsonlSink,
    MlflowSink,
    PrometheusSink,
    SafeSink,
    TensorBoardSink,
    TrackerSink,
    TrackioSink,
    WandbSink,
)

from .machine import Machine, line

NUM_SCALARS, NUM_TENSORS, COMPUTE_S = 20, 100, 0.001
LIMITS_US = {"TensorBoard": 150, "W&B": 400, "MLflow": 60, "Trackio": 60, "Prometheus": 15}
KINDS: dict[str, dict[str, Any]] = {"scalars": {"tensors_every": 0}, "as_it_comes": {}}  # steps go on: W&B minds
Row = dict[str, Any]


class CountingSink(TrackerSink):
    """Counts the scalars of a record."""

    def log(self, step: int, scalars: dict[str, float], texts: Any) -> None:
        self.num_scalars = len(scalars)


def records(steps: range) -> Iterator[StepStats]:
    """Steps with 20 scalars each, and a table of their own, as a guard makes them for a sink."""
    torch.manual_seed(0)
    tensors = [torch.randn(64) * 10.0 ** (i % 7 - 3) for i in range(NUM_TENSORS)]
    names = [f"layers.{i}.weight" for i in range(NUM_TENSORS)]
    groups = (ClippedGroup("all", 2.0, 1.0, float("inf")),)
    known: dict[str, Any] = {"loss": 1.5, "lr": 1e-3, "loss_scale": 1024.0, "groups": groups}
    for step in steps:
        table = tensor_stats(tensors, names=names)
        yield StepStats(step, table, clip_coef=0.5, grad_cosine=0.1, trigger=1.0, **known)


def sinks(folder: Path) -> Iterator[tuple[str, Callable[..., Any], Callable[[], object]]]:
    """Name, maker and what is to be done after each tracker that is here."""
    yield "JSON lines", lambda **options: JsonlSink(folder / "run.jsonl"), lambda: None
    yield "TensorBoard", lambda **options: TensorBoardSink(folder / "tb", **options), lambda: None
    for package, make in (("wandb", _wandb), ("mlflow", _mlflow), ("trackio", _trackio)):
        try:
            yield make(folder)
        except ImportError as error:
            sys.stderr.write(f"{package} is left out: {error}\n")
    yield "Prometheus", lambda **options: PrometheusSink(0), lambda: None


def _wandb(folder: Path) -> tuple[str, Callable[..., Any], Callable[[], object]]:
    import wandb

    run = wandb.init(project="benchmark", dir=str(folder), mode="offline")
    return "W&B", lambda **options: WandbSink(run, **options), lambda: None


def _mlflow(folder: Path) -> tuple[str, Callable[..., Any], Callable[[], object]]:
    import mlflow

    uri = f"sqlite:///{folder / 'runs.db'}"
    client = mlflow.MlflowClient(uri)
    run = client.create_run(client.create_experiment("benchmark", str(folder)))
    return "MLflow", lambda **options: MlflowSink(run, tracking_uri=uri, **options), lambda: None


def _trackio(folder: Path) -> tuple[str, Callable[..., Any], Callable[[], object]]:
    import trackio

    run = trackio.init("benchmark", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    return "Trackio", lambda **options: TrackioSink(run, **options), run.finish


def measured(sink: SafeSink, steps: range, clock: Callable[[], float]) -> Row:
    """Microseconds a step on this thread: median, mean and 99th percentile, without the first tenth."""
    times = []
    with gc_off():
        for record in records(steps):
            started = clock()
            sink.write(record)
            times.append(1e6 * (clock() - started))
            until = time.perf_counter() + COMPUTE_S
            while time.perf_counter() < until:
                torch.ones(64, 64).sum()
    kept = times[len(steps) // 10 :]
    return {
        "median_us": statistics.median(kept),
        "mean_us": statistics.fmean(kept),
        "p99_us": statistics.quantiles(kept, n=100)[98],
    }


def run(num_steps: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Figures of all trackers that are here."""
    counting = CountingSink(tensors_every=0)
    counting.write(next(records(range(1))))
    assert counting.num_scalars == NUM_SCALARS, f"a record has {counting.num_scalars} scalars"
    machine, rows = Machine(), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update(WANDB_SILENT="true", TRACKIO_DIR=folder, HF_HUB_OFFLINE="1")
        for name, make, after in sinks(Path(folder)):
            row: Row = {"tracker": name, "limit_us": LIMITS_US.get(name)}
            for place, (kind, options) in enumerate(KINDS.items()):
                try:
                    sink = SafeSink(make(**options))
                except ImportError as error:
                    sys.stderr.write(f"{name} is left out: {error}\n")
                    break
                row[kind] = measured(sink, range(place * num_steps, (place + 1) * num_steps), clock)
                sink.close()
                if sink.num_lost:
                    raise RuntimeError(f"{name} lost {sink.num_lost} records: {sink.last_error}")
            else:
                rows.append(row)
            after()
    facts = {"num_steps": num_steps, "num_scalars": NUM_SCALARS, "clock": clock.__name__}
    return {"machine": machine.to_dict(), **facts, "trackers": rows}


def table(results: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    what = f"us a step ({results['clock']}) on the thread that trains, {results['num_scalars']} scalars"
    lines = [line(results["machine"]), what, ""]
    lines.append(f"{'':<12} {'median':>8} {'mean':>8} {'p99':>8} {'limit':>6}   {'as it comes: mean':>18}")
    for row in results["trackers"]:
        figures = [f"{row['scalars'][key]:>8.1f}" for key in ("median_us", "mean_us", "p99_us")]
        limit = "" if row["limit_us"] is None else row["limit_us"]
        lines.append(f"{row['tracker']:<12} {' '.join(figures)} {limit:>6}   {row['as_it_comes']['mean_us']:>18.1f}")
    return lines


def main() -> None:
    """Measures, prints a table, and writes the figures where told."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--cpu-time", action="store_true", help="of this thread, where the machine does other things")
    parser.add_argument("--json", type=Path, help="where the figures go")
    asked = parser.parse_args()
    results = run(asked.steps, time.thread_time if asked.cpu_time else time.perf_counter)
    sys.stdout.write("\n".join(table(results)) + "\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
