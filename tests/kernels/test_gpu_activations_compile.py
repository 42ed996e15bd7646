"""What the compiler makes of the GPU kernels for activations, for sm_80 and sm_90, without a GPU: pytest -rP."""

from __future__ import annotations

import pytest
import torch

from compiling import compiled

CPU = torch.device("cpu")
ALWAYS = (torch.bfloat16, 90)  # stands for the others, each of which takes some seconds
MOST_REGISTERS = 168  # of which a multiprocessor holds three programs of 128 threads

pytestmark = pytest.mark.usefixtures("compiles")


@pytest.mark.parametrize(
    ("dtype", "architecture"),
    [
        pytest.param(
            dtype, architecture, marks=[] if (dtype, architecture) == (torch.bfloat16, 90) else pytest.mark.slow
        )
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for architecture in (80, 90)
    ],
    ids=str,
)
@pytest.mark.parametrize(("kernel", "side_by_side"), [("row", 1), ("runs", 16), ("columns", 1)])
def test_next_to_nothing_is_spilled(kernel: str, side_by_side: int, dtype: torch.dtype, architecture: int) -> None:
    from fastguard.kernels.triton import launch

    columns = 512 // dtype.itemsize if kernel == "columns" else launch.activation_tile(dtype) // side_by_side
    launcher = launch.activation_launcher(dtype, columns, kernel == "columns", kernel != "row", CPU)
    made = compiled(launcher, architecture)
    made.say(f"{kernel}, {side_by_side} side by side, {dtype} sm_{architecture}")
    assert made.stack_bytes + made.local_bytes <= 32  # outside of the loops
    assert made.registers <= MOST_REGISTERS


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_fold_spills_nothing_and_rounds_as_written(architecture: int) -> None:
    from fastguard.kernels.triton import launch

    made = compiled(launch.fold_launcher(100, CPU), architecture)
    made.say(f"fold sm_{architecture}")
    assert made.stack_bytes == made.local_bytes == 0
    assert made.registers <= 255
    assert "fma.rn.f64" not in made.ptx
