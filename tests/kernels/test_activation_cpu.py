"""What only the C++ backend promises for activations: the same bits always, any access to tensors, threads, the GIL."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading

import pytest
import torch

from fastguard import UnsupportedTensorError
from fastguard.kernels import cpu
from fastguard.kernels.registry import BACKENDS

from cases import DTYPES, LAYOUTS, NASTY, image, nasty

CPU = BACKENDS["cpu"]
pytestmark = pytest.mark.skipif(CPU.unavailable() is not None, reason=f"no C++ kernels: {CPU.unavailable()}")

LIMITS = (-0.99, 0.99, 1e-6)


def varied() -> list[torch.Tensor]:
    tensors = [torch.randn(n).to(dtype) for dtype in DTYPES for n in (0, 1, 100, 4097, 300_001)]
    tensors += [nasty(value, dtype, 9000).view(9, 1000) for dtype in DTYPES for value in NASTY.values()]
    tensors += [layout(image(dtype)) for dtype in DTYPES for layout in LAYOUTS.values()]
    tensors += [torch.randn(2_000_003) * 1e-3 + 1, torch.rand(700_001).bfloat16() + 20, torch.full((99_999,), 0.1)]
    tensors += [
        torch.randn(1300, 1030) + 7,
        torch.randn(20, 70_001),
        torch.randn(8, 40, 50, 60),
        torch.randn(300_000, 5),
    ]
    return tensors


def everything(tensors: list[torch.Tensor]) -> tuple[object, ...]:
    found: list[object] = [CPU.activation(x, None, LIMITS)[0] for x in tensors]
    for x in tensors:
        found += [CPU.activation(x, dim, LIMITS) for dim in range(min(2, max(1, x.dim())))]
        if x.dim() > 2:
            found.append(CPU.activation(x, x.dim() - 1, LIMITS))
    return (*found, tuple(CPU.magnitude_counts(tensors)))


def test_bit_identical_across_thread_counts_and_instruction_sets(isa, threads) -> None:
    tensors = varied()
    seen = set()
    for name in isa.isa_names():
        isa.select_isa(name)
        for n in (1, 2, 7) if name == isa.isa_names()[0] else (3,):
            threads(n)
            seen.add(everything(tensors))
    assert len(seen) == 1


def test_flushing_subnormals_changes_nothing(threads) -> None:
    threads(2)  # each has its own setting
    tensors = [
        torch.full((9000,), 1e-40),
        torch.rand(2_000_000).view(1000, 2000) * 1e-40,
        torch.rand(30, 300, dtype=torch.float64) * 1e-310,
        torch.full((9000,), 3e-7, dtype=torch.float16),
    ]
    before = everything(tensors)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        during = everything(tensors)
        still_flushing = float(torch.tensor([1e-40]) * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert during == before
    assert still_flushing  # the user's own setting is back after the pass


@pytest.mark.parametrize("dim", [None, 1])
def test_the_gil_is_released_for_a_large_tensor(threads, ticks_during, dim: int | None) -> None:
    threads(2)
    tensor = torch.zeros(8000, 3000)
    assert ticks_during(lambda: CPU.activation(tensor, dim, LIMITS)) > 0


def test_many_threads_at_once_get_the_same_result(threads) -> None:
    threads(2)
    tensors = [torch.randn(600, 1000), torch.randn(4, 20, 90, 90)]
    alone = everything(tensors)
    results: list[object] = []
    workers = [threading.Thread(target=lambda: results.append(everything(tensors))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [alone] * 4


@pytest.mark.slow
def test_after_a_fork_small_tensors_can_still_be_measured() -> None:
    """In a forked child an OpenMP pool of the parent is gone; small work must not touch it."""
    script = (
        "import math, os, sys, torch\n"
        "from fastguard.kernels.registry import BACKENDS\nk = BACKENDS['cpu']\n"
        "torch.set_num_threads(2)\n"
        "k.activation(torch.ones(4_000_000), None, (-1.0, 1.0, 0.0))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    row, table = k.activation(torch.ones(100, 20), 1, (-1.0, 1.0, 1e-9))\n"
        "    os._exit(0 if row[1] == 1.0 and len(table) == 640 else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_wrong_dimension_is_refused_before_anything_is_read() -> None:
    for dim in (-1, 2, 99):
        with pytest.raises(IndexError):
            cpu._C.channel_stats(torch.zeros(3, 4), dim, *LIMITS, 1)
    with pytest.raises(IndexError):
        cpu._C.channel_stats(torch.tensor(1.0), 1, *LIMITS, 1)


def test_what_only_looks_as_if_it_had_channels_is_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="must be dense to have channels"):
        CPU.activation(torch.eye(4).to_sparse(), 1, LIMITS)
    with pytest.raises(UnsupportedTensorError, match="must be real"):
        CPU.activation(torch.zeros(4, dtype=torch.complex64), None, LIMITS)[0]
    with pytest.raises(UnsupportedTensorError, match=r"got torch\.int64"):
        CPU.activation(torch.zeros(4, 4, dtype=torch.int64), 1, LIMITS)


def test_nothing_is_lost_between_the_blocks_that_are_read_twice() -> None:
    """One bad element in each block in turn: the block is redone, its neighbours are not."""
    for block in range(0, 20_000, 4096):
        for bad in (math.nan, math.inf, 3e38, 1e30):
            x = torch.randn(20_000)
            x[block + 17] = bad
            row = CPU.activation(x, None, LIMITS)[0]
            kept = x[x.isfinite()].double()
            assert row[0] - row[8] - row[9] == kept.numel()
            assert row[1] == pytest.approx(float(kept.mean()), rel=1e-6, abs=1e-7)
            assert row[2] == pytest.approx(float(((kept - kept.mean()) ** 2).sum()), rel=1e-6)
