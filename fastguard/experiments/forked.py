"""Forks the process in the middle of a training, so that the copy goes on with one thing changed.

The copy returns into the user's loop, with the same weights, batches and random numbers, and can change nothing
outside: files that are open for writing, pipes and sockets lead to /dev/null, files that are open for reading are
opened again, and Landlock refuses other changes. It ends itself after so many steps, and dies with its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import multiprocessing
import os
import random
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import _env
from .isolation import die_with_parent, landlock_version, refuse_writes

_HARMLESS_THREADS = ("TMonitor",)  # of tqdm
CRASHED = 70  # exit code of a copy that cannot go on


def why_not(tensors: Iterable[torch.Tensor]) -> str | None:
    """Why this process must not be forked, as a clause; None if it may.

    Args:
        tensors: the parameters.
    """
    tensors = list(tensors)
    if not landlock_version():
        return "the system has no Landlock (Linux 5.13 or later)"
    if torch.cuda.is_initialized() or any(not one.is_cpu for one in tensors):
        return "the process uses a GPU"
    if dist.is_available() and dist.is_initialized():
        return "the process is one of several ranks"
    if multiprocessing.active_children():
        return "other processes, such as data loader workers, belong to it"
    if any(one.is_shared() for one in tensors) or _shares_memory():
        return "it shares memory with other processes"
    threads = [one for one in threading.enumerate() if one is not threading.current_thread()]
    threads = [one for one in threads if type(one).__name__ not in _HARMLESS_THREADS]
    return f"other threads run in it: {', '.join(one.name for one in threads[:3])}" if threads else None


def _shares_memory() -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any(line.split()[1].startswith("rw") and line.split()[1].endswith("s") for line in maps)


class Copies:
    """Copies of this process that go on at the same time, each with the name of its arm.

    Args:
        names: of the arms.
        become: called in each copy with the name of its arm; returns what gives the result, as plain types, when the
            script raises or ends. The copy then returns from `start`, and goes on.
    """

    def __init__(self, names: Sequence[str], become: Callable[[str], Callable[[], Any]]) -> None:
        self._names, self._become = names, become
        self.end: Callable[..., None] | None = None  # in a copy: hands over the result, and ends the copy
        self._pipes: dict[str, int] = {}
        self._processes: dict[str, int] = {}

    def start(self) -> bool:
        """Forks; returns whether this is the parent."""
        for name in self._names:
            read, write = os.pipe()
            state = random.getstate()  # which Python draws again in a copy
            _env.is_arm = True
            try:
                process = os.fork()
            finally:
                _env.is_arm = False
            if process == 0:
                try:
                    random.setstate(state)
                    _cut_off(write)
                    self.end = partial(_hand_over, write, self._become(name))
                    sys.excepthook = self.end
                    atexit.register(self.end)
                except BaseException:
                    os._exit(CRASHED)
                return False
            os.close(write)
            self._pipes[name], self._processes[name] = read, process
        return True

    def wait(self, seconds: float) -> dict[str, Any]:
        """What each copy handed over; of those that did not within the time, nothing. Ends all."""
        found: dict[str, Any] = {}
        texts = dict.fromkeys(self._names, b"")
        names = {read: name for name, read in self._pipes.items()}
        ends_at = time.monotonic() + seconds
        try:
            while names and (left := ends_at - time.monotonic()) > 0.0:
                for read in select.select(list(names), [], [], left)[0]:
                    piece = os.read(read, 1 << 16)
                    texts[names[read]] += piece
                    if not piece:
                        name = names.pop(read)
                        with contextlib.suppress(ValueError):
                            found[name] = json.loads(texts[name])
            return found
        finally:
            for name, process in self._processes.items():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):  # the script ignores SIGCHLD
                    os.waitpid(process, 0)
                os.close(self._pipes[name])


def _hand_over(write: int, result: Callable[[], Any], *error: Any) -> None:
    try:
        data = json.dumps(result()).encode()
        while data:
            data = data[os.write(write, data) :]
    finally:
        os._exit(0)


def _cut_off(kept: int) -> None:
    """Has this copy change nothing outside of itself, and end silently. `kept` is the descriptor of its own pipe."""
    die_with_parent()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_DFL)
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (kept, nowhere):
            with contextlib.suppress(OSError):  # the one that lists them
                _replace(int(name), nowhere)
    refuse_writes(["/dev/null"], network=False)
    torch.save = lambda *args, **kwargs: None  # which would be refused


def _replace(descriptor: int, nowhere: int) -> None:
    """A file that is open for reading is opened again, at the same place; the rest, but for devices, leads nowhere."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISCHR(mode) and not os.isatty(descriptor):
        return
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if stat.S_ISREG(mode) and flags & os.O_ACCMODE == os.O_RDONLY:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, descriptor, os.get_inheritable(descriptor))
        os.close(own)
    elif not stat.S_ISDIR(mode):
        os.dup2(nowhere, descriptor, os.get_inheritable(descriptor))
