"""What the statistics of one activation cost, against what people do instead and against a plain read of its bytes.

    python -m benchmarks.activations [--rounds N] [--json benchmarks/results/activations.json]

One tensor of 8192 x 3072 float32, 100 MB, as a GELU leaves it. Every rival's result is compared with float64 before it
is timed; rivals alternate in one process, and a ratio is the median of the rounds' ratios. On a machine that does other
things too, `chrt -f 1 python -m benchmarks.activations` keeps them off the cores meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastguard
from fastguard import _C, ActivationStats
from fastguard.commands.bench import call_ns, gc_off

from .machine import Machine, line
from .speed.timing import Spread

SHAPE = (8192, 3072)
THRESHOLD = 0.99
NEAR_ZERO = 1e-6
CALLS_A_TURN = 5
SLOW = ("separate", "toolkit")  # one call, in every third round


def separate_ops(x: torch.Tensor) -> ActivationStats:
    """Every figure its own torch operation, with its own `.item()`."""
    return ActivationStats(
        mean=x.mean().item(),
        std=x.std(correction=0).item(),
        min_val=x.min().item(),
        max_val=x.max().item(),
        num_zeros=int((x == 0).sum().item()),
        num_saturated=int((x.abs() > THRESHOLD).sum().item()),
        num_nans=int(x.isnan().sum().item()),
        num_infs=int(x.isinf().sum().item()),
        total_elements=x.numel(),
        abs_max=x.abs().max().item(),
        num_near_zero=int((x.abs() < NEAR_ZERO).sum().item()),
    )


def toolkit(array: Any) -> ActivationStats:
    """The toolkit's `ActivationStats`, with the fields that it has; the others are given as they are here, for free."""
    import numpy as np

    return ActivationStats(
        mean=float(np.mean(array)),
        std=float(np.std(array)),
        min_val=float(np.min(array)),
        max_val=float(np.max(array)),
        num_zeros=int(np.sum(array == 0)),
        num_saturated=int(np.sum(np.abs(array) > THRESHOLD)),
        num_nans=0,
        num_infs=0,
        total_elements=array.size,
    )


def truth(x: torch.Tensor) -> ActivationStats:
    return fastguard.activation_stats(x, near_zero=NEAR_ZERO, backend="reference")


def check(name: str, found: ActivationStats, right: ActivationStats) -> None:
    for field in ("min_val", "max_val", "num_zeros", "num_saturated"):
        # Others round the threshold to float32, and miss the elements that lie between.
        allowed = 8 if field == "num_saturated" and name in SLOW else 0
        if abs(getattr(found, field) - getattr(right, field)) > allowed:
            raise SystemExit(f"{name}: {field} is {getattr(found, field)}, in float64 {getattr(right, field)}")
    for field in ("mean", "std"):
        if abs(getattr(found, field) - getattr(right, field)) > 1e-4 * right.std:
            raise SystemExit(f"{name}: {field} is {getattr(found, field)}, in float64 {getattr(right, field)}")


def rivals() -> dict[str, Callable[[], Any]]:
    """What is timed, each proved right first."""
    torch.manual_seed(0)
    x = torch.nn.functional.gelu(torch.randn(SHAPE))
    x.view(-1)[500::997] = 0.0
    array, threads = x.numpy(), torch.get_num_threads()
    right = truth(x)
    check("ours", fastguard.activation_stats(x), right)
    run, limits = fastguard.kernels.run_activation, (-0.99, 0.99, 1e-6)
    table = memoryview(run(x, limits, x.dim() - 1, "auto")[1]).cast("d")
    if (sum(table[::4]), sum(table[1::4])) != (right.num_near_zero, right.num_saturated):
        raise SystemExit("by channel: the channels do not add up to the whole")
    check("separate", separate_ops(x), right)
    check("toolkit", toolkit(array), right)
    half = x.bfloat16()
    image = x.view(64, 64, SHAPE[0] // 64, SHAPE[1] // 64)
    return {
        "ours": lambda: fastguard.activation_stats(x),
        "channels": lambda: run(x, limits, x.dim() - 1, "auto"),
        "read": lambda: _C.read_stream([x], threads, False),
        "read-prefetch": lambda: _C.read_stream([x], threads, True),
        "channels [N, C, H, W]": lambda: run(image, limits, 1, "auto"),
        "ours, bfloat16": lambda: fastguard.activation_stats(half),
        "separate": lambda: separate_ops(x),
        "toolkit": lambda: toolkit(array),
    }


def small_calls() -> dict[str, float]:
    """Microseconds a call on tensors so small that nothing but the way there counts: the best of many."""
    x, hidden = torch.randn(16, 64), torch.randn(32, 128)
    run = fastguard.kernels.run_activation
    calls: dict[str, Callable[[], Any]] = {
        "run_activation, 1024 elements": lambda: run(x, (-0.99, 0.99, 1e-6), None, "auto"),
        "run_activation with channels, 32 x 128": lambda: run(hidden, (-0.99, 0.99, 1e-6), 1, "auto"),
        "activation_stats, 1024 elements": lambda: fastguard.activation_stats(x),
        "x.mean().item(), 1024 elements": lambda: x.mean().item(),
    }
    return {name: min(call_ns(call) for _ in range(2000)) / 1e3 for name, call in calls.items()}


def measure(num_rounds: int) -> dict[str, Any]:
    calls = rivals()
    rounds: dict[str, list[float | None]] = {name: [] for name in calls}
    with gc_off():
        for index in range(num_rounds):
            start = index % len(calls)
            for name in [*calls, *calls][start : start + len(calls)]:
                if name in SLOW:
                    rounds[name].append(None if index % 3 else call_ns(calls[name]) / 1e3)
                    continue
                calls[name]()
                times = [call_ns(calls[name]) for _ in range(CALLS_A_TURN)]
                rounds[name].append(statistics.median(times) / 1e3)
    return {"rounds_us": rounds, "small_us": small_calls()}


def ratio(rounds: dict[str, list[float | None]], ours: str, theirs: str) -> Spread:
    return Spread.of(a / b for a, b in zip(rounds[ours], rounds[theirs], strict=True) if a and b)


def measures(rounds: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    """What the figures are held to."""
    quicker = min(("read", "read-prefetch"), key=lambda name: statistics.median(us for us in rounds[name] if us))
    rows = [
        ("activation_stats / separate torch ops with .item()", "ours", "separate", 0.012, None),
        ("activation_stats / the toolkit's numpy version", "ours", "toolkit", 0.05, None),
        ("activation_stats / plain read stream", "ours", quicker, 1.6, 1.3),
        ("by channel, dim -1 / plain read stream", "channels", quicker, 2.0, None),
        ("by channel, [64, 64, 128, 48] dim 1 / plain read stream", "channels [N, C, H, W]", quicker, None, None),
        ("activation_stats, bfloat16 / plain read stream of twice the bytes", "ours, bfloat16", quicker, None, None),
    ]
    return [
        {"title": title, **ratio(rounds, ours, theirs)._asdict(), "at_most": limit, "aim": aim}
        for title, ours, theirs, limit, aim in rows
    ]


def tell(results: dict[str, Any]) -> None:
    print(line(results["machine"]) + ("; at real-time priority" if results["is_realtime"] else ""))
    for name, times in results["times_us"].items():
        print(f"{name:24s} {times['median'] / 1e3:9.3f} ms  ({times['min'] / 1e3:.3f} - {times['max'] / 1e3:.3f})")
    for name, us in results["small_us"].items():
        print(f"{name:40s} {us:6.2f} us")
    for row in results["measures"]:
        limit = "" if row["at_most"] is None else f"  at most {row['at_most']}"
        verdict = "" if row["at_most"] is None else ("  reached" if row["median"] <= row["at_most"] else "  MISSED")
        print(f"{row['title']:66s} {row['median']:.4f} ({row['min']:.4f} - {row['max']:.4f}){limit}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the results there")
    arguments = parser.parse_args()
    machine = Machine()
    found = measure(arguments.rounds)
    results = {
        "format": 1,
        "shape": SHAPE,
        "dtype": "float32",
        "machine": machine.to_dict(),
        "is_realtime": hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) == os.SCHED_FIFO,
        "measures": measures(found["rounds_us"]),
        "times_us": {name: Spread.of(us for us in times if us)._asdict() for name, times in found["rounds_us"].items()},
        **found,
    }
    tell(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
