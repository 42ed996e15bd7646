"""Describes the machine that something is measured on, and how busy it was meanwhile."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fastguard
from fastguard.kernels import backends

BUSY_RATIO = 0.05
_TELLING_S = 1.0  # below that, /proc/stat is too coarse: it counts hundredths of a second


def _read(path: str) -> str:
    """The text of a file; "" where there is none."""
    return Path(path).read_text(encoding="utf-8") if os.path.exists(path) else ""


def _cpu_model() -> str:
    found = re.search(r"model name\s*: (.*)", _read("/proc/cpuinfo"))
    return found[1] if found else platform.processor() or platform.machine()


def _busy_s() -> float | None:
    """CPU seconds spent by the whole machine since it started; None if it is not known."""
    numbers = list(map(int, _read("/proc/stat").partition("\n")[0].split()[1:9]))
    return (sum(numbers) - sum(numbers[3:5])) / os.sysconf("SC_CLK_TCK") if numbers else None


class Machine:
    """Describes the machine when measuring starts; `to_dict` at its end says how much others took in between."""

    def __init__(self) -> None:
        self._started = time.time()
        self._busy, self._own = _busy_s(), sum(os.times()[:4])

    def _others_ratio(self) -> float | None:
        """Share of the cores' time that other processes took; None if it is not known yet."""
        busy, elapsed = _busy_s(), time.time() - self._started
        if self._busy is None or busy is None or elapsed < _TELLING_S:
            return None
        others = (busy - self._busy) - (sum(os.times()[:4]) - self._own)
        return max(0.0, others / (elapsed * (os.cpu_count() or 1)))

    def to_dict(self) -> dict[str, Any]:
        others = self._others_ratio()
        kernels = backends()["cpu"]
        isa = importlib.import_module("fastguard._C").isa() if kernels.available else None
        return {
            "cpu": _cpu_model(),
            "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "num_threads": torch.get_num_threads(),
            "isa": isa,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "fastguard": fastguard.__version__,
            "date": time.strftime("%Y-%m-%d", time.gmtime(self._started)),
            "seconds": round(time.time() - self._started, 1),
            "others_ratio": None if others is None else round(others, 4),
            "is_busy": others is not None and others > BUSY_RATIO,
        }


def line(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    others = machine["others_ratio"]
    text = f"{machine['cpu']}, {machine['num_cores']} cores, {machine['num_threads']} threads; "
    text += f"{machine['isa'] or 'no extension'}; torch {machine['torch']}, fastguard {machine['fastguard']}"
    text += "" if others is None else f"; {others:.1%} of the cores taken by others"
    return text + (" — BUSY, figures are noisy" if machine["is_busy"] else "")
