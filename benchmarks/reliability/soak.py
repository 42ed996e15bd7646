"""A million guarded steps of a tiny model, with a log and checkups: memory and the time of a step must stay flat.

    python -m benchmarks.reliability.soak               # a minute or two; results/reliability-soak.json
    python -m benchmarks.reliability.soak --number 20000 --dry

Memory is what the process holds (RSS) at the end, over what it held after the first tenth. The time of a step is CPU
time of the process, as the least that a thousand steps in a row took in the last tenth, over the least in the first:
other processes on the machine lengthen most of them, and not the least.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastguard

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reliability-soak.json"
NUM_GRADIENTS = 97  # that come again and again, so that making them costs nothing
BLOCK = 1000
MAX_GROWTH_BYTES, MAX_SLOWDOWN = 2**20, 1.05


def rss_bytes() -> int:
    """Memory that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(number: int, path: Path) -> dict[str, Any]:
    """Figures of `number` steps, at least ten thousand, with the log at `path`."""
    torch.manual_seed(0)
    logging.getLogger("fastguard").setLevel(logging.CRITICAL)  # one in a few thousand steps is skipped
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-9)
    fastguard.wrap(optimizer, model, max_norm=8.0, sinks=[fastguard.JsonlSink(path)])
    guard = optimizer.guard  # type: ignore[attr-defined]
    pool = [[torch.randn_like(p) for p in parameters] for _ in range(NUM_GRADIENTS)]
    bad = [torch.full_like(p, math.nan) for p in parameters]
    num_blocks = number // BLOCK
    seconds, held = [], []
    gc.freeze()  # what torch has made by now need not be gone through each time
    for block in range(num_blocks):
        started = time.process_time()
        for i in range(BLOCK):
            gradients = bad if i == 500 and block % 5 == 0 else pool[(block + i) % NUM_GRADIENTS]
            for p, gradient in zip(parameters, gradients):
                p.grad = gradient
            optimizer.step()
            guard.observe(loss=1.0 + 1.0 / (1.0 + i))
        seconds.append((time.process_time() - started) / BLOCK)
        if block % max(1, num_blocks // 100) == 0 or block == num_blocks - 1:
            gc.collect()
            held.append(rss_bytes())
    guard.close()
    tenth, warm = num_blocks // 10, held[len(held) // 10]
    first, last = min(seconds[1:tenth]), min(seconds[-tenth:])
    size = path.stat().st_size
    with path.open("rb") as file:
        num_lines = sum(b'"step":' in line for line in file)
    figures = {
        "num_steps": num_blocks * BLOCK,
        "growth_bytes": held[-1] - warm,
        "most_over_warm_bytes": max(held[len(held) // 10 :]) - warm,
        "rss_mb": round(held[-1] / 1e6, 1),
        "slowdown_ratio": round(last / first, 4),
        "first_tenth_us": round(first * 1e6, 2),
        "last_tenth_us": round(last * 1e6, 2),
        "median_first_tenth_us": round(statistics.median(seconds[1:tenth]) * 1e6, 2),
        "median_last_tenth_us": round(statistics.median(seconds[-tenth:]) * 1e6, 2),
        "num_skipped": guard.history.num_skipped,
        "num_lines_missing": num_blocks * BLOCK - num_lines,
        "num_records_lost": sum(guard._ledger.lost().values()),
        "log_mb": round(size / 1e6, 1),
    }
    figures["is_flat"] = (
        figures["growth_bytes"] <= MAX_GROWTH_BYTES
        and figures["slowdown_ratio"] <= MAX_SLOWDOWN
        and not figures["num_lines_missing"]
        and not figures["num_records_lost"]
    )
    return figures


def main() -> int:
    """The command line: prints and saves the figures; 1 if memory or time was not flat, or a record is missing."""
    parser = argparse.ArgumentParser("python -m benchmarks.reliability.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=1_000_000, help="steps (default: 1000000)")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    arguments = parser.parse_args()
    if arguments.number < 20 * BLOCK:
        parser.error(f"`--number` must be at least {20 * BLOCK}, got {arguments.number}")
    torch.set_num_threads(1)
    load, started = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = run(arguments.number, Path(folder) / "run.jsonl")
    figures |= {
        "wall_s": round(time.monotonic() - started, 1),
        "fastguard": fastguard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "conditions": f"one thread; load of the machine {load:.1f} on {os.cpu_count()} cores",
    }
    print(json.dumps(figures, indent=2))
    if not arguments.dry:
        RESULTS.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(not figures["is_flat"])


if __name__ == "__main__":
    sys.exit(main())
