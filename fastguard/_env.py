"""The one file that reads the environment."""

from __future__ import annotations

import os

is_arm = False  # whether a process that is forked now is an experiment of `fastguard.experiments`


def backend() -> str:
    """FASTGUARD_BACKEND: the backend that "auto" means: auto (default), cpu, reference, …"""
    return os.environ.get("FASTGUARD_BACKEND", "") or "auto"


def isa() -> str | None:
    """FASTGUARD_ISA: the instruction set of the CPU kernels, for tests; unset means the best that runs."""
    return os.environ.get("FASTGUARD_ISA") or None


def exchange_api() -> bool:
    """FASTGUARD_DLPACK=0: read tensors through Python calls even where torch has the DLPack C exchange API."""
    return os.environ.get("FASTGUARD_DLPACK", "1") != "0"


def handles_sigterm() -> bool:
    """FASTGUARD_SIGTERM=0: leave SIGTERM alone, which else has guards with sinks write their last record."""
    return os.environ.get("FASTGUARD_SIGTERM", "1") != "0"


def keeps_memory() -> bool:
    """FASTGUARD_KEEP_MEMORY=1: call `fastguard.tools.keep_memory` when fastguard is imported."""
    return os.environ.get("FASTGUARD_KEEP_MEMORY", "0") not in ("", "0")


def triton_interpreter() -> bool:
    """TRITON_INTERPRET=1: Triton's own switch; its kernels then run, slowly, on CPU tensors. For tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def num_restarts() -> int:
    """TORCHELASTIC_RESTART_COUNT, which torchrun sets: how often it has started the processes anew."""
    given = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(given) if given.isdecimal() else 0


def rank() -> int:
    """RANK, which torchrun sets: the number of this process among those of one training; 0 if there is one only."""
    given = os.environ.get("RANK", "")
    return int(given) if given.isdecimal() else 0


def in_effect() -> dict[str, dict[str, str | None]]:
    """Each variable that is read, its value (None if it is not set), and what that means; for `fastguard info`."""
    chosen = backend()
    access = "where torch has it" if exchange_api() else "no"
    sigterm = "the last record is written" if handles_sigterm() else "left alone"
    meanings = {
        "FASTGUARD_BACKEND": f'what "auto" means: {"the first backend that runs" if chosen == "auto" else chosen}',
        "FASTGUARD_ISA": f"instruction set of the CPU kernels: {isa() or 'the best that runs'}",
        "TRITON_INTERPRET": "GPU kernels are " + ("interpreted, on the CPU" if triton_interpreter() else "compiled"),
        "FASTGUARD_DLPACK": f"tensors through the DLPack exchange API: {access}",
        "FASTGUARD_KEEP_MEMORY": f"glibc keeps freed memory: {'yes' if keeps_memory() else 'no'}",
        "FASTGUARD_SIGTERM": f"on SIGTERM, where nobody else handles it: {sigterm}",
    }
    return {name: {"value": os.environ.get(name), "meaning": meaning} for name, meaning in meanings.items()}
