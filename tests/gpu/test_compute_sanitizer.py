"""The kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race, no read of what nobody wrote."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastguard.kernels import triton

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch
from fastguard.kernels.slots import StepOptions, make_slots
from fastguard.kernels.triton import Workspace

device = torch.device("cuda", 0)
tensors = [torch.randn(n, device=device).to(d)[k:]
           for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
           for n, k in ((200_000, 0), (1003, 3), (1, 0))]
workspace = Workspace(device)
slots = make_slots(device, len(tensors))
plan = workspace.plan(tensors, writable=True)
workspace.measure(plan, slots[0], StepOptions(max_norm=0.5))
workspace.scale(plan, slots[0])
torch.cuda.synchronize()
print("done", float(slots[0].total))
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_the_kernels_are_clean(tool, tmp_path, device):
    if triton.unavailable() is not None:
        pytest.skip(f"the kernels cannot run here: {triton.unavailable()}")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    script = tmp_path / "launches.py"
    script.write_text(SCRIPT)
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99", "--kernel-regex", "kns=_kernel", sys.executable]
    done = subprocess.run(
        [*command, str(script)],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "done" in done.stdout and "0 errors" in done.stdout
