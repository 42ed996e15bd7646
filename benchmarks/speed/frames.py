"""Python frames of fastguard in a step: how many of its functions are entered. Counted, so the same on any machine.

`python -m benchmarks.speed.frames BACKEND [WARM_UP STEPS]` prints them as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fastguard

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(Path(fastguard.__file__).parent) + os.sep
LANGUAGE = os.path.join(PACKAGE, "kernels", "triton", "lang") + os.sep  # compiled on a GPU: no frames there


def count_frames(backend: str, num_warm_up: int = 1000, num_steps: int = 256) -> dict[str, Any]:
    """Frames of fastguard in a forward pass and `optimizer.step()`: guarded, fused AdamW, four tensors, no sink, the
    limit not reached.

    `clean` is the median of the steps after the warm-up. Most of them deliver, sample and diagnose nothing.
    `mean` counts them all.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    optimizer = fastguard.wrap(optimizer, model, max_norm=1e9, backend=backend)
    generator, counts = torch.Generator().manual_seed(0), []
    for index in range(num_warm_up + num_steps):
        # On a GPU the allocator puts gradients where they lay a step before; on the CPU keeping them comes to the same.
        optimizer.zero_grad(set_to_none=backend != "triton")
        x = torch.randn(3, 4, generator=generator)
        losses: list[torch.Tensor] = []
        num_frames = _frames_of(lambda: losses.append(model(x).square().mean()))  # noqa: B023
        losses[0].backward()
        num_frames += _frames_of(optimizer.step)
        if index >= num_warm_up:
            counts.append(num_frames)
    return {"clean": statistics.median_low(counts), "mean": statistics.mean(counts), "counts": counts}


def _frames_of(step: Any) -> int:
    num_frames = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_frames
        if event == "call":
            path = frame.f_code.co_filename
            num_frames += path.startswith(PACKAGE) and not path.startswith(LANGUAGE)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    return num_frames


def count_frames_interpreted(num_warm_up: int = 70, num_steps: int = 15) -> dict[str, Any]:
    """The same of the GPU path, in a process in which Triton interprets. Takes a third of a second a step."""
    return run_module("benchmarks.speed.frames", "triton", str(num_warm_up), str(num_steps), TRITON_INTERPRET="1")


def run_module(module: str, *arguments: str, **environment: str) -> Any:
    """What a module of ours prints as JSON, in a fresh process."""
    path = os.pathsep.join(filter(None, (str(Path(PACKAGE).parent), str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    with warnings.catch_warnings():  # NumPy computes, and warns of what the interpreter asks of it
        warnings.simplefilter("ignore")
        print(json.dumps(count_frames(sys.argv[1], *map(int, sys.argv[2:]))))
