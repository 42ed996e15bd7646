"""Keeps freed memory in the process, so that the next step does not fault it in again."""

from __future__ import annotations

import ctypes
import sys
import threading

from ..observers.resources import malloc_library, uses_glibc_malloc

# malloc.h of glibc, and its defaults.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_DEFAULT_MMAP_MAX = 65536
_LARGEST_MMAP_THRESHOLD = 32 << 20  # up to which glibc raises it by itself as blocks are freed

_lock = threading.Lock()
_active: KeptMemory | None = None


class KeptMemory:
    """The result of `keep_memory`; `restore` undoes it.

    Attributes:
        is_active: whether the process keeps freed memory.
        message: what was changed, or why nothing was.
    """

    def __init__(self, is_active: bool, message: str) -> None:
        self.is_active, self.message = is_active, message

    def __repr__(self) -> str:
        return f"<fastguard KeptMemory: {self.message}>"

    def restore(self) -> None:
        """Resets the limits and returns free memory to the system. A second call does nothing.

        glibc stops adapting its limits once they are set. They are therefore set to the values that it reaches by
        itself in programs that free large blocks: mmap from 32 MiB, trim from 64 MiB.
        """
        global _active
        with _lock:
            if not self.is_active:
                return
            libc = ctypes.CDLL(None)
            libc.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
            libc.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
            libc.malloc_trim(0)
            self.is_active, self.message = False, "restored: glibc returns large freed blocks to the system again"
            _active = None


def keep_memory() -> KeptMemory:
    """Makes glibc keep freed memory, for the whole process.

    By default glibc maps each block above 32 MiB separately and returns it to the system when it is freed. A training
    step that allocates such blocks, for instance with a vocabulary of 50,000 words, gets them from the kernel page by
    page, zeroed, at every step. After this call they come from the heap and stay there.

    Results do not change, but the resident set grows; the finding `page-faults` says when this is worth it. If
    `FASTGUARD_KEEP_MEMORY=1` is set, fastguard calls this function on import. Forked processes inherit the setting.
    Other allocators are left alone, and the result says so: jemalloc and tcmalloc keep memory themselves.

    Returns:
        A `KeptMemory`; the same one while it is active. Its `restore()` undoes the call.

    Cost: two calls of `mallopt`, once.

    >>> kept = fastguard.tools.keep_memory()
    >>> kept.restore()
    """
    global _active
    with _lock:
        if _active is not None:
            return _active
        if not uses_glibc_malloc():
            library = malloc_library() or sys.platform
            return KeptMemory(False, f"nothing was done: malloc is not glibc's here ({library})")
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)
        _active = KeptMemory(True, "glibc keeps freed memory (M_MMAP_MAX=0, M_TRIM_THRESHOLD=-1)")
        return _active
