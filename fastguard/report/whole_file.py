"""A file that is there as a whole or not at all, whatever ends the process or the power."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNFINISHED = ".unfinished"


def write_whole(path: Path, write: Callable[[Any], Any], check: Callable[[Path], Any] = bool) -> None:
    """Has `write` fill a file beside `path` and `check` look at it, flushes it to the disk, and renames it to `path`.

    Makes a missing folder, and removes unfinished files of killed processes, and this one if anything raises.
    """
    folder = path.parent
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _sync(folder.parent)
    for left in folder.glob(f".*{UNFINISHED}"):
        left.unlink(missing_ok=True)
    unfinished = folder / f".{path.name}{UNFINISHED}"
    try:
        with open(unfinished, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        check(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(folder)


def _sync(folder: Path) -> None:
    """Has the names in a folder outlive a loss of power, where a folder can be opened."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
