"""The kernels of the magnitude histogram: integers only, so that every order of additions gives the same counts.

Bins of an element, for float32 and what is widened to it: floor(log2 |x|) + 149, then zero, Inf, NaN; for float64 the
same from 1074 on. Subnormals are scaled up first, which is exact.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of the arguments.
import triton
import triton.language as tl

from .stats import INF32, INF64, LOW_HALF, magnitude_bits, pointer


@triton.jit
def _bin(x):
    """Of float32 or float64 elements."""
    bits = magnitude_bits(x)
    if x.dtype == tl.float64:
        exponent = (bits >> 52).to(tl.int32)
        scaled = (magnitude_bits(x * 2.0**54) >> 52).to(tl.int32) - 54
        bins = tl.where(exponent == 0, scaled, exponent) + (1074 - 1023)
        bins = tl.where(bits == 0, 2098, bins)
        bins = tl.where(bits == INF64, 2099, bins)
        bins = tl.where(bits > INF64, 2100, bins)
    else:
        exponent = bits >> 23
        scaled = (magnitude_bits(x * 2.0**25) >> 23) - 25
        bins = tl.where(exponent == 0, scaled, exponent) + (149 - 127)
        bins = tl.where(bits == 0, 277, bins)
        bins = tl.where(bits == INF32, 278, bins)
        bins = tl.where(bits > INF32, 279, bins)
    return bins


@triton.jit(do_not_specialize=list(range(6)))
def magnitudes_kernel(
    chunks: tl.int64,
    addresses: tl.int64,
    numels: tl.int64,
    partials: tl.int64,
    first: tl.int64,
    end: tl.int64,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    BINS: tl.constexpr,
):
    """Chunks [first, end), shared out among the programs, into a row of `partials`, int32 [programs, BINS], for each.

    A row holds less than 2^31 elements as long as the launch has more than a program for 2^31 of them.
    """
    COMPUTE: tl.constexpr = tl.float64 if DTYPE.is_fp64() else tl.float32
    size: tl.constexpr = DTYPE.primitive_bitwidth // 8
    lanes = tl.arange(0, LANES)
    counts = tl.zeros([BINS], tl.int32)
    for chunk in range(first + tl.program_id(0), end, tl.num_programs(0)):
        packed = tl.load(pointer(chunks, tl.int64) + chunk)
        row = packed & LOW_HALF
        start = (packed >> 32) * CHUNK
        n = tl.minimum(tl.load(pointer(numels, tl.int64) + row) - start, CHUNK).to(tl.int32)
        p = pointer(tl.load(pointer(addresses, tl.int64) + row) + start * size, DTYPE)
        for j in range(0, n, LANES):
            x = tl.load(p + j + lanes, mask=j + lanes < n, other=0.0, eviction_policy="evict_first").to(COMPUTE)
            counts += tl.histogram(_bin(x), BINS, mask=j + lanes < n)
    tl.store(pointer(partials, tl.int32) + tl.program_id(0).to(tl.int64) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=list(range(3)))
def add_magnitudes_kernel(
    partials: tl.int64, num_programs: tl.int64, out: tl.int64, BINS: tl.constexpr, COLS: tl.constexpr
):
    """COLS bins a program, added up over the rows of `partials` into int64 [BINS]."""
    bins = tl.program_id(0) * COLS + tl.arange(0, COLS)
    counts = tl.zeros([COLS], tl.int64)
    for i in range(0, num_programs):
        counts += tl.load(pointer(partials, tl.int32) + i * BINS + bins).to(tl.int64)
    tl.store(pointer(out, tl.int64) + bins, counts)
