"""Activations whose channels lie side by side in memory, as in [batch, tokens, features]; see activations.py.

The tensor is a matrix of `width` columns, each of one channel; its last row may be incomplete. The width may be several
times the number of channels, so that a few channels fill a row of lanes and every row begins at a multiple of 16 bytes.
"""

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
    fast_pair,
    masked_load,
    mean_of,
    packed,
    promised,
    store_believed,
    store_entries,
    store_exact,
)
from .stats import double, pointer


@triton.jit
def _inside(r, last, begin, wide, width, numel, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Where rows from `r` on begin, and which elements of the block of columns they have."""
    rows = r + tl.arange(0, ROWS)
    at = rows * width + begin
    some = tl.minimum(tl.maximum(numel - at, 0), tl.where(rows < last, wide, 0)).to(tl.int32)
    return at, tl.arange(0, COLS)[None, :] < some[:, None]


@triton.jit(do_not_specialize=list(range(10)))
def columns_kernel(
    address: tl.int64,
    numel: tl.int64,
    width: tl.int64,
    rows_a_program: tl.int64,
    partials: tl.int64,
    num_programs: tl.int64,
    table: tl.int64,
    low_bits: tl.int64,
    high_bits: tl.int64,
    near_bits: tl.int64,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LOADS: tl.constexpr,
    EXACT_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """COLS columns of `rows_a_program` rows a program, ROWS in a load, LOADS (4 or 2) of them under way.

    ALIGNED: the tensor and every row begin at a multiple of 16 bytes. [programs down a column, width] entries are
    written.
    """
    COMPUTE: tl.constexpr = tl.float64 if DTYPE.is_fp64() else tl.float32
    width = promised(width, DTYPE, ALIGNED)
    blocks = (width + COLS - 1) // COLS
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    part = program // blocks
    first = part * rows_a_program
    complete = numel // width
    last = tl.minimum(first + rows_a_program, (numel + width - 1) // width)
    begin = block * COLS
    wide = tl.minimum(width - begin, COLS)
    columns = tl.arange(0, COLS)[None, :]
    num_entries = num_programs // blocks * width
    low = double(low_bits).to(COMPUTE)
    high = double(high_bits).to(COMPUTE)
    near = double(near_bits).to(COMPUTE)
    start = begin_of(address, DTYPE, ALIGNED)
    out = pointer(partials, tl.float64) + program

    # Of how many elements: complete rows, and what the last one has in these columns.
    rest = tl.maximum(tl.minimum(numel - complete * width - begin, wide), 0)
    n = (tl.minimum(last, complete) - first) * wide + tl.where(last > complete, rest, 0)
    at, inside = _inside(first, last, begin, wide, width, numel, ROWS, COLS)
    x = tl.load(start + (at[:, None] + columns), mask=inside, other=0.0).to(COMPUTE)
    shift = mean_of(tl.sum(x), tl.maximum(tl.sum(inside.to(tl.int32)), 1))  # the mean of the first elements

    total = tl.zeros([ROWS, COLS], COMPUTE)
    square = tl.zeros([ROWS, COLS], COMPUTE)
    least = tl.full([ROWS, COLS], float("inf"), COMPUTE)
    most = tl.full([ROWS, COLS], float("-inf"), COMPUTE)
    counts = tl.zeros([ROWS, COLS], tl.float32)
    size = tl.zeros([ROWS, COLS], COMPUTE)
    step = ROWS * width
    full = tl.maximum(tl.minimum(last, complete) - first, 0) // (LOADS * ROWS) * (LOADS * ROWS)
    full = first + tl.where(wide == COLS, full, 0)
    places = start + begin + (tl.arange(0, ROWS).to(tl.int64)[:, None] * width + columns)
    for r in range(first, full, LOADS * ROWS):
        p = places + promised(r * width, DTYPE, ALIGNED)
        # All loads are under way before the first is used.
        a = tl.load(p, eviction_policy="evict_first")
        b = tl.load(p + step, eviction_policy="evict_first")
        if LOADS == 4:
            c = tl.load(p + 2 * step, eviction_policy="evict_first")
            d = tl.load(p + 3 * step, eviction_policy="evict_first")
            total, square, least, most, counts, size = fast_loads(
                a, b, c, d, shift, low, high, near, total, square, least, most, counts, size
            )
        else:
            total, square, least, most, counts, size = fast_pair(
                a, b, shift, low, high, near, total, square, least, most, counts, size
            )
    for r in range(full, last, ROWS):
        at, inside = _inside(r, last, begin, wide, width, numel, ROWS, COLS)
        a = tl.load(start + (at[:, None] + columns), mask=inside, other=0.0)
        total, square, least, most, counts, size = masked_load(
            a, inside, shift, low, high, near, total, square, least, most, counts, size
        )

    entry = part * width + begin
    found = tl.sum(packed(counts), axis=0)
    sizes = tl.sum(size.to(tl.float64), axis=0)
    cols = tl.arange(0, COLS)
    store_entries(table, num_entries, entry + cols, cols < wide, sizes, found & TABLE_MASK)
    num = n.to(tl.float64)
    all_sizes = tl.sum(sizes)
    kinds = tl.sum(found)
    if not store_believed(out, num_programs, num, shift, total, square, least, most, all_sizes, kinds, DTYPE.is_fp64()):
        tl.debug_barrier()  # entries are written again, by other threads
        # This part once more, of any values: first its mean, then everything else around it.
        sum_64 = tl.zeros([EXACT_ROWS, COLS], tl.float64)
        count = tl.zeros([EXACT_ROWS, COLS], tl.int32)
        for r in range(first, last, EXACT_ROWS):
            places_64, some = _inside(r, last, begin, wide, width, numel, EXACT_ROWS, COLS)
            e = tl.load(start + (places_64[:, None] + columns), mask=some, other=0.0).to(COMPUTE)
            sum_64, count = exact_mean_step(e, some, sum_64, count)
        num_finite = tl.sum(count).to(tl.float64)
        mean = tl.sum(sum_64) / tl.maximum(num_finite, 1.0) * 2.0**20

        away = tl.zeros([EXACT_ROWS, COLS], tl.float64)
        square_64 = tl.zeros([EXACT_ROWS, COLS], tl.float64)
        lows = tl.full([EXACT_ROWS, COLS], float("inf"), COMPUTE)
        highs = tl.full([EXACT_ROWS, COLS], float("-inf"), COMPUTE)
        marks = tl.zeros([EXACT_ROWS, COLS], tl.int32)
        bad = tl.zeros([EXACT_ROWS, COLS], tl.int32)
        size_64 = tl.zeros([EXACT_ROWS, COLS], tl.float64)
        for r in range(first, last, EXACT_ROWS):
            places_64, some = _inside(r, last, begin, wide, width, numel, EXACT_ROWS, COLS)
            e = tl.load(start + (places_64[:, None] + columns), mask=some, other=0.0).to(COMPUTE)
            away, square_64, lows, highs, marks, bad, size_64 = exact_step(
                e, some, mean, low, high, near, away, square_64, lows, highs, marks, bad, size_64
            )
        exact = tl.sum(exact_packed(marks, bad), axis=0)
        store_entries(table, num_entries, entry + cols, cols < wide, tl.sum(size_64, axis=0), exact)
        zeros = marks & 1023
        store_exact(out, num_programs, num_finite, mean, away, square_64, lows, highs, zeros, bad, tl.sum(exact))
