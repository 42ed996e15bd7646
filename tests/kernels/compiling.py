"""Compiles the GPU kernels for GPUs that are not here, and says what became of them."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

WIDE_LOAD = r"\bld\.global[\w.:]*\.(v4\.[bf]32|v2\.[bf]64|b128)\b"
WIDE_STORE = WIDE_LOAD.replace("bld", "bst")


class Compiled(NamedTuple):
    registers: int
    stack_bytes: int
    local_bytes: int
    vector_loads: list[str]
    vector_stores: list[str]
    ptx: str

    def say(self, what: str) -> None:
        print(
            f"{what}: {self.registers} registers, {self.stack_bytes + self.local_bytes} bytes spilled, "
            f"16-byte loads {len(self.vector_loads)}, stores {len(self.vector_stores)}"
        )


def _tool(name: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        pytest.skip(f"this Triton comes without {name}")
    return str(path)


def assembly(function: Any, constants: dict[str, Any], options: dict[str, Any], architecture: int) -> dict[str, Any]:
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
def compiled(launcher: Any, architecture: int) -> Compiled:
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
