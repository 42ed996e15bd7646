"""A log that somebody else writes, line by line as far as its lines are whole."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ..._text import shown
from ...records.log import MAX_LINE_BYTES
from ..cli import say

CHUNK_BYTES = 1 << 20
_MARK_BYTES = 64


class LogTail:
    """Gives the whole lines of a growing file, by `readline` as an open file does; a `LineReader` reads it.

    A last line that has no end yet is kept back until it has one. A file that is moved away or deleted is read to its
    end, then the one that takes its place from its beginning, as is one that is emptied or written anew. It is told
    apart by device and inode, by its size, and by the last bytes that were read.

    Args:
        path: the file; it need not be there yet.
        on_restart: called before a file is read from its beginning that is not the first, or no longer what it was.

    Attributes:
        budget: lines that `readline` gives before it says b""; set it before each reading.
        offset, size: bytes that were read of the file as it is, and that it held when it was last looked at.
        num_restarts: how often a line was read from the beginning of a file after the first.
        problem: why it cannot be read now; "" if it can.

    Cost: a `look` 20 us; 0.3 us a line. Memory: 1 MiB, or the longest line.
    """

    def __init__(self, path: str | os.PathLike[str], on_restart: Callable[[], object] = lambda: None) -> None:
        self.path = Path(path)
        self._on_restart = on_restart
        self.budget = 0
        self.offset = self.size = self.num_restarts = 0
        self.problem = ""
        self._fd = -1
        self._is_watched = self._is_left = False
        self._was_open = False
        self._lines: deque[bytes] = deque()
        self._rest, self._mark = bytearray(), b""

    @property
    def is_behind(self) -> bool:
        """Whether there are bytes that were seen, and not read yet."""
        return bool(self._lines) or (self._fd >= 0 and self.offset < self.size)

    def look(self) -> None:
        """Sees what has become of the file: to be called before each reading."""
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        except OSError as error:  # a network that is down for a while: what was read stays
            self.problem = f"cannot be looked at: {error.strerror}"
            return
        self.problem = "" if there else f"is not there {'any more' if self._was_open else 'yet'}"
        if self._fd < 0:
            if there is not None:
                self._open(there)
            return
        try:
            here = os.fstat(self._fd)
            at = self.offset - len(self._rest) - len(self._mark)
            is_same = here.st_size >= self.offset and os.pread(self._fd, len(self._mark), at) == self._mark
        except OSError as error:
            self._give_up(error)
            return
        self.size = here.st_size
        self._is_left = self._is_watched and (there is None or not os.path.samestat(there, here))
        if not is_same:
            self._begin_anew()

    def _give_up(self, error: OSError) -> None:
        """What cannot be read is opened again at the next look."""
        self.problem = f"cannot be read: {error.strerror}"
        self.close()

    def _open(self, there: os.stat_result) -> None:
        if not stat.S_ISREG(there.st_mode):
            raise ValueError(
                f"`path` must be a file, or a folder with logs, got something else - at {shown(self.path)}"
            )
        try:
            self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            here = os.fstat(self._fd)
        except OSError as error:  # gone again, or not to be read by us
            self._give_up(error)
            return
        if self._was_open:
            self._begin_anew()
        self._was_open, self._is_left = True, False
        self._is_watched = os.path.samestat(there, here)  # some file systems give another number at each look
        self.size = here.st_size

    def _begin_anew(self) -> None:
        self.offset = 0
        self._lines.clear()
        self._rest, self._mark = bytearray(), b""
        self.num_restarts += 1
        self._on_restart()

    def readline(self, limit: int = -1, /) -> bytes:
        """The next whole line, with its end; b"" if there is none now, or the budget is spent."""
        if self.budget <= 0 or not (self._lines or self._fetch()):
            return b""
        self.budget -= 1
        return self._lines.popleft()

    def _fetch(self) -> bool:
        """Reads on until there is a whole line, or one that is too long; whether there is."""
        while self._fd >= 0:
            try:
                text = os.pread(self._fd, CHUNK_BYTES, self.offset)
            except OSError as error:
                self._give_up(error)
                break
            if text:
                self.offset += len(text)
                self._rest += text
                if b"\n" in text or len(self._rest) >= MAX_LINE_BYTES:
                    self._cut_lines()
                    return True
                continue
            self.size = self.offset
            if not self._is_left:
                break
            self.close()  # what has no end there never will have one
            self.look()
        return False

    def _cut_lines(self) -> None:
        lines = io.BytesIO(self._rest).readlines()
        is_cut = not lines[-1].endswith(b"\n") and len(lines[-1]) < MAX_LINE_BYTES
        self._rest = bytearray(lines.pop() if is_cut else b"")
        self._mark = lines[-1][-_MARK_BYTES:]
        self._lines.extend(lines)

    def close(self) -> None:
        """Lets go of the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


def newer_run(path: Path) -> str:
    """Says that there is a newer run in run-3.jsonl, say, beside `path`, which is run.jsonl or run-2.jsonl; else ""."""
    stem, number = re.fullmatch(r"(.*?)(?:-(\d+))?", path.stem, re.DOTALL).groups()  # type: ignore[union-attr]
    newest = path
    with contextlib.suppress(OSError):  # there is no further one
        for place in itertools.count(int(number or 1) + 1):
            newest = max(newest, path.with_name(f"{stem}-{place}{path.suffix}"), key=os.path.getmtime)
    return "" if newest is path else f"{shown(path)} holds an older run: the newest is in {shown(newest.name)}"


def log_at(path: Path, command: str = "") -> Path:
    """`path`; for a folder, the newest log in it or in one of its folders. `command` says if there is a newer run.

    Raises:
        FileNotFoundError: the folder has none.
    """
    if not path.is_dir():
        if command and (remark := newer_run(path)):
            say(command, remark)
        return path
    found = []
    for pattern in ("*.jsonl", "*/*.jsonl"):
        for log in path.glob(pattern):
            with contextlib.suppress(OSError):  # gone since
                found.append((log.stat().st_mtime_ns, log))
    if not found:
        raise FileNotFoundError(f"there is no *.jsonl in {shown(path)}, nor in a folder in it")
    return max(found)[1]
