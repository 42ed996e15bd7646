"""What the operating system charges for the steps: page faults, waiting for a core."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SETTLED_AFTER = 64  # steps: optimizer state, caches and the allocator's pools are in place
MIN_STEPS, MIN_SECONDS = 32, 2.0  # of a window, so that one slow step does not decide it


class ResourceUse:
    """Compares what the process had used at one look with the next. Cost: 0.1 ms each time the rules are checked."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._previous: dict[str, float] = {}

    def facts(self, step: int) -> dict[str, float]:
        """Use per step since the look before; empty until two windows of `MIN_STEPS` steps and `MIN_SECONDS` each.

        Each value is the smaller one of the newest two windows, so that a checkpoint or a validation pass is left out.
        `system_share` is of the process's CPU time, `core_wait_share` of the elapsed time, in which this thread could
        run but had no core (Linux), and `is_glibc` is 1.0 where glibc's allocator is at work.
        """
        if resource is None or step < SETTLED_AFTER:
            return {}
        last = self._last
        if last and (0 <= step - last["step"] < MIN_STEPS or time.perf_counter() < last["seconds"] + MIN_SECONDS):
            return {}
        now = self._last = _usage(step)
        if not last or step < last["step"] or now["thread"] != last["thread"]:
            self._previous = {}
            return {}
        used = {name: now[name] - last[name] for name in now}
        window = {
            "page_faults": used["page_faults"] / used["step"],
            "system_share": used["system_s"] / max(used["cpu_s"], 1e-9),
            "core_wait_share": used["core_wait_s"] / max(used["seconds"], 1e-9),
            "is_glibc": float(uses_glibc_malloc()),
        }
        previous, self._previous = self._previous, window
        return {name: min(value, previous[name]) for name, value in window.items()} if previous else {}


def _usage(step: int) -> dict[str, float]:
    """Totals of this process, and what the calling thread has waited."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step": step,
        "seconds": time.perf_counter(),
        "cpu_s": used.ru_utime + used.ru_stime,
        "system_s": used.ru_stime,
        "page_faults": used.ru_minflt,
        # since the thread began, the seconds that it was ready to run and had no core
        "core_wait_s": _core_wait_s(),
        "thread": threading.get_ident(),
    }


def _core_wait_s() -> float:
    """From /proc of Linux; 0 elsewhere."""
    try:
        return 1e-9 * float(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except OSError:
        return 0.0


@functools.cache
def malloc_library() -> str:
    """The file whose `malloc` this process calls, such as "libc.so.6" or "libjemalloc.so.2"; empty if not known."""
    if sys.platform in ("win32", "cygwin"):
        return ""
    try:
        process = ctypes.CDLL(None)
        dladdr: Callable[..., int] = process.dladdr
        info = (ctypes.c_char_p * 4)()  # `Dl_info` of dlfcn.h, whose first field is the file
        found = dladdr(ctypes.cast(process.malloc, ctypes.c_void_p), ctypes.byref(info))
    except (OSError, AttributeError):  # a static program, or one without dladdr
        return ""
    return Path(info[0].decode(errors="replace")).name if found and info[0] else ""


@functools.cache
def uses_glibc_malloc() -> bool:
    """Whether `malloc` is glibc's own: not jemalloc's, tcmalloc's, mimalloc's, a sanitizer's, musl's or macOS's."""
    if not sys.platform.startswith("linux") or not re.fullmatch(r"libc(\.so\.6|-2\.\d+\.so)", malloc_library()):
        return False
    return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
