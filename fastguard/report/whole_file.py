"""Writes a file so that it is either complete or absent, even if the process is killed or the power fails."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNFINISHED = ".unfinished"


def write_whole(path: Path, write: Callable[[Any], Any], check: Callable[[Path], Any] = bool) -> None:
    """Writes and checks a temporary file beside `path`, flushes it to disk, and renames it to `path`.

    Creates the folder if it is missing. The temporary file has a unique name, `.<name>.<random>.unfinished`, so
    several processes can write into one folder. It is removed if anything raises; a killed process leaves it behind.
    """
    folder = path.parent
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _sync(folder.parent)
    unfinished = folder / f".{path.name}.{uuid.uuid4().hex}{UNFINISHED}"
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
    """Flushes a folder's entries to disk, on systems that can open a folder."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
