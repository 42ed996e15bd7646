"""Kernels for activations: moments, extremes and counts of one tensor and, in the same launch, of each channel.

All arguments are 64-bit integers, as in stats.py: addresses, counts, the bits of float64 numbers. The tensor is a
matrix whose last row may be incomplete. A program reads a block of it twice, first for the mean, then for everything
else around the mean, in float64: a standard deviation that is small beside the mean loses nothing, and any value may
occur. It writes one column of `partials`, float64 [10, number of programs]. There are no atomics, so every sum has a
fixed order.

`table` takes two planes of partial results for each entry of a channel: the sum of magnitudes (float64), and counts
packed into one integer: near zero, saturated << 20, not finite << 40. An entry is a row of a block, or a column of it.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of the arguments.
import triton
import triton.language as tl

from .stats import INF32, INF64, double, is_finite, magnitude_bits, pointer

# Columns of the partials. COUNT: finite elements; LEAST, MOST: Inf, -Inf without any.
COUNT, MEAN, M2, LEAST, MOST, ZEROS, NEARS, OUTS, NANS, INFS = map(tl.constexpr, range(10))

FIELD = tl.constexpr(20)  # bits of a packed count; a program reads fewer elements than that holds
FIELD_MASK = tl.constexpr((1 << 20) - 1)


@triton.jit
def _load(
    address, first, r, last, begin, j, n, width, numel, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Rows from `first + r` on, columns from `begin + j` on: the elements, and which of them are inside the block."""
    rows = first + r + tl.arange(0, ROWS)
    cols = j + tl.arange(0, COLS)
    starts = rows * width + begin
    sizes = tl.where(rows < last, tl.minimum(tl.maximum(numel - starts, 0), n), 0).to(tl.int32)
    inside = cols[None, :] < sizes[:, None]
    x = tl.load((pointer(address, DTYPE) + starts)[:, None] + cols[None, :], mask=inside, other=0.0)
    return x.to(tl.float64 if DTYPE.is_fp64() else tl.float32), inside


@triton.jit
def _store_entries(table, num_entries, entries, inside, size, counts):
    """Both planes of some entries of `table`."""
    tl.store(pointer(table, tl.float64) + entries, size, mask=inside)
    tl.store(pointer(table, tl.int64) + num_entries + entries, counts, mask=inside)


@triton.jit
def _packed(counts, bad):
    """The counts of lanes as an entry has them."""
    near_and_out = ((counts >> 10) & 1023).to(tl.int64) | ((counts >> 20).to(tl.int64) << FIELD)
    return near_and_out | (((bad & 0xFFFF) + (bad >> 16)).to(tl.int64) << (2 * FIELD))


@triton.jit(do_not_specialize=list(range(11)))
def activation_kernel(
    address: tl.int64,
    numel: tl.int64,
    width: tl.int64,
    block_rows: tl.int64,
    block_columns: tl.int64,
    partials: tl.int64,
    num_programs: tl.int64,
    table: tl.int64,
    low_bits: tl.int64,
    high_bits: tl.int64,
    near_bits: tl.int64,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    TABLE: tl.constexpr,
):
    """A block of the matrix a program, read as tiles of ROWS x COLS. A TABLE gets an entry for each row of a block,
    [rows, blocks across], or BY_COLUMN, where a block is COLS wide, for each column, [blocks down, width]."""
    across = (width + block_columns - 1) // block_columns
    program = tl.program_id(0).to(tl.int64)
    block = program // across
    begin = program % across * block_columns
    n = tl.minimum(width - begin, block_columns).to(tl.int32)
    num_rows = (numel + width - 1) // width
    first = block * block_rows
    last = tl.minimum(first + block_rows, num_rows)
    height = (last - first).to(tl.int32)

    total = tl.zeros([ROWS, COLS], tl.float64)
    num = tl.zeros([ROWS, COLS], tl.int32)
    for r in range(0, height, ROWS):
        for j in range(0, n, COLS):
            x, inside = _load(address, first, r, last, begin, j, n, width, numel, DTYPE, ROWS, COLS)
            finite = is_finite(x)
            total += tl.where(finite, x, 0.0).to(tl.float64) * 2.0**-20  # so that the sum cannot overflow
            num += (finite & inside).to(tl.int32)
    count = tl.sum(num).to(tl.float64)
    centre = tl.sum(total) / tl.maximum(count, 1.0) * 2.0**20

    inf: tl.constexpr = INF64 if DTYPE.is_fp64() else INF32
    COMPUTE: tl.constexpr = tl.float64 if DTYPE.is_fp64() else tl.float32
    low, high, near = double(low_bits).to(COMPUTE), double(high_bits).to(COMPUTE), double(near_bits).to(COMPUTE)
    nothing = tl.zeros([ROWS, COLS], tl.float64)
    total, square = nothing, nothing
    least = tl.full([ROWS, COLS], float("inf"), COMPUTE)
    most = tl.full([ROWS, COLS], float("-inf"), COMPUTE)
    size = nothing
    # Fields of ten bits: zero, near zero, saturated; of sixteen bits: NaN, Inf.
    none = tl.zeros([ROWS, COLS], tl.int32)
    counts, bad, zeros, all_bad = none, none, none, none
    kinds = tl.zeros([COLS if BY_COLUMN else ROWS], tl.int64)
    for r in range(0, height, ROWS):
        if not BY_COLUMN:
            counts, bad, size = none, none, nothing
        for j in range(0, n, COLS):
            x, inside = _load(address, first, r, last, begin, j, n, width, numel, DTYPE, ROWS, COLS)
            bits = magnitude_bits(x)
            finite = (bits < inf) & inside
            is_inf = bits == inf
            away = tl.where(finite, x.to(tl.float64) - centre, 0.0)
            total += away
            square += away * away
            least = tl.minimum(least, tl.where(finite, x, float("inf")))
            most = tl.maximum(most, tl.where(finite, x, float("-inf")))
            magnitude = tl.abs(x)
            out = (finite & ((x < low) | (x > high))) | is_inf
            counts += tl.where(finite & (bits == 0), 1, 0) + tl.where(finite & (magnitude < near), 1 << 10, 0)
            counts += tl.where(out, 1 << 20, 0)
            bad += tl.where(bits > inf, 1, tl.where(is_inf, 1 << 16, 0))
            size += tl.where(finite, magnitude, 0.0).to(tl.float64)
        if not BY_COLUMN:
            zeros += counts & 1023
            all_bad += bad
            found = tl.sum(_packed(counts, bad), axis=1)
            kinds += found
            if TABLE:
                rows = first + r + tl.arange(0, ROWS)
                entries = rows * across + program % across
                _store_entries(table, num_rows * across, entries, rows < last, tl.sum(size, axis=1), found)
    if BY_COLUMN:
        zeros = counts & 1023
        all_bad = bad
        kinds = tl.sum(_packed(counts, bad), axis=0)
        cols = tl.arange(0, COLS)
        entries = block * width + begin + cols
        _store_entries(table, num_programs // across * width, entries, cols < n, tl.sum(size, axis=0), kinds)

    lowest = tl.min(least).to(tl.float64)
    highest = tl.max(most).to(tl.float64)
    all_kinds = tl.sum(kinds)
    correction = tl.sum(total) / tl.maximum(count, 1.0)  # what the rounding of the mean left over
    cancelled = tl.sum(total) * correction
    mean = centre + tl.where(is_finite(correction), correction, 0.0)
    m2 = tl.maximum(tl.sum(square) - tl.where(is_finite(cancelled), cancelled, 0.0), 0.0)
    to = pointer(partials, tl.float64) + program
    tl.store(to + COUNT * num_programs, count)
    tl.store(to + MEAN * num_programs, tl.where(lowest == highest, lowest, mean))
    tl.store(to + M2 * num_programs, tl.where(lowest == highest, 0.0, m2))
    tl.store(to + LEAST * num_programs, lowest)
    tl.store(to + MOST * num_programs, highest)
    tl.store(to + ZEROS * num_programs, tl.sum(zeros).to(tl.float64))
    tl.store(to + NEARS * num_programs, (all_kinds & FIELD_MASK).to(tl.float64))
    tl.store(to + OUTS * num_programs, ((all_kinds >> FIELD) & FIELD_MASK).to(tl.float64))
    tl.store(to + NANS * num_programs, tl.sum(all_bad & 0xFFFF).to(tl.float64))
    tl.store(to + INFS * num_programs, tl.sum(all_bad >> 16).to(tl.float64))


@triton.jit
def _column(partials, column, num_programs, i):
    return tl.load(partials + column * num_programs + i, mask=i < num_programs, other=0.0)


@triton.jit
def _row(partials, num_programs, numel, out, BLOCK: tl.constexpr):
    """Three passes over the partials: counts and extremes; the mean; the deviations from it, as Chan, Golub and LeVeque
    (1979) merge them. Mean, m2, min and max of nothing finite are 0, 0, Inf and -Inf."""
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], float("inf"), tl.float64)
    most = tl.full([BLOCK], float("-inf"), tl.float64)
    middle = tl.full([BLOCK], float("-inf"), tl.float64)
    zeros, nears, outs, nans, infs = count, count, count, count, count
    for j in range(0, num_programs, BLOCK):
        i = j + lanes
        n = _column(partials, COUNT, num_programs, i)
        count += n
        least = tl.minimum(least, tl.where(n > 0.0, _column(partials, LEAST, num_programs, i), float("inf")))
        most = tl.maximum(most, tl.where(n > 0.0, _column(partials, MOST, num_programs, i), float("-inf")))
        middle = tl.maximum(middle, tl.where(n > 0.0, _column(partials, MEAN, num_programs, i), float("-inf")))
        zeros += _column(partials, ZEROS, num_programs, i)
        nears += _column(partials, NEARS, num_programs, i)
        outs += _column(partials, OUTS, num_programs, i)
        nans += _column(partials, NANS, num_programs, i)
        infs += _column(partials, INFS, num_programs, i)
    num = tl.sum(count)
    # Around one of the means: of equal ones the mean is exactly theirs.
    centre = tl.where(num > 0.0, tl.max(middle), 0.0)
    share = 1.0 / tl.maximum(num, 1.0)
    offset = tl.zeros([BLOCK], tl.float64)
    for j in range(0, num_programs, BLOCK):
        i = j + lanes
        n = _column(partials, COUNT, num_programs, i)
        offset += tl.where(n > 0.0, n * share * (_column(partials, MEAN, num_programs, i) - centre), 0.0)
    mean = centre + tl.sum(offset)
    square = tl.zeros([BLOCK], tl.float64)
    for j in range(0, num_programs, BLOCK):
        i = j + lanes
        n = _column(partials, COUNT, num_programs, i)
        d = tl.where(n > 0.0, _column(partials, MEAN, num_programs, i) - mean, 0.0)
        square += _column(partials, M2, num_programs, i) + n * (d * d)
    tl.store(out, numel)
    tl.store(out + 1, mean)
    tl.store(out + 2, tl.sum(square))
    tl.store(out + 3, tl.min(least))
    tl.store(out + 4, tl.max(most))
    tl.store(out + 5, tl.sum(zeros))
    tl.store(out + 6, tl.sum(nears))
    tl.store(out + 7, tl.sum(outs))
    tl.store(out + 8, tl.sum(nans))
    tl.store(out + 9, tl.sum(infs))


@triton.jit(do_not_specialize=list(range(9)))
def fold_kernel(
    partials: tl.int64,
    num_programs: tl.int64,
    numel: tl.int64,
    out_row: tl.int64,
    table: tl.int64,
    spread: tl.int64,
    num_channels: tl.int64,
    repeat: tl.int64,
    out_table: tl.int64,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Program 0: the row. Program 1 + b: COLS channels from b * COLS on. The order of every sum is fixed."""
    if tl.program_id(0) == 0:
        _row(pointer(partials, tl.float64), num_programs, numel.to(tl.float64), pointer(out_row, tl.float64), BLOCK)
    else:
        # Entries [spread, channels, repeat] summed over all but the channels, in the order of memory within a lane.
        first = (tl.program_id(0) - 1).to(tl.int64) * COLS
        channels = first + tl.arange(0, COLS)
        rows = tl.arange(0, ROWS)
        num_entries = spread * num_channels * repeat
        sizes = tl.zeros([ROWS, COLS], tl.float64)
        none = tl.zeros([ROWS, COLS], tl.int64)
        nears, outs, bad = none, none, none
        for j in range(0, spread * repeat, ROWS):
            i = j + rows
            inside = (i < spread * repeat)[:, None] & (channels < num_channels)[None, :]
            at = (i // repeat * num_channels * repeat + i % repeat)[:, None] + (channels * repeat)[None, :]
            sizes += tl.load(pointer(table, tl.float64) + at, mask=inside, other=0.0)
            counts = tl.load(pointer(table, tl.int64) + num_entries + at, mask=inside, other=0)
            nears += counts & FIELD_MASK
            outs += (counts >> FIELD) & FIELD_MASK
            bad += counts >> (2 * FIELD)
        inside = channels < num_channels
        p = pointer(out_table, tl.float64) + channels * 4
        tl.store(p, tl.sum(nears, axis=0).to(tl.float64), mask=inside)
        tl.store(p + 1, tl.sum(outs, axis=0).to(tl.float64), mask=inside)
        tl.store(p + 2, tl.sum(bad, axis=0).to(tl.float64), mask=inside)
        tl.store(p + 3, tl.sum(sizes, axis=0), mask=inside)
