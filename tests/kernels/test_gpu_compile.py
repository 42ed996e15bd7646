"""What the compiler makes of the GPU kernels, for sm_80 and sm_90, without a GPU. A table of it: pytest -rP.

These are the promises that a careless change breaks silently: 16 bytes a load, four of them under way, nothing spilled,
and so few registers that a multiprocessor holds eight programs.
"""

import functools
import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from cases import DTYPES

ARCHITECTURES = (80, 90, 120)
# Programs of 128 threads that a multiprocessor's 65 536 registers hold: 64 registers for eight, 72 for seven.
MOST_REGISTERS = {"stats": 64, "scale": 64, "finalise": 168}

pytestmark = pytest.mark.usefixtures("compiles")


def build(kernel, dtype, architecture):
    from fastguard.kernels.triton import launch

    here = torch.device("cpu")
    if dtype is None:
        return compiled(launch.finalise_launcher(here), architecture)
    if kernel == "scale":
        return compiled(launch.scale_launcher(dtype, here), architecture)
    return compiled(launch.stats_launcher(dtype, here), architecture)


# These two stand for the others, each of which takes a second.
ALWAYS = [("stats", torch.bfloat16, 90), ("scale", torch.float32, 80)]
KERNELS = [
    pytest.param(*each, marks=[] if each in ALWAYS else pytest.mark.slow)
    for each in itertools.product(["stats", "scale"], DTYPES, ARCHITECTURES)
]


@pytest.mark.parametrize(("kernel", "dtype", "architecture"), KERNELS, ids=str)
def test_full_chunks_take_16_bytes_a_load(kernel, dtype, architecture):
    made = build(kernel, dtype, architecture)
    made.say(f"{kernel} {dtype} sm_{architecture}")
    # Before and after the loop, on GPUs that nobody has measured.
    most_bytes = 16 if (architecture, kernel, dtype.itemsize) == (120, "stats", 2) else 0
    assert made.stack_bytes + made.local_bytes <= most_bytes
    assert made.registers <= (72 if dtype == torch.float64 or architecture == 120 else MOST_REGISTERS[kernel])
    # Four in a loop that has four under way; float64 statistics have the exact loop only, with two.
    assert len(made.vector_loads) >= (2 if (kernel, dtype) == ("stats", torch.float64) else 4)
    if kernel == "scale":
        assert len(made.vector_stores) == 4


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_folds_and_decides_spills_nothing_and_rounds_as_the_cpu(architecture):
    from fastguard.kernels.triton import launch

    made = build("finalise", None, architecture)
    fold = compiled(launch.fold_launcher(32, torch.device("cpu")), architecture)
    for each, name in ((made, "finalise"), (fold, "fold")):
        each.say(f"{name} sm_{architecture}")
        assert each.stack_bytes == each.local_bytes == 0
        assert "fma.rn.f64" not in each.ptx
    assert made.registers <= MOST_REGISTERS["finalise"]
    assert "sqrt.rn.f64" in made.ptx and "div.rn.f64" in made.ptx


@pytest.mark.parametrize(
    ("dtype", "architecture"),
    [
        pytest.param(dtype, arch, marks=[] if (dtype, arch) == (torch.bfloat16, 90) else pytest.mark.slow)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for arch in (80, 90)
    ],
    ids=str,
)
@pytest.mark.parametrize(("kernel", "side_by_side"), [("row", 1), ("runs", 16), ("columns", 1)])
def test_activations_spill_next_to_nothing(kernel, side_by_side, dtype, architecture):
    from fastguard.kernels.triton import launch

    columns = 512 // dtype.itemsize if kernel == "columns" else launch.activation_tile(dtype) // side_by_side
    here = torch.device("cpu")
    launcher = launch.activation_launcher(dtype, columns, kernel == "columns", kernel != "row", here)
    made = compiled(launcher, architecture)
    made.say(f"{kernel}, {side_by_side} side by side, {dtype} sm_{architecture}")
    assert made.stack_bytes + made.local_bytes <= 32  # outside of the loops
    assert made.registers <= 128


WIDE_LOAD = r"\bld\.global[\w.:]*\.(v4\.[bf]32|v2\.[bf]64|b128)\b"
WIDE_STORE = WIDE_LOAD.replace("bld", "bst")


class Compiled(NamedTuple):
    registers: int
    stack_bytes: int
    local_bytes: int
    vector_loads: list[str]
    vector_stores: list[str]
    ptx: str

    def say(self, what):
        print(
            f"{what}: {self.registers} registers, {self.stack_bytes + self.local_bytes} bytes spilled, "
            f"16-byte loads {len(self.vector_loads)}, stores {len(self.vector_stores)}"
        )


def _tool(name):
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        pytest.skip(f"this Triton comes without {name}")
    return str(path)


def assembly(function, constants, options, architecture):
    """What Triton makes of a kernel whose arguments are all 64-bit integers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    source = ASTSource(
        function,
        {name: "constexpr" if name in constants else "i64" for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options).asm


@functools.cache
def compiled(launcher, architecture):
    """A launcher's kernel with its constants and options, for compute capability `architecture`."""
    made = assembly(launcher.function, launcher.constants, launcher.options, architecture)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(made["cubin"])
        usage = subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", str(binary)], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    ptx = made["ptx"]
    return Compiled(registers, stack, local, re.findall(WIDE_LOAD, ptx), re.findall(WIDE_STORE, ptx), ptx)
