"""The kernel that folds what the activation kernels wrote into a row and a channel table; see activations.py."""

# No `from __future__ import annotations` here: Triton reads the annotations of the arguments.
import triton
import triton.language as tl

from .activations import COUNT, FIELD, FIELD_MASK, INFS, LEAST, M2, MEAN, MOST, NANS, NEARS, OUTS, ZEROS
from .stats import pointer


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
    zeros = tl.zeros([BLOCK], tl.float64)
    nears = tl.zeros([BLOCK], tl.float64)
    outs = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.float64)
    infs = tl.zeros([BLOCK], tl.float64)
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


@triton.jit
def _channels(table, first, num_channels, spread, repeat, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Entries [spread, channels, repeat] summed over all but the channels, in the order of memory within a lane."""
    channels = first + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)
    num_entries = spread * num_channels * repeat
    sizes = tl.zeros([ROWS, COLS], tl.float64)
    nears = tl.zeros([ROWS, COLS], tl.int64)
    outs = tl.zeros([ROWS, COLS], tl.int64)
    bad = tl.zeros([ROWS, COLS], tl.int64)
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
    p = pointer(out, tl.float64) + channels * 4
    tl.store(p, tl.sum(nears, axis=0).to(tl.float64), mask=inside)
    tl.store(p + 1, tl.sum(outs, axis=0).to(tl.float64), mask=inside)
    tl.store(p + 2, tl.sum(bad, axis=0).to(tl.float64), mask=inside)
    tl.store(p + 3, tl.sum(sizes, axis=0), mask=inside)


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
        first = (tl.program_id(0) - 1).to(tl.int64) * COLS
        _channels(table, first, num_channels, spread, repeat, out_table, ROWS, COLS)
