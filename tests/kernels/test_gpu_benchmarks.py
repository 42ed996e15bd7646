"""The benchmarks of the GPU kernels go through without a GPU, where Triton interprets; nothing is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_call_for_a_gpu_goes_through(tmp_path: Path) -> None:
    """Every part in its order, with the benchmarks' dry runs in place of what needs the device."""
    pytest.importorskip("triton", reason="Triton is not installed")
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_all.sh"
    if not script.exists():
        pytest.skip("the benchmarks are not beside the tests")
    command = [str(script), str(tmp_path), "--dry-run"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    ended = dict(line.split() for line in (tmp_path / "status.txt").read_text().splitlines())
    assert all(ended[name] == "0" for name in ("info", "trial", "gpu", "activations"))
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["is_dry_run"] and len(results["passes"]) == 8
    assert all(verdict["value"] is not None for verdict in results["verdicts"].values())
    cases = json.loads((tmp_path / "gpu-activations.json").read_text())["cases"]
    assert len(cases) == 8 and all("row and channels" in case["times"] for case in cases.values())
