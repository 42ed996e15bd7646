"""A process that keeps one core busy, as a data loader does."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SETTLE_S = 0.3
# It ends by itself where this process was killed.
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(100_000): pass\n"


@contextmanager
def one_busy_core() -> Iterator[subprocess.Popen[bytes]]:
    """Starts the process, and ends it."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN]) as process:
        try:
            time.sleep(_SETTLE_S)
            yield process
        finally:
            process.kill()
