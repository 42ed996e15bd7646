"""Activations whose channels are contiguous stretches of memory, as in [N, C, H, W], or none; see activations.py."""

# No `from __future__ import annotations` here: Triton reads the annotations of the arguments.
import triton
import triton.language as tl

from .activations import (
    TABLE_MASK,
    begin_of,
    exact_mean_step,
    exact_packed,
    exact_step,
    fast_loads,
    masked_load,
    mean_of,
    packed,
    promised,
    store_believed,
    store_entries,
    store_exact,
)
from .packed import four_loads
from .stats import double, pointer


@triton.jit
def _offsets(segments, inner, begin, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, COLS: tl.constexpr):
    """Where in the tensor this program's part of some segments begins, and the columns after it."""
    at = promised(segments * inner + begin, DTYPE, ALIGNED)
    return at[:, None] + tl.arange(0, COLS)[None, :]


@triton.jit
def _shift(start, first, last, inner, begin, n, COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Mean of the first elements."""
    segments = first + tl.arange(0, ROWS)
    inside = ((segments < last)[:, None]) & ((tl.arange(0, COLS) < n)[None, :])
    at = (segments * inner + begin)[:, None] + tl.arange(0, COLS)[None, :]
    x = tl.load(start + at, mask=inside, other=0.0).to(COMPUTE)
    return mean_of(tl.sum(x), tl.minimum(last - first, ROWS) * tl.minimum(n, COLS))


@triton.jit(do_not_specialize=list(range(11)))
def segments_kernel(
    address: tl.int64,
    num_segments: tl.int64,
    inner: tl.int64,
    segments_a_program: tl.int64,
    chunk: tl.int64,
    partials: tl.int64,
    num_programs: tl.int64,
    table: tl.int64,
    low_bits: tl.int64,
    high_bits: tl.int64,
    near_bits: tl.int64,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LANES: tl.constexpr,
    EXACT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Segments of `inner` elements, `segments_a_program` of them or, of one, `chunk` elements, a program.

    ROWS segments are read side by side, COLS elements of each at a time, into LANES accumulators, COLS or half as many.
    EXACT: columns of the exact loop. ALIGNED: the tensor begins at a multiple of 16 bytes and, with a TABLE, every
    segment is one long. TABLE: [number of segments, chunks of one] entries are written; else there is one segment.
    """
    COMPUTE: tl.constexpr = tl.float64 if DTYPE.is_fp64() else tl.float32
    parts = (inner + chunk - 1) // chunk
    program = tl.program_id(0).to(tl.int64)
    part = program % parts
    first = program // parts * segments_a_program
    last = tl.minimum(first + segments_a_program, num_segments)
    begin = promised(part * chunk, DTYPE, ALIGNED)
    n = promised(tl.minimum(inner - begin, chunk).to(tl.int32), DTYPE, ALIGNED and TABLE)
    num_entries = num_segments * parts
    low = double(low_bits).to(COMPUTE)
    high = double(high_bits).to(COMPUTE)
    near = double(near_bits).to(COMPUTE)
    start = begin_of(address, DTYPE, ALIGNED)
    out = pointer(partials, tl.float64) + program

    shift = _shift(start, first, last, inner, begin, n, COMPUTE, ROWS, COLS)
    cols = tl.arange(0, COLS)
    total = tl.zeros([ROWS, LANES], COMPUTE)
    square = tl.zeros([ROWS, LANES], COMPUTE)
    least = tl.full([ROWS, LANES], float("inf"), COMPUTE)
    most = tl.full([ROWS, LANES], float("-inf"), COMPUTE)
    sizes = tl.zeros([ROWS], tl.float64)
    kinds = tl.zeros([ROWS], tl.int64)
    for s in range(first, last, ROWS):
        segments = s + tl.arange(0, ROWS)
        places = start + _offsets(segments, inner, begin, DTYPE, ALIGNED, COLS)
        counts = tl.zeros([ROWS, LANES], tl.float32)
        size = tl.zeros([ROWS, LANES], COMPUTE)
        full = tl.where(s + ROWS <= last, n // (4 * COLS) * (4 * COLS), 0)
        for j in range(0, full, 4 * COLS):
            p = places + j
            a, b, c, d = four_loads(p, COLS)
            total, square, least, most, counts, size = fast_loads(
                a, b, c, d, shift, low, high, near, total, square, least, most, counts, size
            )
        for j in range(full, n, COLS):
            inside = ((segments < last)[:, None]) & ((j + cols < n)[None, :])
            a = tl.load(places + j, mask=inside, other=0.0)
            total, square, least, most, counts, size = masked_load(
                a, inside, shift, low, high, near, total, square, least, most, counts, size
            )
        found = tl.sum(packed(counts), axis=1)
        kinds += found
        if TABLE:
            here = tl.sum(size, axis=1).to(tl.float64)
            sizes += here
            store_entries(table, num_entries, segments * parts + part, segments < last, here, found & TABLE_MASK)

    num = ((last - first) * n).to(tl.float64)
    all_sizes = tl.sum(sizes)
    all_kinds = tl.sum(kinds)
    if not store_believed(
        out, num_programs, num, shift, total, square, least, most, all_sizes, all_kinds, DTYPE.is_fp64()
    ):
        tl.debug_barrier()  # entries are written again, by other threads
        # This part once more, of any values: first its mean, then everything else around it.
        lanes = tl.arange(0, EXACT)
        sum_64 = tl.zeros([ROWS, EXACT], tl.float64)
        count = tl.zeros([ROWS, EXACT], tl.int32)
        for s in range(first, last, ROWS):
            stretch = s + tl.arange(0, ROWS)
            begins = start + ((stretch * inner + begin)[:, None] + lanes[None, :])
            for j in range(0, n, EXACT):
                some = ((stretch < last)[:, None]) & ((j + lanes < n)[None, :])
                e = tl.load(begins + j, mask=some, other=0.0).to(COMPUTE)
                sum_64, count = exact_mean_step(e, some, sum_64, count)
        num_finite = tl.sum(count).to(tl.float64)
        mean = tl.sum(sum_64) / tl.maximum(num_finite, 1.0) * 2.0**20

        away = tl.zeros([ROWS, EXACT], tl.float64)
        square_64 = tl.zeros([ROWS, EXACT], tl.float64)
        lows = tl.full([ROWS, EXACT], float("inf"), COMPUTE)
        highs = tl.full([ROWS, EXACT], float("-inf"), COMPUTE)
        zeros = tl.zeros([ROWS, EXACT], tl.int32)
        bad = tl.zeros([ROWS, EXACT], tl.int32)
        exact_kinds = tl.zeros([ROWS], tl.int64)
        for s in range(first, last, ROWS):
            stretch = s + tl.arange(0, ROWS)
            begins = start + ((stretch * inner + begin)[:, None] + lanes[None, :])
            marks = tl.zeros([ROWS, EXACT], tl.int32)
            bad_here = tl.zeros([ROWS, EXACT], tl.int32)
            size_64 = tl.zeros([ROWS, EXACT], tl.float64)
            for j in range(0, n, EXACT):
                some = ((stretch < last)[:, None]) & ((j + lanes < n)[None, :])
                e = tl.load(begins + j, mask=some, other=0.0).to(COMPUTE)
                away, square_64, lows, highs, marks, bad_here, size_64 = exact_step(
                    e, some, mean, low, high, near, away, square_64, lows, highs, marks, bad_here, size_64
                )
            zeros += marks & 1023
            bad += bad_here
            exact = tl.sum(exact_packed(marks, bad_here), axis=1)
            exact_kinds += exact
            if TABLE:
                entries = stretch * parts + part
                store_entries(table, num_entries, entries, stretch < last, tl.sum(size_64, axis=1), exact)

        found_64 = tl.sum(exact_kinds)
        store_exact(out, num_programs, num_finite, mean, away, square_64, lows, highs, zeros, bad, found_64)
