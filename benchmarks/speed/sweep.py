"""Cost against the number of elements, and against the number of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastguard.commands.bench.clipping import Case
from fastguard.commands.bench.harness import Settings, Spread

from .parts import rivals_in_turn

RIVALS = ("clip", "torch-clip", "read", "read-prefetch")
NUM_ELEMENTS = tuple(10**power for power in range(3, 9))
NUM_TENSORS = (1, 10, 100, 1_000, 10_000)
ELEMENTS_A_TENSOR = 1_000
_SETTINGS = Settings(budget_s=2.0, num_rounds=7)
_MEMORY_FACTOR = 3.5  # three sets of gradients, and what checking takes


def available_bytes() -> float:
    """Memory that can be had; infinite where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return float("inf")


def _points(cases: list[tuple[int, Case]], say: Callable[[str], None]) -> list[dict[str, Any]]:
    points = []
    for x, case in cases:
        if case.num_elements * 4 * _MEMORY_FACTOR > available_bytes():
            say(f"  {case.title}: left out, not enough memory")
            continue
        say(f"  {case.title}")
        rounds = rivals_in_turn(case, RIVALS)(_SETTINGS)["rounds_us"]
        points.append({"x": x, **{name: Spread.of(times).to_dict() for name, times in rounds.items()}})
    return points


def measure_sweep(
    say: Callable[[str], None] = print,
    num_elements: tuple[int, ...] = NUM_ELEMENTS,
    num_tensors: tuple[int, ...] = NUM_TENSORS,
) -> dict[str, Any]:
    """Times of clipping without reaching the limit, by elements (one tensor) and by tensors (of 1000 elements)."""
    by_elements = [(n, Case(f"1x{n}", f"one tensor of {n:,} float32", ((n,),))) for n in num_elements]
    by_tensors = [
        (n, Case(f"{n}x1000", f"{n:,} tensors × 1000 float32", ((ELEMENTS_A_TENSOR,),) * n)) for n in num_tensors
    ]
    return {"elements": _points(by_elements, say), "tensors": _points(by_tensors, say)}
