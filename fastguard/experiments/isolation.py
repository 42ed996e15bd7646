"""Keeps a process from changing files: a copy of its folder to work in, and Landlock around that copy.

Landlock (Linux 5.13 and later) makes the kernel refuse writes, for code in C or Rust and for subprocesses too. Reading
is not affected, nor are files that are open already. A process cannot lift it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

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

    Without `network` it cannot open a TCP connection either (Linux 6.7 or later).

    Raises:
        OSError: the kernel has no Landlock, or refuses it.
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
    """Makes `copy` a folder with the contents of `folder`: files up to 64 MiB copied, 512 MiB in all; others linked.

    Folders that hold no data of the script, such as `.git`, are linked as a whole, as is everything past 20,000
    entries.
    """
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
