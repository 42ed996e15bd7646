"""The device path with the GPU kernels, without a GPU: these tests once more, where Triton interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastguard import _env

LEAST = 200  # tests; an empty selection must not look like success


def test_the_device_path_through_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if _env.triton_interpreter():
        pytest.skip("this is that process")
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton or launch or allocated", here],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-3000:])
    found = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert found is not None and int(found[1]) >= LEAST
