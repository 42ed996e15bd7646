"""What reading each rank's own gradients costs a step: `python -m benchmarks.own_gradients [NUM_RANKS]`.

DistributedDataParallel over gloo on this machine, a guarded step with `watch_ranks=True` beside one without, by turns
in the same processes; each holds forward, backward, average and step. Prints the median of their ratios, with the least
and the largest, and of rank 0 the medians of both.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastguard

ROUNDS, STEPS = 9, 10
CASES = {"MLP, 6 tensors, 0.1 M": (3, 180), "MLP, 60 tensors, 2 M": (30, 256), "MLP, 200 tensors, 0.4 M": (100, 64)}
BATCH = 64


def step_of(depth: int, width: int, *, watches: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fastguard.wrap(optimizer, model, max_norm=1.0, watch_ranks=watches, check_every=0)
    x = torch.randn(BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None]) -> float:
    """Milliseconds of one of some steps: all, as it gathers at one in ten."""
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    return 1e3 * (time.perf_counter() - started) / STEPS


def rank(number: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("fastguard").setLevel(logging.ERROR)  # what is trained here is no training
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=world)
    for case, (depth, width) in CASES.items():
        plain, watched = (step_of(depth, width, watches=watches) for watches in (False, True))
        for step in (plain, watched):
            timed(step)
        pairs = [(timed(plain), timed(watched)) for _ in range(ROUNDS)]
        if number == 0:
            ratios = sorted(after / before for before, after in pairs)
            before, after = (statistics.median(times) for times in zip(*pairs))
            spread = f"{ratios[0]:.3f} - {ratios[-1]:.3f}"
            print(f"{case}: {statistics.median(ratios):.3f} ({spread}), {before:.2f} ms, watched {after:.2f} ms")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(rank, (num_ranks, str(Path(place))), nprocs=num_ranks)
