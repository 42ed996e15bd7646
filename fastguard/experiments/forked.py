"""Forks the process in the middle of a training, so that the copy goes on with one thing changed.

The copy returns into the user's loop and can change nothing outside: files that are open for writing, pipes and sockets
lead to /dev/null, files that are open for reading are opened again, and Landlock refuses other changes. It ends itself
after so many steps, and dies with its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _env

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write, remove and make, as in landlock.h
_SINCE = {2: 1 << 13, 3: _TRUNCATE}  # version of Landlock: what it can refuse besides
_TCP = 0b11  # bind and connect
_LARGE, _MOST_COPIED, _MOST_ENTRIES = 64 << 20, 512 << 20, 20_000
_NEVER_COPIED = (".git", ".venv", "venv", "node_modules", "__pycache__", ".hg", ".tox", ".mypy_cache", ".ruff_cache")


def landlock_version() -> int:
    """The version of Landlock that the kernel offers; 0 for none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(_syscall(_CREATE_RULESET, None, 0, 1), 0)


def refuse_writes(allowed: Iterable[str | os.PathLike[str]] = (), *, network: bool = True) -> None:
    """From now on, this thread and what it starts can change files only below the folders `allowed`, which may be none.

    Files that are open already are not affected. Without `network` it cannot open a TCP connection either (Linux 6.7 or
    later). Raises OSError if the kernel has no Landlock, or refuses it.
    """
    version = landlock_version()
    if not version:
        raise OSError("this system has no Landlock (Linux 5.13 or later), which keeps experiments from writing files")
    changes = _CHANGES | sum(bit for since, bit in _SINCE.items() if version >= since)
    attributes = struct.pack("QQ", changes, _TCP) if version >= 4 and not network else struct.pack("Q", changes)
    rules = _checked(_syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    try:
        for path in filter(os.path.exists, allowed):
            access = changes if os.path.isdir(path) else changes & (_WRITE_FILE | _TRUNCATE)
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                _checked(_syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", access, beneath), 0))
            finally:
                os.close(beneath)
        _checked(ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(_syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *given))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result


def mirror(folder: Path, copy: Path) -> None:
    """Mirrors `folder`: files up to 64 MiB copied, 512 MiB and 20,000 entries in all; others, and `.git`, linked."""
    num_left, bytes_left = _MOST_ENTRIES, _MOST_COPIED
    waiting = [(folder, copy)]
    while waiting:
        source, target = waiting.pop(0)
        target.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            for entry in sorted(os.scandir(source), key=lambda one: one.name):
                num_left -= 1
                here, there = Path(entry.path), target / entry.name
                if here == copy or copy.is_relative_to(here):
                    continue
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder and num_left > 0 and entry.name not in _NEVER_COPIED:
                    waiting.append((here, there))
                    continue
                is_file = entry.is_file(follow_symlinks=False) and num_left > 0
                size = entry.stat(follow_symlinks=False).st_size if is_file else _LARGE + 1
                if size <= min(_LARGE, bytes_left) and os.access(here, os.R_OK):
                    bytes_left -= size
                    shutil.copy2(here, there)
                else:
                    there.symlink_to(here.resolve())


def why_not(tensors: Iterable[torch.Tensor]) -> str | None:
    """Why this process, with these parameters, must not be forked, as a clause; None if it may."""
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
    threads = [one for one in threads if type(one).__name__ != "TMonitor"]  # tqdm's, which is harmless
    return f"other threads run in it: {', '.join(one.name for one in threads[:3])}" if threads else None


def _shares_memory() -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any(line.split()[1].startswith("rw") and line.split()[1].endswith("s") for line in maps)


class Copies:
    """Copies of this process that go on at the same time, each with the name of its arm.

    `become` is called in each with that name; it returns what gives the result, as plain types, when the script ends.
    """

    def __init__(self, names: Sequence[str], become: Callable[[str], Callable[[], Any]]) -> None:
        self._names, self._become = names, become
        self.end: Callable[..., None] | None = None  # in a copy: hands over the result, and ends the copy
        self._started: list[tuple[str, int, int]] = []  # name, pipe and process of each

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
                    os._exit(70)  # it cannot go on
                return False
            os.close(write)
            self._started.append((name, read, process))
        return True

    def wait(self, seconds: float) -> dict[str, Any]:
        """What each copy handed over; of those that did not within the time, nothing. Ends all."""
        found: dict[str, Any] = {}
        texts = dict.fromkeys(self._names, b"")
        names = {read: name for name, read, _ in self._started}
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
            for _, read, process in self._started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):  # the script ignores SIGCHLD
                    os.waitpid(process, 0)
                os.close(read)


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
