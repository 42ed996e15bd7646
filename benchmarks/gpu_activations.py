"""The GPU kernels for activations against separate torch operations, on one NVIDIA GPU: python
benchmarks/gpu_activations.py [--out results.json]

As gpu.py, whose clocks and counters these are: correct first, then timed, rivals alternating within one loop. --dry-run
goes through everything once with tiny tensors; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu import allocations, alternate, copy_bandwidth, launches, machine, never_syncs

from fastguard.kernels import triton
from fastguard.kernels.triton.launch import Workspace

LIMITS = (-0.99, 0.99, 5e-324)


class Case(NamedTuple):
    """An activation: its shape, the same for a dry run, the dimension of its channels, and its memory format."""

    shape: tuple[int, ...]
    tiny: tuple[int, ...]
    dim: int
    memory_format: torch.memory_format = torch.contiguous_format


CASES = {
    "hidden 8192 x 3072": Case((8192, 3072), (40, 30), 1),
    "tokens 8 x 2048 x 4096": Case((8, 2048, 4096), (2, 10, 60), 2),
    "image 64 x 256 x 56 x 56": Case((64, 256, 56, 56), (2, 5, 7, 7), 1),
    "image, channels_last": Case((64, 256, 56, 56), (2, 5, 7, 7), 1, torch.channels_last),
}


def separately(x: torch.Tensor) -> list[torch.Tensor]:
    """The same figures by one operation each, left on the device."""
    magnitude = x.abs()
    finite = x.isfinite()
    return [
        x.mean(),
        x.std(correction=0),
        x.min(),
        x.max(),
        (x == 0).sum(),
        (magnitude < 1e-6).sum(),
        (magnitude > 0.99).sum(),
        x.isnan().sum(),
        (~finite).sum(),
    ]


def by_channel(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """The channels' figures by one operation each."""
    others = [i for i in range(x.dim()) if i != dim]
    magnitude = x.abs()
    return [
        (magnitude < 1e-6).sum(others),
        (magnitude > 0.99).sum(others),
        (~x.isfinite()).sum(others),
        magnitude.sum(others, dtype=torch.float32),
    ]


def check(x: torch.Tensor, dim: int, row: torch.Tensor, table: torch.Tensor) -> None:
    """Raises if the figures are not those of the reference."""
    true = torch.empty_like(row), torch.empty_like(table)
    triton.ReferenceBackend().activation_into(x, dim, LIMITS, *true)
    if not (torch.isclose(row, true[0], rtol=1e-5, atol=1e-5).all() and torch.allclose(table, true[1], rtol=1e-5)):
        raise AssertionError(f"{row.tolist()} is not {true[0].tolist()}, or the tables differ")


def measure_case(case: Case, dtype: torch.dtype, device: torch.device, is_dry_run: bool, rounds: int) -> dict[str, Any]:
    x = torch.relu(torch.randn(case.tiny if is_dry_run else case.shape, device=device)).to(dtype)
    x = x.contiguous(memory_format=case.memory_format)
    workspace, plain = Workspace(device), triton.ReferenceBackend()
    row = torch.zeros(10, dtype=torch.float64, device=device)
    table = torch.zeros(x.shape[case.dim], 4, dtype=torch.float64, device=device)

    def whole() -> None:
        workspace.measure_activation(x, None, LIMITS, row)

    def channels() -> None:
        workspace.measure_activation(x, case.dim, LIMITS, row, table)

    channels()
    check(x, case.dim, row, table)
    rivals: dict[str, Callable[[], object]] = {
        "one sum, a read": lambda: x.sum(),
        "activation row": whole,
        "row and channels": channels,
        "separate operations": lambda: separately(x),
        "separate operations with .item()": lambda: [t.item() for t in separately(x)],
        "separate operations, and by channel": lambda: [*separately(x), *by_channel(x, case.dim)],
        "the reference backend, and by channel": lambda: plain.activation_into(x, case.dim, LIMITS, row, table),
    }
    times = alternate(rivals, device, rounds)
    num_bytes = x.numel() * x.element_size()
    return {
        "num_bytes": num_bytes,
        "launches": {"row": launches(whole, device), "channels": launches(channels, device)},
        "allocations of 20 calls": allocations(channels, device),
        "never syncs": never_syncs(channels, device),
        "bytes a second": {
            name: num_bytes / (1e-6 * times[name]["device"]["median_us"])
            for name in ("one sum, a read", "activation row", "row and channels")
        },
        "times": times,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dry-run", action="store_true", help="once through everything, with tiny tensors")
    args = parser.parse_args()

    reason = triton.unavailable()
    if reason is None and not args.dry_run and not torch.cuda.is_available():
        reason = "these figures need a CUDA device"
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rounds = 1 if args.dry_run else args.rounds
    results: dict[str, Any] = {
        "is_dry_run": args.dry_run,
        "machine": machine(device),
        "copy_bandwidth": copy_bandwidth(device, rounds),
        "cases": {},
    }
    for name, case in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            if device.type == "cuda" and 20 * math.prod(case.shape) > torch.cuda.mem_get_info()[0]:
                print(f"{key}: left out, not enough memory", file=sys.stderr)
                continue
            print(key, file=sys.stderr)
            results["cases"][key] = measure_case(case, dtype, device, args.dry_run, rounds)
    text = json.dumps(results, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
