"""What `fastguard watch` costs: from its start to the first numbers of a long log, and its share of a core.

    python -m benchmarks.watching            # on a machine with nothing else to do; needs Linux and rich

It runs in a pseudo-terminal of 100 columns and 40 rows. The log is what a `JsonlSink` writes of a model of twelve
tensors, a table of them at every 100th step; while the share is measured it grows by 100 lines a second. The limits are
0.3 s for 330 MB, and 2 % of a core at two pictures a second. Times are least, median and largest; the CPU time of a
start says what it takes where other work waits for the cores too. The figures go to benchmarks/results/watching.json.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import platform
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastguard import __version__

from .reliability.reader import write

RESULTS = Path(__file__).parent / "results" / "watching.json"
COLUMNS, ROWS = 100, 40
LINES_A_SECOND = 100
_NUM_STEPS = 2000  # that are made; the rest of the log repeats them under other numbers


class Watched:
    """`fastguard watch` in a terminal of its own."""

    def __init__(self, path: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.started = time.perf_counter()
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        command = [sys.executable, "-m", "fastguard", "watch", str(path)]
        self.process = subprocess.Popen(command, start_new_session=True, env=environment, **streams)
        os.close(theirs)
        self.text = b""

    def read(self, seconds: float) -> None:
        """Takes what it draws within so many seconds, or at once if there is something."""
        if select.select([self._ours], [], [], seconds)[0]:
            self.text += os.read(self._ours, 1 << 16)

    def wait_for(self, pattern: bytes, seconds: float = 300.0) -> float:
        """Seconds from the start until it has drawn that."""
        while not re.search(pattern, self.text):
            if time.perf_counter() - self.started > seconds:
                raise TimeoutError(f"{pattern!r} was not drawn; there was {self.text[-2000:]!r}")
            self.read(0.01)
        return time.perf_counter() - self.started

    def spent(self) -> float:
        """Seconds of CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        """The most memory so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024

    def leave(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        try:
            while True:
                self.read(10.0)
        except OSError:  # it has closed the terminal
            pass
        if self.process.wait(30):
            raise RuntimeError(f"it ended with {self.process.returncode}: {self.text[-2000:]!r}")
        os.close(self._ours)


def lines_of(path: Path) -> Iterator[bytes]:
    """Lines of a run that never ends; written now, as their `time` says."""
    made = [line for line in path.read_bytes().splitlines(keepends=True) if line.startswith(b'{"step":')]
    step = 0
    while True:
        for line in made:
            rest = re.sub(rb'"time":[0-9.]+', b'"time":%.6f' % time.time(), line.partition(b",")[2], count=1)
            yield b'{"step":%d,' % step + rest
            step += 1


def measure(folder: Path, num_bytes: int, repeats: int, seconds: float) -> dict[str, Any]:
    """The figures."""
    write(folder / "made.jsonl", _NUM_STEPS)
    lines = lines_of(folder / "made.jsonl")
    path = folder / "run.jsonl"
    with path.open("wb") as file:
        while file.tell() < num_bytes:
            file.writelines(next(lines) for _ in range(1000))
    starts, start_cpus, pictures = [], [], rb"grad norm +[0-9.]+"
    for _ in range(repeats):
        watched = Watched(path)
        starts.append(watched.wait_for(pictures))
        start_cpus.append(watched.spent())
        watched.leave()

    watched = Watched(path)
    whole_s = watched.wait_for(rb" at step [0-9,]+: ")
    num_drawn = watched.text.count(b"\x1b[H")
    with path.open("ab", buffering=0) as file:
        for phase_s in (3.0, seconds):  # the first settles
            began, spent, num_drawn = time.perf_counter(), watched.spent(), watched.text.count(b"\x1b[H")
            while (passed := time.perf_counter() - began) < phase_s:
                file.write(next(lines))
                watched.read(max(0.0, 1 / LINES_A_SECOND - (time.perf_counter() - began - passed)))
    passed, spent = time.perf_counter() - began, watched.spent() - spent
    num_drawn = watched.text.count(b"\x1b[H") - num_drawn
    peak_mb = watched.peak_mb()
    watched.leave()
    return {
        "log_mb": round(num_bytes / 1e6, 1),
        "start_s": [round(f(starts), 3) for f in (min, statistics.median, max)],
        "start_cpu_s": [round(f(start_cpus), 2) for f in (min, statistics.median, max)],
        "whole_log_s": round(whole_s, 1),
        "cpu_share": round(spent / passed, 4),
        "pictures_a_second": round(num_drawn / passed, 2),
        "peak_rss_mb": round(peak_mb, 1),
    }


def main() -> int:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser("python -m benchmarks.watching", description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=330.0, help="of the log (default: 330)")
    parser.add_argument("--repeats", type=int, default=7, help="starts (default: 7)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for the share of a core (default: 30)")
    parser.add_argument("--dry", action="store_true", help="save no figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), int(1e6 * arguments.megabytes), arguments.repeats, arguments.seconds)
    figures |= {
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "num_cpus": os.cpu_count(),
        "fastguard": __version__,
        "python": platform.python_version(),
        "rich": importlib.metadata.version("rich"),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    print(json.dumps(figures, indent=2))
    if not arguments.dry:
        RESULTS.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
