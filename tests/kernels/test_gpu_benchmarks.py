"""The benchmarks of the GPU kernels go through without a GPU, where Triton interprets; nothing is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
def test_the_benchmark_goes_through() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    if not script.exists():
        pytest.skip("the benchmarks are not beside the tests")
    done = subprocess.run(
        [sys.executable, script, "--dry-run", "--cases", "gpt2-124m"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert results["is_dry_run"] and set(results["passes"]) == {"gpt2-124m float32", "gpt2-124m bfloat16"}
    measured = {name: verdict["value"] is not None for name, verdict in results["verdicts"].items()}
    assert sum(measured.values()) == 1  # the other limits are about cases that were left out


@pytest.mark.slow
def test_the_benchmark_of_activations_goes_through() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_activations.py"
    if not script.exists():
        pytest.skip("the benchmarks are not beside the tests")
    done = subprocess.run(
        [sys.executable, script, "--dry-run"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert results["is_dry_run"] and len(results["cases"]) == 8
    assert all("row and channels" in case["times"] for case in results["cases"].values())


@pytest.mark.parametrize("name", ["gpu.py", pytest.param("gpu_activations.py", marks=pytest.mark.slow)])
def test_the_benchmark_says_why_it_cannot_measure(name: str) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / name
    if not script.exists() or torch.cuda.is_available():
        pytest.skip("there is a GPU, or there are no benchmarks beside the tests")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("not measured: ")
