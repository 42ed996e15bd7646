"""Kernels, compiled once a device and launched with as little Python as can be.

`kernel[grid](...)` binds and inspects every argument at every call, and then calls the compiled kernel. Here all
arguments are integers and need no inspection, so the compiled kernel is called directly.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

_log = logging.getLogger("fastguard")

CHUNK = 32768  # elements a program of the statistics; the finest part of a sum that another tensor cannot change
THREADS = 128
LANES = 4 * THREADS
FOLD_THREADS = 128
FOLD_BLOCK = 4096
ROW_BLOCK = 256
CHUNK_BYTES = 1 << 15  # of an activation that a program reads; more would leave too few programs to hide its waits
FOLD_TILE = 1024


class Launcher:
    """One kernel with its constants on one device: `launcher(grid, *arguments)`, all integers.

    The current device must be the one it is for. `fp_fusion` lets the compiler turn a product and a sum into one
    instruction with one rounding. It is always passed: Triton's default changes in 3.10. `launch` is what launches:
    the compiled kernel or `ordinary`, None before the first.
    """

    def __init__(self, function: Any, constants: Mapping[str, Any], *, num_warps: int, fp_fusion: bool) -> None:
        self.function = function
        self.constants = dict(constants)
        self.options = {"num_warps": num_warps, "enable_fp_fusion": fp_fusion}
        self.launch: Callable[..., Any] | None = None

    def __call__(self, grid: int, *arguments: int) -> None:
        if self.launch is None:
            self._first(grid, arguments)
        else:
            self.launch(grid, *arguments)

    def ordinary(self, grid: int, *arguments: int) -> None:
        self.function[(grid,)](*arguments, **self.constants, **self.options)

    def _first(self, grid: int, arguments: tuple[int, ...]) -> None:
        try:
            direct = self._direct(arguments)
            direct(grid, *arguments)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # another Triton inside; not a CUDA error
            _log.debug("%s: no direct launch (%s: %s)", self.function, type(error).__name__, error)
            self.ordinary(grid, *arguments)
            self.launch = self.ordinary
        else:
            self.launch = direct

    def _direct(self, arguments: tuple[int, ...]) -> Callable[..., Any]:
        compiled = self.function.warmup(*arguments, grid=(1,), **self.constants, **self.options)
        run, handle, packed = compiled.run, compiled.function, compiled.packed_metadata
        import triton

        driver = triton.runtime.driver.active
        index, stream = driver.get_current_device(), driver.get_current_stream
        constants = tuple(self.constants.values())

        def launch(grid: int, *arguments: int) -> None:
            run(grid, 1, 1, stream(index), handle, packed, None, None, None, *arguments, *constants)

        return launch


def _launcher(
    kernel: str, constants: dict[str, Any], device: torch.device, *, threads: int = THREADS, fp_fusion: bool = False
) -> Launcher:
    """The launcher of `kernel`, "module.function" in `lang`; Triton is imported here for the first time.

    Fusion is off where products must round as torch's do, and the decision must have the same bits everywhere. It is on
    where products only go into sums: a square and its addition are then one instruction, and round once.
    """
    module, _, function = kernel.partition(".")
    found = getattr(importlib.import_module(f"{__package__}.lang.{module}"), function)
    return Launcher(found, constants, num_warps=_warps(threads, device), fp_fusion=fp_fusion)


def _warps(threads: int, device: torch.device) -> int:
    """A warp has 32 threads, or 64 on some AMD GPUs."""
    size = 32
    if device.type == "cuda":
        size = getattr(torch.cuda.get_device_properties(device), "warp_size", size)
    return max(1, threads // size)


def _dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float64: tl.float64, torch.float16: tl.float16}.get(dtype, tl.bfloat16)


@functools.cache
def stats_launcher(dtype: torch.dtype, device: torch.device) -> Launcher:
    constants = {"DTYPE": _dtype(dtype), "CHUNK": CHUNK, "LANES": LANES}
    launcher = _launcher("stats.stats_kernel", constants, device, fp_fusion=True)
    if torch.version.hip is None and device.type != "xpu":
        launcher.options["maxnreg"] = 72 if dtype == torch.float64 else 64  # for 7 or 8 programs, without a spill
    return launcher


@functools.cache
def scale_launcher(dtype: torch.dtype, device: torch.device) -> Launcher:
    return _launcher("stats.scale_kernel", {"DTYPE": _dtype(dtype), "CHUNK": CHUNK, "LANES": LANES}, device)


@functools.cache
def finalise_launcher(device: torch.device) -> Launcher:
    constants = {"CHUNK": CHUNK, "BLOCK": FOLD_BLOCK, "ROW_BLOCK": ROW_BLOCK}
    return _launcher("finalise.finalise_kernel", constants, device, threads=FOLD_THREADS)


def activation_tile(dtype: torch.dtype) -> int:
    """Elements that a program of an activation reads at once: four a thread, two of float64; more would spill."""
    return (2 if dtype == torch.float64 else 4) * THREADS


@functools.cache
def activation_launcher(
    dtype: torch.dtype, columns: int, by_column: bool, table: bool, device: torch.device
) -> Launcher:
    """Reads tiles of `columns`, and as many rows as make a whole tile."""
    constants = {
        "DTYPE": _dtype(dtype),
        "ROWS": activation_tile(dtype) // columns,
        "COLS": columns,
        "BY_COLUMN": by_column,
        "TABLE": table,
    }
    return _launcher("activations.activation_kernel", constants, device, fp_fusion=True)


def fold_launcher(num_channels: int, device: torch.device) -> Launcher:
    """Tiles for few channels or for many."""
    columns = 32 if num_channels == 0 or num_channels > 8 else 4 if num_channels > 1 else 1
    return _fold_launcher(columns, device)


@functools.cache
def _fold_launcher(columns: int, device: torch.device) -> Launcher:
    constants = {"BLOCK": FOLD_TILE, "ROWS": FOLD_TILE // columns, "COLS": columns}
    return _launcher("activations.fold_kernel", constants, device, threads=2 * FOLD_THREADS)
