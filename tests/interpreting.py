"""Triton's interpreter, made fit for holding kernels to the bit. Test code only: compiled kernels never see it."""

import numpy as np


def mend():
    """Before the first launch; needs TRITON_INTERPRET=1."""
    _mend_bfloat16()
    _patch_once_a_launch()


def _mend_bfloat16():
    """Conversions of bfloat16 as every GPU does them.

    The interpreter's own (3.6 to 3.9) widen subnormals wrongly, round halves up where they go to even, and carry a
    rounding wrongly into the exponent.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(x, source, target, rounding):
        if source == tl.bfloat16 and target == tl.float32:
            return x.view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16:
            bits = x.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            return np.where(nan, bits >> 16 | 0x40, rounded).astype(np.uint16)
        return original(x, source, target, rounding)

    interpreter._convert_float = convert


def _patch_once_a_launch():
    """Halves the time of a launch: the interpreter patches Triton's language anew at every call of a function."""
    from triton.runtime import interpreter

    original, done = interpreter._patch_lang, set()

    def patch(function):
        if id(function.__globals__) in done:
            return interpreter._LangPatchScope()
        is_launch = not done
        done.add(id(function.__globals__))
        scope = original(function)
        if is_launch:
            restore = scope.restore

            def end():
                done.clear()
                restore()

            scope.restore = end
        return scope

    interpreter._patch_lang = patch
