"""Kernels for activations: moments, extremes and counts of one tensor and, in the same read, figures for each channel.

All arguments are 64-bit integers, as in stats.py: addresses, counts, the bits of float64 numbers. A program writes
one column of `partials`, float64 [10, number of programs], and nothing else touches it: no atomics.

Moments are those of x - shift, where the shift is the mean of the program's first elements: a standard deviation that
is small beside the mean loses nothing. The fast loop has float32 lanes (float64 for float64), of at most 128 elements
each; then the program asks whether the loop's assumptions held, and reads its part again exactly if they did not:
around the true mean, in float64, NaN and Inf told apart by their bits.

`table` takes two planes of partial results for each entry of a channel: the sum of magnitudes (float64), and counts
packed into one integer: near zero, saturated << 20, not finite << 40.

Thresholds reach these kernels rounded to what the elements are compared as, such that no comparison changes.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of the arguments.
import triton
import triton.language as tl

from .stats import INF32, INF64, is_finite, magnitude_bits, pointer

# Columns of the partials.
COUNT = tl.constexpr(0)  # finite elements
MEAN = tl.constexpr(1)
M2 = tl.constexpr(2)
LEAST = tl.constexpr(3)  # Inf where no element is finite
MOST = tl.constexpr(4)  # -Inf there
ZEROS = tl.constexpr(5)
NEARS = tl.constexpr(6)
OUTS = tl.constexpr(7)
NANS = tl.constexpr(8)
INFS = tl.constexpr(9)

FIELD = tl.constexpr(20)  # bits of a packed count; a program reads fewer elements than that holds
FIELD_MASK = tl.constexpr((1 << 20) - 1)
TABLE_MASK = tl.constexpr((1 << 40) - 1)
MOST_CANCELLED = tl.constexpr(0.9)  # of a sum of squares, before it is taken again around the true mean
LEAST_SPREAD32 = tl.constexpr(2.0**-43)  # smaller squares would lose bits to underflow
LEAST_SPREAD64 = tl.constexpr(2.0**-480)


@triton.jit
def _kinds(x, low, high, near):
    """Zero + 256 near zero + 65536 saturated, as float32: three counts in one register, at float rate."""
    zero = tl.where(x == 0.0, 1.0, 0.0)
    close = tl.where(tl.abs(x) < near, 1.0, 0.0)
    out = tl.where((x < low) | (x > high), 1.0, 0.0)
    kinds = tl.fma(close, tl.full(x.shape, 256.0, tl.float32), zero)
    return tl.fma(out, tl.full(x.shape, 65536.0, tl.float32), kinds)


@triton.jit
def _fast_step(a, b, c, d, shift, low, high, near, total, square, least, most, counts, size):
    """Four elements a lane added to the accumulators, as a tree."""
    least = tl.minimum(least, tl.minimum(tl.minimum(a, b), tl.minimum(c, d)))
    most = tl.maximum(most, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
    ab = _kinds(a, low, high, near) + _kinds(b, low, high, near)
    counts += ab + (_kinds(c, low, high, near) + _kinds(d, low, high, near))
    size += (tl.abs(a) + tl.abs(b)) + (tl.abs(c) + tl.abs(d))
    a -= shift
    b -= shift
    c -= shift
    d -= shift
    total += (a + b) + (c + d)
    square += (a * a + b * b) + (c * c + d * d)
    return total, square, least, most, counts, size


@triton.jit
def fast_pair(a, b, shift, low, high, near, total, square, least, most, counts, size):
    """Two loads added to accumulators that have as many columns."""
    a = a.to(total.dtype)
    b = b.to(total.dtype)
    least = tl.minimum(least, tl.minimum(a, b))
    most = tl.maximum(most, tl.maximum(a, b))
    counts += _kinds(a, low, high, near) + _kinds(b, low, high, near)
    size += tl.abs(a) + tl.abs(b)
    a -= shift
    b -= shift
    total += a + b
    square += a * a + b * b
    return total, square, least, most, counts, size


@triton.jit
def _masked_step(x, inside, shift, low, high, near, total, square, least, most, counts, size):
    """One element a lane; lanes that are not `inside` hold 0 and add nothing."""
    d = tl.where(inside, x - shift, 0.0)
    total += d
    square += d * d
    least = tl.minimum(least, tl.where(inside, x, float("inf")))
    most = tl.maximum(most, tl.where(inside, x, float("-inf")))
    counts += tl.where(inside, _kinds(x, low, high, near), 0.0)
    size += tl.abs(x)
    return total, square, least, most, counts, size


@triton.jit
def _halves(x, LANES: tl.constexpr):
    """Even and odd columns; a thread keeps what it has loaded."""
    return tl.split(tl.reshape(x, [x.shape[0], LANES, 2]))


@triton.jit
def fast_loads(a, b, c, d, shift, low, high, near, total, square, least, most, counts, size):
    """Four loads added to accumulators that have as many columns or half as many."""
    LANES: tl.constexpr = total.shape[1]
    a = a.to(total.dtype)
    b = b.to(total.dtype)
    c = c.to(total.dtype)
    d = d.to(total.dtype)
    if a.shape[1] == LANES:
        total, square, least, most, counts, size = _fast_step(
            a, b, c, d, shift, low, high, near, total, square, least, most, counts, size
        )
    else:
        a, e = _halves(a, LANES)
        b, f = _halves(b, LANES)
        c, g = _halves(c, LANES)
        d, h = _halves(d, LANES)
        total, square, least, most, counts, size = _fast_step(
            a, e, b, f, shift, low, high, near, total, square, least, most, counts, size
        )
        total, square, least, most, counts, size = _fast_step(
            c, g, d, h, shift, low, high, near, total, square, least, most, counts, size
        )
    return total, square, least, most, counts, size


@triton.jit
def masked_load(a, inside, shift, low, high, near, total, square, least, most, counts, size):
    """The same of one load under a mask."""
    LANES: tl.constexpr = total.shape[1]
    a = a.to(total.dtype)
    if a.shape[1] == LANES:
        total, square, least, most, counts, size = _masked_step(
            a, inside, shift, low, high, near, total, square, least, most, counts, size
        )
    else:
        a, b = _halves(a, LANES)
        inside, other = _halves(inside.to(tl.int8), LANES)
        total, square, least, most, counts, size = _masked_step(
            a, inside != 0, shift, low, high, near, total, square, least, most, counts, size
        )
        total, square, least, most, counts, size = _masked_step(
            b, other != 0, shift, low, high, near, total, square, least, most, counts, size
        )
    return total, square, least, most, counts, size


@triton.jit
def packed(counts):
    """The counts of lanes as near zero, saturated << 20, zero << 40."""
    c = counts.to(tl.int32)
    return ((c >> 8) & 255).to(tl.int64) | ((c >> 16).to(tl.int64) << FIELD) | ((c & 255).to(tl.int64) << (2 * FIELD))


@triton.jit
def mean_of(total, count):
    """Rounded as IEEE says, which Triton's own division of float32 is not: the mean of equal numbers, a power of two of
    them, is theirs."""
    if total.dtype == tl.float64:
        mean = total / count.to(tl.float64)
    else:
        mean = tl.div_rn(total, count.to(tl.float32))
    return mean


@triton.jit
def _believe(n, total, square, least, most, shift, size, IS_DOUBLE: tl.constexpr):
    """Whether the fast loop may be believed, from sums over its lanes: nothing that is not finite (which makes the sum
    of squares NaN or Inf), no overflow, no underflow, and no sum of squares that is nearly all cancelled."""
    spread = tl.maximum(most - shift, shift - least)
    enough: tl.constexpr = LEAST_SPREAD64 if IS_DOUBLE else LEAST_SPREAD32
    bounded = is_finite(square) & is_finite(size)
    return bounded & (total * total <= MOST_CANCELLED * n * square) & ((spread >= enough) | (spread == 0.0))


@triton.jit
def exact_mean_step(x, inside, total, count):
    """Finite elements, times 2^-20 lest the sum overflow, and their number."""
    finite = is_finite(x) & inside
    total += tl.where(finite, x.to(tl.float64) * 2.0**-20, 0.0)
    count += finite.to(tl.int32)
    return total, count


@triton.jit
def exact_step(x, inside, mean, low, high, near, total, square, least, most, counts, bad, size):
    """One element a lane, of any value. `counts` has fields of ten bits: zero, near zero, saturated; `bad` of sixteen:
    NaN, Inf."""
    bits = magnitude_bits(x)
    inf: tl.constexpr = INF64 if x.dtype == tl.float64 else INF32
    finite = (bits < inf) & inside
    is_inf = (bits == inf) & inside
    wide = x.to(tl.float64)
    d = tl.where(finite, wide - mean, 0.0)
    total += d
    square += d * d
    least = tl.minimum(least, tl.where(finite, x, float("inf")))
    most = tl.maximum(most, tl.where(finite, x, float("-inf")))
    out = (finite & ((x < low) | (x > high))) | is_inf
    close = finite & (tl.abs(x) < near)
    counts += (finite & (bits == 0)).to(tl.int32) + (close.to(tl.int32) << 10) + (out.to(tl.int32) << 20)
    bad += ((bits > inf) & inside).to(tl.int32) + (is_inf.to(tl.int32) << 16)
    size += tl.where(finite, tl.abs(wide), 0.0)
    return total, square, least, most, counts, bad, size


@triton.jit
def store_entries(table, num_entries, entries, inside, size, counts):
    """Both planes of some entries of `table`."""
    tl.store(pointer(table, tl.float64) + entries, size, mask=inside)
    tl.store(pointer(table, tl.int64) + num_entries + entries, counts, mask=inside)


@triton.jit
def exact_packed(counts, bad):
    """As `packed`, and what is not finite in place of the zeros, which come apart."""
    near_and_out = ((counts >> 10) & 1023).to(tl.int64) | ((counts >> 20).to(tl.int64) << FIELD)
    return near_and_out | (((bad & 0xFFFF) + (bad >> 16)).to(tl.int64) << (2 * FIELD))


@triton.jit
def _store_moments(out, stride, n, shift, total, square):
    """Count, mean and sum of squared deviations, from those around the shift. n > 0 or the totals are 0."""
    count = tl.maximum(n, 1.0)
    correction = total / count
    cancelled = total * correction
    tl.store(out + COUNT * stride, n)
    tl.store(out + MEAN * stride, shift + tl.where(is_finite(correction), correction, 0.0))
    tl.store(out + M2 * stride, tl.maximum(square - tl.where(is_finite(cancelled), cancelled, 0.0), 0.0))


@triton.jit
def _store_rest(out, stride, least, most, zeros, nears, outs, nans, infs):
    tl.store(out + LEAST * stride, least)
    tl.store(out + MOST * stride, most)
    tl.store(out + ZEROS * stride, zeros.to(tl.float64))
    tl.store(out + NEARS * stride, nears.to(tl.float64))
    tl.store(out + OUTS * stride, outs.to(tl.float64))
    tl.store(out + NANS * stride, nans.to(tl.float64))
    tl.store(out + INFS * stride, infs.to(tl.float64))


@triton.jit
def store_exact(out, stride, n, mean, total, square, least, most, zeros, bad, kinds):
    """A program's row from the lanes of the exact loop; `kinds` are summed up as `exact_packed` has them."""
    _store_moments(out, stride, n, mean, tl.sum(total), tl.sum(square))
    low = tl.min(least).to(tl.float64)
    high = tl.max(most).to(tl.float64)
    nears = kinds & FIELD_MASK
    outs = (kinds >> FIELD) & FIELD_MASK
    _store_rest(out, stride, low, high, tl.sum(zeros), nears, outs, tl.sum(bad & 0xFFFF), tl.sum(bad >> 16))


@triton.jit
def store_believed(out, stride, n, shift, total, square, least, most, size, kinds, IS_DOUBLE: tl.constexpr):
    """A program's row from the lanes of the fast loop, if that may be believed, and whether it was stored; `kinds` are
    summed up as `packed` has them."""
    total_64 = tl.sum(total.to(tl.float64))
    square_64 = tl.sum(square.to(tl.float64))
    low = tl.min(least).to(tl.float64)
    high = tl.max(most).to(tl.float64)
    shift_64 = shift.to(tl.float64)
    believed = _believe(n, total_64, square_64, low, high, shift_64, size, IS_DOUBLE)
    if believed:
        _store_moments(out, stride, n, shift_64, total_64, square_64)
        none = n * 0.0
        outs = (kinds >> FIELD) & FIELD_MASK
        _store_rest(out, stride, low, high, kinds >> (2 * FIELD), kinds & FIELD_MASK, outs, none, none)
    return believed


@triton.jit
def begin_of(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to a tensor. The hint is a promise; it has to be on the operation that makes the pointer."""
    start = address.to(tl.int64).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def promised(offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An offset in elements, a multiple of 16 bytes where ALIGNED says so: the compiler takes it from the arithmetic,
    as a hint on a value that was made elsewhere would be lost."""
    if ALIGNED:
        vector: tl.constexpr = 16 * 8 // DTYPE.primitive_bitwidth
        offset = offset // vector * vector
    return offset
