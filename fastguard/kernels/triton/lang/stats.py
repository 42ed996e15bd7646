"""The GPU kernels. Imported only where Triton is there and is going to be used.

All arguments are 64-bit integers: addresses, counts, and the bits of float64 numbers (Triton would pass a Python float
as float32). So a launch looks at no tensor, nothing depends on values, and one compiled kernel serves every call.

Every tensor is a row; it is cut into chunks of CHUNK elements, whatever else is in the list. The tables:

    chunks      int64 [C]     row in the low half, number within the row in the high half
    addresses   int64 [T]     of the first element of each row
    numels      int64 [T]
    row_chunks  int64 [T]     first chunk in the low half, number of chunks in the high half
    partials    float64 [COLUMNS, C]

The fast loop has 512 float32 lanes, four a thread, which leaves registers for eight programs on a multiprocessor. Four
elements are added as a tree before they go to a lane, so that no sum takes more than 25 roundings one after the other:
a norm is within 8e-7 even if all of them go one way. It uses float32 instructions wherever it can, because integer ones
run at half their rate. Then the chunk asks, as the CPU kernels do per block, whether the loop's assumptions held, and
reads itself again exactly if they did not.

The last bits of a sum depend on where a tensor begins within 16 bytes, and on nothing else.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of the arguments.
import triton
import triton.language as tl

# The columns of `fastguard.records.columns`, in rows and partials. In partials ABS_MIN_NONZERO is Inf where no element
# is finite and not zero; and the place of NUMEL, which needs no pass, holds NORM_SQ: it is SUM_SQ, or NaN or Inf where
# an element is, so that a plain sum of it is what decides.
NUMEL, SUM_SQ, SUM, ABS_MAX, ABS_MIN_NONZERO, NUM_ZEROS, NUM_NANS, NUM_INFS = map(tl.constexpr, range(8))
SUM_SQ_DEV, FINITE_NORM, COLUMNS = map(tl.constexpr, range(8, 11))
NORM_SQ = NUMEL

INF32 = tl.constexpr(0x7F800000)
INF64 = tl.constexpr(0x7FF0000000000000)
FAST_MIN = tl.constexpr(0x2A000000)  # 2^-43: smaller squares would lose bits to underflow
LEAST_SQUARES = tl.constexpr(2.0**-960)  # a sum of squares of float64 below it has lost bits to underflow
LOW_HALF = tl.constexpr(0xFFFFFFFF)
NO_MIN = tl.constexpr(2.0**100)  # above any magnitude whose square is a finite float32
# `do_not_specialize` below: otherwise Triton would compile one more kernel for arguments that are multiples of 16.


@triton.jit
def pointer(address, DTYPE: tl.constexpr):
    return address.to(tl.int64).to(tl.pointer_type(DTYPE))


@triton.jit
def _four_loads(p, step):
    """All are under way before the first is used."""
    a = tl.load(p, eviction_policy="evict_first")
    b = tl.load(p + step, eviction_policy="evict_first")
    c = tl.load(p + 2 * step, eviction_policy="evict_first")
    d = tl.load(p + 3 * step, eviction_policy="evict_first")
    return a, b, c, d


@triton.jit
def double(bits):
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """Bits of |x|, as an integer that orders like |x|; float32 and float64."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def is_finite(x):
    """By bits, so that no fast-math flag can break it."""
    return magnitude_bits(x) < (INF64 if x.dtype == tl.float64 else INF32)


@triton.jit
def _chunk_of(chunks, addresses, numels, chunk, DTYPE: tl.constexpr, CHUNK: tl.constexpr):
    """Address and number of elements of a chunk, and how many of them come before and from the first multiple of 16."""
    packed = tl.load(pointer(chunks, tl.int64) + chunk)
    row = packed & LOW_HALF
    start = (packed >> 32) * CHUNK
    size: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address = tl.load(pointer(addresses, tl.int64) + row) + start * size
    n = tl.minimum(tl.load(pointer(numels, tl.int64) + row) - start, CHUNK).to(tl.int32)
    head = tl.minimum(((16 - (address & 15)) & 15).to(tl.int32) // size, n)
    return address, n, head


@triton.jit
def _around(j, lanes, head, full):
    """Element numbers of a step through what the vector loop over [head, head + full) leaves out."""
    i = j + lanes
    return tl.where(i < head, i, i + full)


@triton.jit
def _aligned(address, head, DTYPE: tl.constexpr):
    """Where the vector loop begins. The hint is a promise; it has to be on the operation that makes the pointer."""
    start = address.to(tl.int64) + head * (DTYPE.primitive_bitwidth // 8)
    return tl.multiple_of(start.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _low(x, zero):
    """|x|, or NO_MIN where `zero` is 1; one multiply-add."""
    return tl.fma(zero, tl.full(x.shape, NO_MIN, tl.float32), tl.abs(x))


@triton.jit
def _exact_step(x, inside, sum_sq, total, high, low, zeros, nans, infs):
    """Elements of float32 or float64 added to the accumulators. Lanes that are not `inside` must hold 0."""
    bits = magnitude_bits(x)
    inf: tl.constexpr = INF64 if x.dtype == tl.float64 else INF32
    finite = bits < inf
    nans += (bits > inf).to(tl.int32)
    infs += (bits == inf).to(tl.int32)
    zeros += ((bits == 0) & inside).to(tl.int32)
    x = tl.where(finite, x, 0.0)
    magnitude = tl.abs(x)
    high = tl.maximum(high, magnitude)
    low = tl.minimum(low, tl.where(magnitude == 0.0, float("inf"), magnitude))
    wide = x.to(tl.float64)
    return sum_sq + wide * wide, total + wide, high, low, zeros, nans, infs


@triton.jit
def _exact(address, n, head, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """All columns of a chunk, in float64, any values; integers in the lanes for the counts."""
    COMPUTE: tl.constexpr = tl.float64 if DTYPE.is_fp64() else tl.float32
    lanes = tl.arange(0, LANES)
    every = lanes >= 0
    full = (n - head) // LANES * LANES
    nothing = tl.zeros([LANES], tl.float64)
    none = tl.zeros([LANES], tl.int32)
    sum_sq, total, zeros, nans, infs = nothing, nothing, none, none, none
    high = tl.zeros([LANES], COMPUTE)
    low = tl.full([LANES], float("inf"), COMPUTE)
    vector = _aligned(address, head, DTYPE)
    for j in range(0, full, LANES):
        x = tl.load(vector + j + lanes, eviction_policy="evict_first").to(COMPUTE)
        sum_sq, total, high, low, zeros, nans, infs = _exact_step(x, every, sum_sq, total, high, low, zeros, nans, infs)
    single = pointer(address, DTYPE)
    for j in range(0, n - full, LANES):
        i = _around(j, lanes, head, full)
        x = tl.load(single + i, mask=i < n, other=0.0).to(COMPUTE)
        sum_sq, total, high, low, zeros, nans, infs = _exact_step(x, i < n, sum_sq, total, high, low, zeros, nans, infs)
    return (
        tl.sum(sum_sq),
        tl.sum(total),
        tl.max(high).to(tl.float64),
        tl.min(low).to(tl.float64),
        tl.sum(zeros).to(tl.float64),
        tl.sum(nans).to(tl.float64),
        tl.sum(infs).to(tl.float64),
    )


@triton.jit
def in_range(sum_sq):
    """Whether a sum of squares of float64 neither overflowed nor lost bits to underflow."""
    return (sum_sq >= LEAST_SQUARES) & is_finite(sum_sq)


@triton.jit
def _moments(address, n, shift, scale, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Sum of (x - shift) * scale over the finite elements of a chunk, and of its squares, in float64."""
    COMPUTE: tl.constexpr = tl.float64 if DTYPE.is_fp64() else tl.float32
    total = tl.zeros([LANES], tl.float64)
    squares = tl.zeros([LANES], tl.float64)
    for j in range(0, n, LANES):
        i = j + tl.arange(0, LANES)
        x = tl.load(pointer(address, DTYPE) + i, mask=i < n, other=0.0).to(COMPUTE)
        away = tl.where((i < n) & is_finite(x), (x.to(tl.float64) - shift) * scale, 0.0)
        total += away
        squares += away * away
    return tl.sum(total), tl.sum(squares)


@triton.jit
def _deviations(address, n, count, sum_sq, total, high, low, zeros, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Sum of squared deviations from the mean of the `count` finite elements of a chunk; reads them again where
    E[x^2] - E[x]^2 cancels."""
    size = tl.maximum(count, 1.0)
    mean = total / size
    found = sum_sq - total * mean
    # One element, zeros only, or the same number throughout.
    same = (high == low) & (zeros == 0.0) & (tl.abs(mean) > (1.0 - 1.0 / size) * high)
    nothing = (count <= 1.0) | (high == 0.0) | same
    doubtful = (found <= 0.0009765625 * sum_sq) | (is_finite(sum_sq) == 0)
    found = tl.where(nothing, 0.0, found)
    if doubtful & (nothing == 0):
        rest, squares = _moments(address, n, mean, 1.0, DTYPE, LANES)
        found = squares - rest * (rest / size)  # what the rounding of the mean left over
        found = tl.where(is_finite(found), tl.maximum(found, 0.0), float("inf"))
    return found


@triton.jit
def _norm(address, n, sum_sq, high, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """The root of `sum_sq`; where squares of float64 have left its range, of those of elements times a power of two."""
    norm = tl.sqrt(sum_sq)
    if DTYPE.is_fp64():
        is_outside = (high > 0.0) & (in_range(sum_sq) == 0)
        if is_outside:
            exponent = tl.minimum(tl.maximum((magnitude_bits(high) >> 52) - 1023, -1022), 1022)
            scale = ((1023 - exponent) << 52).to(tl.float64, bitcast=True)
            back = ((1023 + exponent) << 52).to(tl.float64, bitcast=True)
            _, squares = _moments(address, n, 0.0, scale, DTYPE, LANES)
            norm = tl.sqrt(squares) * back
    return norm


@triton.jit
def _fast_step(a, b, c, d, sum_sq, total, high, low, zeros):
    """Four elements a lane added to the accumulators."""
    a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    sum_sq += (a * a + b * b) + (c * c + d * d)
    total += (a + b) + (c + d)
    high = tl.maximum(high, tl.maximum(tl.abs(a), tl.abs(b)))
    high = tl.maximum(high, tl.maximum(tl.abs(c), tl.abs(d)))
    za = tl.where(a == 0.0, 1.0, 0.0)
    zb = tl.where(b == 0.0, 1.0, 0.0)
    zc = tl.where(c == 0.0, 1.0, 0.0)
    zd = tl.where(d == 0.0, 1.0, 0.0)
    zeros += (za + zb) + (zc + zd)
    low = tl.minimum(low, tl.minimum(_low(a, za), _low(b, zb)))
    low = tl.minimum(low, tl.minimum(_low(c, zc), _low(d, zd)))
    return sum_sq, total, high, low, zeros


@triton.jit
def _halves(x, LANES: tl.constexpr):
    """Even and odd elements; a thread keeps what it has loaded."""
    return tl.split(tl.reshape(x, [LANES, 2]))


@triton.jit
def _fast(address, n, head, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Sum of squares, sum, largest and smallest magnitude and zeros of a chunk, and whether to believe them."""
    BLOCK: tl.constexpr = LANES * 4 // (DTYPE.primitive_bitwidth // 8)  # 16 bytes a thread
    full = (n - head) // (4 * BLOCK) * (4 * BLOCK)
    places = tl.arange(0, BLOCK)
    nothing = tl.zeros([LANES], tl.float32)
    sum_sq, total, high, zeros = nothing, nothing, nothing, nothing
    low = tl.full([LANES], NO_MIN, tl.float32)
    vector = _aligned(address, head, DTYPE)
    for j in range(0, full, 4 * BLOCK):
        p = vector + j + places
        a, b, c, d = _four_loads(p, BLOCK)
        if BLOCK == LANES:
            sum_sq, total, high, low, zeros = _fast_step(a, b, c, d, sum_sq, total, high, low, zeros)
        else:
            a, e = _halves(a, LANES)
            b, f = _halves(b, LANES)
            c, g = _halves(c, LANES)
            d, h = _halves(d, LANES)
            sum_sq, total, high, low, zeros = _fast_step(a, e, b, f, sum_sq, total, high, low, zeros)
            sum_sq, total, high, low, zeros = _fast_step(c, g, d, h, sum_sq, total, high, low, zeros)
    lanes = tl.arange(0, LANES)
    single = pointer(address, DTYPE)
    for j in range(0, n - full, LANES):
        i = _around(j, lanes, head, full)
        a = tl.load(single + i, mask=i < n, other=0.0).to(tl.float32)
        za = tl.where(a == 0.0, 1.0, 0.0)
        sum_sq += a * a
        total += a
        high = tl.maximum(high, tl.abs(a))
        zeros += tl.where(i < n, za, 0.0)
        low = tl.minimum(low, _low(a, za))
    sum_sq_64 = tl.sum(sum_sq.to(tl.float64))
    total_64 = tl.sum(total.to(tl.float64))
    largest = tl.max(high)
    smallest = tl.min(low)
    # A NaN or an Inf anywhere, or a square that overflows, makes the sum of squares one.
    believe = is_finite(sum_sq_64)
    if not DTYPE.is_fp16():  # whose smallest square is 3.6e-15
        bits = magnitude_bits(largest)
        believe = believe & ((bits >= FAST_MIN) | (bits == 0))
    # Where the mean is nearly all of the root mean square, E[x^2] - E[x]^2 cancels.
    believe = believe & (total_64 * total_64 <= 0.99 * n.to(tl.float64) * sum_sq_64)
    lowest = tl.where(smallest == NO_MIN, float("inf"), smallest).to(tl.float64)
    return sum_sq_64, total_64, largest.to(tl.float64), lowest, tl.sum(zeros).to(tl.float64), believe


@triton.jit(do_not_specialize=list(range(6)))
def stats_kernel(
    chunks: tl.int64,
    addresses: tl.int64,
    numels: tl.int64,
    partials: tl.int64,
    first: tl.int64,
    num_chunks: tl.int64,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a chunk, from number `first` on: its columns of partial results. No atomics. LANES is four times the
    number of threads."""
    chunk = first + tl.program_id(0)
    address, n, head = _chunk_of(chunks, addresses, numels, chunk, DTYPE, CHUNK)
    if DTYPE.is_fp64():
        sum_sq, total, high, low, zeros, nans, infs = _exact(address, n, head, DTYPE, LANES)
    else:
        sum_sq, total, high, low, zeros, believe = _fast(address, n, head, DTYPE, LANES)
        nans = zeros * 0.0
        infs = zeros * 0.0
        if not believe:
            sum_sq, total, high, low, zeros, nans, infs = _exact(address, n, head, DTYPE, LANES)
    norm = _norm(address, n, sum_sq, high, DTYPE, LANES)
    norm_sq = tl.where(infs > 0.0, float("inf"), sum_sq)
    norm_sq = tl.where(nans > 0.0, float("nan"), norm_sq)
    out = pointer(partials, tl.float64) + chunk
    tl.store(out + SUM_SQ * num_chunks, sum_sq)
    tl.store(out + SUM * num_chunks, total)
    tl.store(out + ABS_MAX * num_chunks, high)
    tl.store(out + ABS_MIN_NONZERO * num_chunks, low)
    tl.store(out + NUM_ZEROS * num_chunks, zeros)
    tl.store(out + NUM_NANS * num_chunks, nans)
    tl.store(out + NUM_INFS * num_chunks, infs)
    tl.store(out + FINITE_NORM * num_chunks, norm)
    tl.store(out + NORM_SQ * num_chunks, norm_sq)
    # Last, when nothing else is wanted any more: its loop needs the registers.
    count = n.to(tl.float64) - nans - infs
    deviations = _deviations(address, n, count, sum_sq, total, high, low, zeros, DTYPE, LANES)
    tl.store(out + SUM_SQ_DEV * num_chunks, deviations)


@triton.jit
def _product(x, factor, DTYPE: tl.constexpr):
    """As torch multiplies in place: in float32 (float64 for float64), rounded once."""
    COMPUTE: tl.constexpr = tl.float64 if DTYPE.is_fp64() else tl.float32
    return (x.to(COMPUTE) * factor.to(COMPUTE)).to(DTYPE)


@triton.jit(do_not_specialize=list(range(6)))
def scale_kernel(
    chunks: tl.int64,
    addresses: tl.int64,
    numels: tl.int64,
    factor_address: tl.int64,
    first: tl.int64,
    end: tl.int64,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """x *= factor for chunks [first, end), shared out among the programs. Factor 1 touches no element."""
    factor = tl.load(pointer(factor_address, tl.float64))
    if factor != 1.0:
        BLOCK: tl.constexpr = LANES * 4 // (DTYPE.primitive_bitwidth // 8)
        lanes = tl.arange(0, BLOCK)
        for chunk in range(first + tl.program_id(0), end, tl.num_programs(0)):
            address, n, head = _chunk_of(chunks, addresses, numels, chunk, DTYPE, CHUNK)
            full = (n - head) // (4 * BLOCK) * (4 * BLOCK)
            vector = _aligned(address, head, DTYPE)
            for j in range(0, full, 4 * BLOCK):
                p = vector + j + lanes
                a, b, c, d = _four_loads(p, BLOCK)
                tl.store(p, _product(a, factor, DTYPE))
                tl.store(p + BLOCK, _product(b, factor, DTYPE))
                tl.store(p + 2 * BLOCK, _product(c, factor, DTYPE))
                tl.store(p + 3 * BLOCK, _product(d, factor, DTYPE))
            single = pointer(address, DTYPE)
            for j in range(0, n - full, BLOCK):
                i = _around(j, lanes, head, full)
                x = tl.load(single + i, mask=i < n)
                tl.store(single + i, _product(x, factor, DTYPE), mask=i < n)
