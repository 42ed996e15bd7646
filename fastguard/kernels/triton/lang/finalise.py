"""The kernels that fold what `stats_kernel` wrote, and decide. See stats.py for the tables and the arguments, and
`fastguard.records.slot` for the words of a slot."""

# No `from __future__ import annotations` here: Triton reads the annotations of the arguments.
import triton
import triton.language as tl

from .stats import (
    ABS_MAX,
    ABS_MIN_NONZERO,
    COLUMNS,
    FINITE_NORM,
    LOW_HALF,
    NORM_SQ,
    NUM_INFS,
    NUM_NANS,
    NUM_ZEROS,
    NUMEL,
    SUM,
    SUM_SQ,
    SUM_SQ_DEV,
    double,
    in_range,
    is_finite,
    pointer,
)

HEADER = tl.constexpr(16)
# Bits of `choices`. (An argument must not be called `options`: Triton's own wrapper has one of that name.)
SKIP_NONFINITE = tl.constexpr(1)
UNSCALES_ITSELF = tl.constexpr(2)


@triton.jit
def _decide(norm, header, scale_address, found_inf_address, unscale, max_norm_bits, trigger_bits, choices):
    """Norm of unscaled elements, clip coefficient, skip flag and factor, into a header."""
    finite = is_finite(norm)
    max_norm = double(max_norm_bits)
    trigger = double(trigger_bits)  # below 0: torch's formula, at any norm
    over = finite & (norm > trigger)
    divisor = tl.where(trigger < 0.0, norm + 1e-6, norm)  # a constant by itself would be float32
    coefficient = tl.where(over, tl.minimum(max_norm / _or_1(divisor), 1.0), 1.0)
    found = tl.load(pointer(found_inf_address, tl.float32), mask=found_inf_address != 0, other=0.0)
    skip_nonfinite = (choices & SKIP_NONFINITE) != 0
    unscales_itself = (choices & UNSCALES_ITSELF) != 0
    skip = (skip_nonfinite & (finite == 0)) | (found != 0.0)  # a NaN flag is a flag
    skip = skip | (over & (max_norm == 0.0))
    coefficient = tl.where(skip, 1.0, coefficient)
    factor = tl.where(unscales_itself | skip, coefficient, coefficient * unscale)
    scale = tl.load(pointer(scale_address, tl.float32), mask=scale_address != 0, other=1.0)
    out = pointer(header, tl.float64)
    tl.store(out + 1, norm)
    tl.store(out + 2, coefficient)
    tl.store(out + 3, factor)
    tl.store(out + 4, scale.to(tl.float64))
    narrow = pointer(header, tl.float32) + 10
    tl.store(narrow, tl.where(skip, 1.0, 0.0))
    tl.store(narrow + 1, (scale.to(tl.float64) / coefficient).to(tl.float32))


@triton.jit
def _joined(norms, count, largest, BLOCK: tl.constexpr):
    """The norm of `count` parts from their norms, each divided by the largest before it is squared."""
    lanes = tl.arange(0, BLOCK)
    shares = tl.zeros([BLOCK], tl.float64)
    for j in range(0, count, BLOCK):
        share = tl.load(norms + j + lanes, mask=j + lanes < count, other=0.0) / _or_1(largest)
        shares += share * share
    return tl.where(is_finite(largest), largest * tl.sqrt(tl.sum(shares)), largest)


@triton.jit
def _or_1(x):
    return tl.where(x == 0.0, 1.0, x)


@triton.jit
def _row(columns, num_chunks, begin, count, numel, unscale, out, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], tl.float64)
    sum_sq, total, high = nothing, nothing, nothing
    low = tl.full([BLOCK], float("inf"), tl.float64)
    zeros, nans, infs, deviations, norms = nothing, nothing, nothing, nothing, nothing
    for j in range(0, count, BLOCK):
        inside = j + lanes < count
        p = columns + SUM_SQ * num_chunks + begin + j + lanes
        sum_sq += tl.load(p, mask=inside, other=0.0)
        total += tl.load(p + (SUM - SUM_SQ) * num_chunks, mask=inside, other=0.0)
        high = tl.maximum(high, tl.load(p + (ABS_MAX - SUM_SQ) * num_chunks, mask=inside, other=0.0))
        low = tl.minimum(low, tl.load(p + (ABS_MIN_NONZERO - SUM_SQ) * num_chunks, mask=inside, other=float("inf")))
        zeros += tl.load(p + (NUM_ZEROS - SUM_SQ) * num_chunks, mask=inside, other=0.0)
        nans += tl.load(p + (NUM_NANS - SUM_SQ) * num_chunks, mask=inside, other=0.0)
        infs += tl.load(p + (NUM_INFS - SUM_SQ) * num_chunks, mask=inside, other=0.0)
        deviations += tl.load(p + (SUM_SQ_DEV - SUM_SQ) * num_chunks, mask=inside, other=0.0)
        norms = tl.maximum(norms, tl.load(p + (FINITE_NORM - SUM_SQ) * num_chunks, mask=inside, other=0.0))
    row_sq = tl.sum(sum_sq)
    norm = tl.max(norms)
    dev = tl.sum(deviations)
    row_total = tl.sum(total)
    finite = numel - tl.sum(nans) - tl.sum(infs)
    smallest = tl.min(low)
    smallest = tl.where(is_finite(smallest), smallest, 0.0)
    tl.store(out + NUMEL, numel)
    tl.store(out + SUM_SQ, row_sq * unscale * unscale)
    tl.store(out + SUM, row_total * unscale)
    tl.store(out + ABS_MAX, tl.max(high) * unscale)
    tl.store(out + ABS_MIN_NONZERO, smallest * unscale)
    tl.store(out + NUM_ZEROS, tl.sum(zeros))
    tl.store(out + NUM_NANS, tl.sum(nans))
    tl.store(out + NUM_INFS, tl.sum(infs))
    if count > 1:
        # Squared deviations from the mean of all: those from the mean of each chunk, and what is between the means.
        mean = row_total / tl.maximum(finite, 1.0)
        between = tl.zeros([BLOCK], tl.float64)
        for j in range(0, count, BLOCK):
            inside = j + lanes < count
            p = columns + SUM_SQ * num_chunks + begin + j + lanes
            size = tl.minimum(numel - (j + lanes).to(tl.float64) * CHUNK, 1.0 * CHUNK)
            size -= tl.load(p + (NUM_NANS - SUM_SQ) * num_chunks, mask=inside, other=0.0)
            size -= tl.load(p + (NUM_INFS - SUM_SQ) * num_chunks, mask=inside, other=0.0)
            size = tl.where(inside, size, 0.0)
            away = tl.load(p + (SUM - SUM_SQ) * num_chunks, mask=inside, other=0.0) / _or_1(size) - mean
            between += size * away * away
        dev += tl.sum(between)
        dev = tl.where(dev == dev, dev, float("inf"))  # sums overflowed
        if in_range(row_sq):
            norm = tl.sqrt(row_sq)
        else:
            norm = _joined(columns + FINITE_NORM * num_chunks + begin, count, norm, BLOCK)
    tl.store(out + SUM_SQ_DEV, dev * unscale * unscale)
    tl.store(out + FINITE_NORM, norm * unscale)


@triton.jit(do_not_specialize=list(range(12)))
def finalise_kernel(
    partials: tl.int64,
    num_chunks: tl.int64,
    row_chunks: tl.int64,
    numels: tl.int64,
    slot: tl.int64,
    step: tl.int64,
    scale_address: tl.int64,
    found_inf_address: tl.int64,
    unscale_bits: tl.int64,
    max_norm_bits: tl.int64,
    trigger_bits: tl.int64,
    choices: tl.int64,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Program 0: the total, the decision and the header of a slot. Program 1 + t: row t. The order of every sum is
    fixed. Program 0 reads one column only, so that it does not keep the others waiting, unless squares have left the
    range of float64."""
    columns = pointer(partials, tl.float64)
    header = pointer(slot, tl.float64)
    # What rows are multiplied by: 1/scale rounded as GradScaler.unscale_ rounds it, or a number that was given.
    scale = tl.load(pointer(scale_address, tl.float32), mask=scale_address != 0, other=1.0)
    inverse = (1.0 / scale.to(tl.float64)).to(tl.float32).to(tl.float64)
    unscale = tl.where(scale_address != 0, inverse, double(unscale_bits))
    if tl.program_id(0) == 0:
        places = tl.arange(0, BLOCK)
        squares = tl.zeros([BLOCK], tl.float64)
        for j in range(0, num_chunks, BLOCK):
            i = j + places
            squares += tl.load(columns + NORM_SQ * num_chunks + i, mask=i < num_chunks, other=0.0)
        found = tl.sum(squares)
        norm_sq = found * unscale * unscale
        norm = tl.sqrt(norm_sq)
        if (found == found) & (in_range(found) == 0):
            # Squares have left the range of float64; NaN aside, Inf if an element is.
            lanes = tl.arange(0, ROW_BLOCK)
            largest = tl.zeros([ROW_BLOCK], tl.float64)
            infs = tl.zeros([ROW_BLOCK], tl.float64)
            for j in range(0, num_chunks, ROW_BLOCK):
                p = columns + FINITE_NORM * num_chunks + j + lanes
                largest = tl.maximum(largest, tl.load(p, mask=j + lanes < num_chunks, other=0.0))
                p = columns + NUM_INFS * num_chunks + j + lanes
                infs += tl.load(p, mask=j + lanes < num_chunks, other=0.0)
            rescued = _joined(columns + FINITE_NORM * num_chunks, num_chunks, tl.max(largest), ROW_BLOCK)
            norm = tl.where(tl.sum(infs) > 0.0, float("inf"), rescued) * unscale
        tl.store(header, norm_sq)
        tl.store(header + 6, step.to(tl.float64))
        _decide(norm, slot, scale_address, found_inf_address, unscale, max_norm_bits, trigger_bits, choices)
    else:
        row = tl.program_id(0) - 1
        packed = tl.load(pointer(row_chunks, tl.int64) + row)
        numel = tl.load(pointer(numels, tl.int64) + row).to(tl.float64)
        out = header + HEADER + row * COLUMNS
        _row(columns, num_chunks, packed & LOW_HALF, packed >> 32, numel, unscale, out, CHUNK, ROW_BLOCK)
