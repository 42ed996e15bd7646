"""The GPU kernels without a GPU: every kernel test once more, in a process in which Triton interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastguard import _env

LEAST = 500  # tests; an empty selection must not look like success


def test_every_kernel_test_through_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if _env.triton_interpreter():
        pytest.skip("this is that process")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton or gpu", Path(__file__).parent],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-3000:])
    found = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert found is not None and int(found[1]) >= LEAST
