"""The GPU kernels without a GPU, in processes in which Triton interprets: the kernel tests again, the benchmark."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastguard import _env

LEAST = 500  # tests; an empty selection must not look like success
# On a GPU these take their share of every backend; interpreted, they would take minutes: test_gpu_activations.py has
# smaller tensors for each way through the kernels.
TOO_LONG = (
    "test_activation_stats.py",
    "test_activation_properties.py",
    "test_channel_stats.py",
    "test_magnitude_histogram.py",
)


def test_every_kernel_test_through_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if _env.triton_interpreter():
        pytest.skip("this is that process")
    folder = Path(__file__).parent
    ignored = [f"--ignore={folder / name}" for name in TOO_LONG]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton or gpu", *ignored, folder],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-3000:])
    found = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert found is not None and int(found[1]) >= LEAST


def test_the_benchmark_goes_through() -> None:
    """Nothing is measured: this is about names and arguments."""
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


@pytest.mark.parametrize("name", ["gpu.py", "gpu_activations.py"])
def test_the_benchmark_says_why_it_cannot_measure(name: str) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / name
    if not script.exists() or torch.cuda.is_available():
        pytest.skip("there is a GPU, or there are no benchmarks beside the tests")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("not measured: ")
