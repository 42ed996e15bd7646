"""What the compiler makes of the GPU kernels, for sm_80 and sm_90, without a GPU. A table of it: pytest -rP.

These are the promises that a careless change breaks silently: 16 bytes a load, four of them under way, nothing spilled,
and so few registers that a multiprocessor holds eight programs.
"""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cases import DTYPES

ARCHITECTURES = (80, 90)
# Programs of 128 threads that a multiprocessor's 65 536 registers hold: 64 registers for eight, 72 for seven.
MOST_REGISTERS = {"stats": 64, "scale": 64, "finalise": 96, "decide": 64}
MOST_REGISTERS_FLOAT64 = 72  # all of its lanes are twice as wide

pytestmark = pytest.mark.usefixtures("compiles")


class Compiled(NamedTuple):
    registers: int
    stack_bytes: int
    local_bytes: int
    vector_loads: list[str]
    vector_stores: list[str]
    ptx: str
    sass: str


def _tool(name: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        pytest.skip(f"this Triton comes without {name}")
    return str(path)


@functools.cache
def compiled(kernel: str, dtype: torch.dtype | None, architecture: int, tmp: Path) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fastguard.kernels.triton import launch

    here = torch.device("cpu")
    makers = {"stats": launch.stats_launcher, "scale": launch.scale_launcher}
    if dtype is not None:
        launcher = makers[kernel](dtype, here)
    else:
        launcher = launch.finalise_launcher(here) if kernel == "finalise" else launch.decide_launcher(here)
    function, constants = launcher.function, launcher.constants
    names = function.arg_names
    source = ASTSource(
        function,
        {name: "constexpr" if name in constants else "i64" for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {},
    )
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launcher.options)
    binary = tmp / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    usage = subprocess.run(
        [_tool("cuobjdump"), "--dump-resource-usage", str(binary)], capture_output=True, text=True, check=True
    ).stdout
    sass = subprocess.run([_tool("nvdisasm"), "-c", str(binary)], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    ptx = made.asm["ptx"]
    wide = r"\.global[\w.:]*\.(v4\.[bf]32|v2\.[bf]64|b128)\b"
    registers, stack, local = map(int, found.groups())
    return Compiled(
        registers, stack, local, re.findall(r"\bld" + wide, ptx), re.findall(r"\bst" + wide, ptx), ptx, sass
    )


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cubin")
    return lambda kernel, dtype, architecture: compiled(kernel, dtype, architecture, folder)


def _say(what: str, made: Compiled) -> None:
    print(
        f"{what}: {made.registers} registers, {made.stack_bytes + made.local_bytes} bytes spilled, "
        f"16-byte loads {len(made.vector_loads)}, stores {len(made.vector_stores)}"
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["stats", "scale"])
def test_full_chunks_take_16_bytes_a_load(build: Any, kernel: str, dtype: torch.dtype, architecture: int) -> None:
    made: Compiled = build(kernel, dtype, architecture)
    _say(f"{kernel} {dtype} sm_{architecture}", made)
    assert made.stack_bytes == made.local_bytes == 0
    assert made.registers <= (MOST_REGISTERS_FLOAT64 if dtype == torch.float64 else MOST_REGISTERS[kernel])
    # Four in a loop that has four under way; float64 statistics have the exact loop only, with two.
    assert len(made.vector_loads) >= (2 if (kernel, dtype) == ("stats", torch.float64) else 4)
    if kernel == "scale":
        assert len(made.vector_stores) == 4
    assert len(re.findall(r"LDG[\w.]*\.128", made.sass)) >= len(made.vector_loads)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["finalise", "decide"])
def test_the_decision_spills_nothing_and_rounds_as_the_cpu(build: Any, kernel: str, architecture: int) -> None:
    made: Compiled = build(kernel, None, architecture)
    _say(f"{kernel} sm_{architecture}", made)
    assert made.stack_bytes == made.local_bytes == 0
    assert made.registers <= MOST_REGISTERS[kernel]
    assert "sqrt.rn.f64" in made.ptx and "div.rn.f64" in made.ptx
    assert "fma.rn.f64" not in made.ptx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_fast_loop(build: Any, dtype: torch.dtype, architecture: int) -> None:
    """Several loads come before the arithmetic, and it uses no more instructions than a GPU has time for.

    At 4 TB/s and 132 multiprocessors of 128 lanes at 1.75 GHz, a 2-byte element may take 14 instructions.
    """
    body = _fast_loop(build("stats", dtype, architecture).sass)
    elements = 4 * 16 // dtype.itemsize
    names = [name.split(".")[0] for name in body]
    print(f"stats {dtype} sm_{architecture}: {len(body) / elements:.1f} instructions an element in the fast loop")
    assert len(body) / elements <= 11
    assert not {"STL", "LDL", "STS", "LDS", "SHFL", "BAR"} & set(names)
    loads = [i for i, name in enumerate(body) if name.startswith("LDG")]
    arithmetic = [i for i, name in enumerate(names) if name in ("FADD", "FFMA", "FMUL", "FMNMX")]
    under_way = [sum(load < i for load in loads) for i in arithmetic[: elements // 4]]
    print(f"    of its four loads, {min(under_way)} to {max(under_way)} are under way when the first is used")
    assert len(loads) == 4
    assert min(under_way) >= 2


def _fast_loop(sass: str) -> list[str]:
    """Instructions of the shortest loop that holds four 16-byte loads."""
    instructions: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*?);", line):
            instructions.append((found[1], found[2]))
    bodies = []
    for i, (name, rest) in enumerate(instructions):
        target = re.search(r"\((\.L_\w+)\)", rest)
        if name.startswith("BRA") and target and labels.get(target[1], i) < i:
            body = [name for name, _ in instructions[labels[target[1]] : i + 1]]
            if sum("LDG" in name and "128" in name for name in body) == 4:
                bodies.append(body)
    assert bodies, "no loop with four 16-byte loads"
    return min(bodies, key=len)


def test_this_test_can_fail(tmp_path: Path) -> None:
    """Without the promise of alignment the loads come out one element at a time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fastguard.kernels.triton import kernels, launch

    source = Path(kernels.__file__).read_text(encoding="utf-8")
    broken, count = re.subn(r"tl\.multiple_of\((.*), 16\)", r"\1", source)
    assert count == 1
    path = tmp_path / "broken_kernels.py"
    path.write_text(broken, encoding="utf-8")
    import importlib.util

    spec = importlib.util.spec_from_file_location("broken_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    launcher = launch.scale_launcher(torch.bfloat16, torch.device("cpu"))
    names = module.scale_kernel.arg_names
    ast = ASTSource(
        module.scale_kernel,
        {name: "constexpr" if name in launcher.constants else "i64" for name in names},
        {(names.index(name),): value for name, value in launcher.constants.items()},
        {},
    )
    made = triton.compile(ast, target=GPUTarget("cuda", 90, 32), options=launcher.options)
    assert not re.findall(r"\bld\.global[\w.:]*\.(v4\.[bf]32|v2\.[bf]64|b128)\b", made.asm["ptx"])
