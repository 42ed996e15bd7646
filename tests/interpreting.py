"""Triton's interpreter, made fit for holding kernels to the bit. Test code only: compiled kernels never see it."""

from __future__ import annotations

from typing import Any

import numpy as np


def mend() -> None:
    """Before the first launch; needs TRITON_INTERPRET=1."""
    _mend_bfloat16()
    _patch_once_a_launch()
    _run_assembly()


def _mend_bfloat16() -> None:
    """Conversions of bfloat16 as every GPU does them.

    The interpreter's own (3.6 to 3.9) widen subnormals wrongly, round halves up where they go to even, and carry a
    rounding wrongly into the exponent.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.bfloat16 and target == tl.float32:
            return x.view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16:
            bits = x.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            return np.where(nan, bits >> 16 | 0x40, rounded).astype(np.uint16)
        return original(x, source, target, rounding)

    interpreter._convert_float = convert


def _patch_once_a_launch() -> None:
    """Halves the time of a launch: the interpreter patches Triton's language anew at every call of a function."""
    from triton.runtime import interpreter

    original, done = interpreter._patch_lang, set()

    def patch(function: Any) -> Any:
        if id(function.__globals__) in done:
            return interpreter._LangPatchScope()
        is_launch = not done
        done.add(id(function.__globals__))
        scope = original(function)
        if is_launch:
            restore = scope.restore

            def end() -> None:
                done.clear()
                restore()

            scope.restore = end
        return scope

    interpreter._patch_lang = patch


def _run_assembly() -> None:
    """The few instructions of PTX that the kernels hold, run by their text; the interpreter refuses inline assembly."""
    from triton.runtime import interpreter

    def halves(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).astype(np.uint32).view(np.uint16).reshape(*x.shape, 2)

    def words(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x, np.uint16).view(np.uint32).reshape(x.shape[:-1])

    operations: dict[str, Any] = {
        "mov.b32": lambda a: a,
        "max.u16x2": lambda a, b: words(np.maximum(halves(a), halves(b))),
        "min.u16x2": lambda a, b: words(np.minimum(halves(a), halves(b))),
        "add.u16x2": lambda a, b: words(halves(a) + halves(b)),
    }

    def run(self: Any, assembly: str, constraints: str, values: list[Any], types: list[Any], *_: Any) -> Any:
        outputs = constraints.count("=")
        shape = values[0].data.shape
        registers = {f"${outputs + i}": value.data.view(np.uint32) for i, value in enumerate(values)}
        for line in assembly.strip().strip("{}").split(";"):
            name, _, rest = line.strip().partition(" ")
            if name and name != ".reg":
                target, *operands = (each.strip() for each in rest.split(","))
                given = [registers[o] if o in registers else np.full(shape, int(o, 16), np.uint32) for o in operands]
                registers[target] = operations[name](*given)
        results = [registers[f"${i}"].astype(np.uint32).view(np.int32) for i in range(outputs)]
        handles = [interpreter.TensorHandle(data, type.scalar) for data, type in zip(results, types)]
        return type("Results", (), {"get_result": lambda self, i: handles[i]})()

    interpreter.InterpreterBuilder.create_inline_asm = run
