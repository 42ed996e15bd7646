"""Extra memory: how far the resident set grows while gradients are read, each figure in a process of its own.

`python -m benchmarks.speed.memory CASE KIND` prints one figure, in bytes.
"""

from __future__ import annotations

import ctypes
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastguard
from fastguard.commands.bench import NO_CLIPPING

from .cases import CASES, Case
from .clipping import Subject
from .frames import run_module
from .timing import Spread

_NUM_PASSES = 50
_KEPT_STEPS = 20


class Nothing(torch.optim.Optimizer):
    """An optimizer whose step does nothing, so that what is seen is the guard's."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Does nothing."""


def _status_bytes(key: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text(encoding="ascii").partition(f"{key}:")[2].split()[0])


def peak_growth_bytes(call: Callable[[], Any], num_calls: int = _NUM_PASSES) -> int:
    """By how much the peak of the resident set exceeds what was resident before `num_calls` calls. Linux only.

    Free memory is first given back, and the kernel's high-water mark reset.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status_bytes("VmRSS")
    for _ in range(num_calls):
        call()
    return max(0, _status_bytes("VmHWM") - before)


def _warm_up() -> None:
    """Threads, code and allocator as any training has them by its second step, or, of the rules, its fiftieth."""
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (1, 1 << 20)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    guarded = fastguard.wrap(Nothing(parameters), max_norm=NO_CLIPPING)
    for _ in range(2):
        torch.nn.utils.clip_grad_norm_(parameters, NO_CLIPPING)
        fastguard.clip_grad_norm_(parameters, NO_CLIPPING)
    for _ in range(_NUM_PASSES):
        guarded.step()


def clip_bytes(case: Case) -> int:
    """Extra memory of `fastguard.clip_grad_norm_`."""
    _warm_up()
    parameters = Subject(case).parameters
    return peak_growth_bytes(lambda: fastguard.clip_grad_norm_(parameters, NO_CLIPPING))


def guarding_bytes(case: Case) -> int:
    """Extra memory of guarding a model, from `wrap` on: hooks, names, passes, records, history."""
    _warm_up()
    parameters = Subject(case).parameters
    model = torch.nn.ModuleList([torch.nn.ParameterList(parameters)])
    optimizer = Nothing(parameters)

    def run() -> None:
        fastguard.wrap(optimizer, model, max_norm=NO_CLIPPING)
        for _ in range(_NUM_PASSES):
            optimizer.step()

    return peak_growth_bytes(run, num_calls=1)


def kept_bytes(case: Case) -> int:
    """What each further record in a MemorySink keeps, by Python's own account."""
    sink = fastguard.MemorySink()
    guarded = fastguard.wrap(Nothing(Subject(case).parameters), max_norm=NO_CLIPPING, sinks=[sink])
    guarded.step()
    guarded.step()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(_KEPT_STEPS):
            guarded.step()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) // _KEPT_STEPS


KINDS: dict[str, Callable[[Case], int]] = {
    "clip_bytes": clip_bytes,
    "guarding_bytes": guarding_bytes,
    "kept_bytes": kept_bytes,
}


def measure_memory(case: Case, num_processes: int = 1) -> dict[str, Any]:
    """Every figure of one case, in bytes, each from so many fresh processes."""
    found: dict[str, Any] = {"num_tensors": case.num_tensors}
    for kind in KINDS:
        values = [run_module("benchmarks.speed.memory", case.name, kind) for _ in range(num_processes)]
        found[kind] = Spread.of(values)._asdict()
    return found


if __name__ == "__main__":
    print(KINDS[sys.argv[2]](CASES[sys.argv[1]]))
