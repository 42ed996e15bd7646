"""What it takes to read a log of a million steps: CPU time and peak memory, with orjson (if it is here) and without.

    python -m benchmarks.reliability.reader

The log is what a `JsonlSink` writes of a model of twelve tensors, a table of them at every 100th step. Each reading is
a process of its own; the figure is the median of three. The figures go to benchmarks/results/reliability-reader.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fastguard import __version__
from fastguard.records import StepStats, TensorRow, TensorStats
from fastguard.records.columns import ROW
from fastguard.sinks import JsonlSink

RESULTS = Path(__file__).parents[1] / "results" / "reliability-reader.json"
NAMES = tuple(f"layers.{i // 2}.{('weight', 'bias')[i % 2]}" for i in range(12))
_READ = """
import json, resource, sys, time
if sys.argv[2] == "json":
    sys.modules["orjson"] = None
from fastguard.records import TrainingHistory
started = time.process_time()
history = TrainingHistory.from_jsonl(sys.argv[1])
spent = time.process_time() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
print(json.dumps({"num_steps": history.num_steps, "cpu_s": round(spent, 2), "peak_rss_mb": round(peak, 1)}))
"""


def write(path: Path, num_steps: int) -> None:
    """Writes the log of a run that does well."""
    draw = random.Random(0)
    with JsonlSink(path) as sink:
        for step in range(num_steps):
            norm = draw.lognormvariate(0.0, 0.3)
            row = TensorRow(1000, norm * norm / len(NAMES), norm * draw.gauss(0.0, 1.0), norm / 3, norm * 1e-6, 7)
            loss = (0.3 + 2.0 * math.exp(-step / 20_000)) * draw.gauss(1.0, 0.05)
            tensors = TensorStats(ROW.pack(*row) * len(NAMES), NAMES)
            sink.write(StepStats(step, tensors, min(1.0, 1.0 / norm), False, loss, lr=3e-4 * (1 - step / num_steps)))


def read(path: Path, parser: str) -> dict[str, Any]:
    """Reads the log three times, in processes of their own, with "orjson" or "json": the median, and its range."""
    command = [sys.executable, "-c", _READ, path, parser]
    runs: list[dict[str, Any]] = [json.loads(subprocess.check_output(command, text=True)) for _ in range(3)]
    runs.sort(key=lambda run: run["cpu_s"])
    peak = max(run["peak_rss_mb"] for run in runs)
    return {**runs[1], "cpu_s_range": [runs[0]["cpu_s"], runs[2]["cpu_s"]], "peak_rss_mb": peak}


def main() -> int:
    """Writes the log, reads it, prints and saves the figures."""
    parser = argparse.ArgumentParser("python -m benchmarks.reliability.reader", description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=1_000_000, help="steps (default: 1000000)")
    parser.add_argument("--dry", action="store_true", help="save no figures")
    arguments = parser.parse_args()
    parsers = ["json", *(["orjson"] if importlib.util.find_spec("orjson") else [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        write(path, arguments.number)
        figures: dict[str, Any] = {
            "number": arguments.number,
            "log_mb": round(path.stat().st_size / 1e6, 1),
            **{name: read(path, name) for name in parsers},
            "load_average": [round(load, 1) for load in os.getloadavg()],
            "num_cpus": os.cpu_count(),
            "fastguard": __version__,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
        }
    print(json.dumps(figures, indent=2))
    if not arguments.dry:
        RESULTS.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
