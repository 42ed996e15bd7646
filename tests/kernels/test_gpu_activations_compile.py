"""What the compiler makes of the GPU kernels for activations, for sm_80 and sm_90, without a GPU. A table: pytest -rP.

As test_gpu_compile.py says: 16 bytes a load, several of them under way, nothing spilled, registers for enough programs.
"""

from __future__ import annotations

import re

import pytest
import torch

from compiling import Compiled, compiled, fast_loop

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
# Programs of 128 threads that 65 536 registers hold: six at 80 registers, five at 96.
MOST_REGISTERS = {"row": 80, "runs": 80, "columns": 96}

pytestmark = pytest.mark.usefixtures("compiles")


def build(kernel: str, dtype: torch.dtype, side_by_side: int, architecture: int, aligned: bool = True) -> Compiled:
    from fastguard.kernels.triton import launch

    here = torch.device("cpu")
    if kernel == "columns":
        return compiled(launch.columns_launcher(dtype, aligned, here), architecture)
    return compiled(launch.segments_launcher(dtype, side_by_side, aligned, kernel == "runs", here), architecture)


KERNELS = [
    *(("row", dtype, 1, architecture) for dtype in (F32, BF16) for architecture in (80, 90)),
    *(("columns", dtype, 4, architecture) for dtype in (F32, BF16) for architecture in (80, 90)),
    *(("runs", dtype, 1, 80) for dtype in (F32, BF16)),
    *(("runs", dtype, 16, 90) for dtype in (F32, BF16)),
    *((kernel, dtype, 1, 90) for kernel in ("row", "columns") for dtype in (F64, F16)),
]


# This one stands for the others, each of which takes some seconds.
ALWAYS = [("row", BF16, 1, 90)]
SHOWN = [pytest.param(*each, marks=[] if each in ALWAYS else pytest.mark.slow) for each in KERNELS]


@pytest.mark.parametrize(("kernel", "dtype", "side_by_side", "architecture"), SHOWN, ids=str)
def test_full_chunks_take_16_bytes_a_load(
    kernel: str, dtype: torch.dtype, side_by_side: int, architecture: int
) -> None:
    made = build(kernel, dtype, side_by_side, architecture)
    made.say(f"{kernel}, {side_by_side} side by side, {dtype} sm_{architecture}")
    assert made.stack_bytes == made.local_bytes == 0
    assert made.registers <= MOST_REGISTERS[kernel]
    under_way = 2 if kernel == "columns" and dtype.itemsize == 2 else 4
    assert len(made.vector_loads) >= under_way
    assert len(re.findall(r"LDG[\w.]*\.128", made.sass)) >= under_way
    body = fast_loop(made.sass, under_way)
    elements = under_way * 16 // dtype.itemsize
    print(f"    {len(body) / elements:.1f} instructions an element in the fast loop")
    # At 4 TB/s and 132 multiprocessors of 128 lanes at 1.75 GHz, a 4-byte element may take 29 instructions. A 2-byte
    # one may take 14, at the 3.35 TB/s of an H100 17: there, arithmetic and memory take about the same time.
    assert len(body) / elements <= {8: 36, 4: 18, 2: 19}[dtype.itemsize]
    assert not {"STL", "LDL", "STS", "LDS", "SHFL", "BAR"} & {name.split(".")[0] for name in body}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["row", "columns"])
def test_without_the_promise_of_alignment_elements_come_one_by_one(kernel: str) -> None:
    """Nothing is spilled there either; and it shows that the test above can fail."""
    made = build(kernel, BF16, 1, 90, aligned=False)
    made.say(f"{kernel}, not aligned, {BF16} sm_90")
    assert made.stack_bytes == made.local_bytes == 0
    assert not made.vector_loads


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_fold_spills_nothing_and_rounds_as_written(architecture: int) -> None:
    from fastguard.kernels.triton import launch

    made = compiled(launch.fold_launcher(100, torch.device("cpu")), architecture)
    made.say(f"fold sm_{architecture}")
    assert made.stack_bytes == made.local_bytes == 0
    assert made.registers <= 255
    assert "fma.rn.f64" not in made.ptx
