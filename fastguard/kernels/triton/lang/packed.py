"""The fast loop of the statistics for 16-bit elements on GPUs that compare two at once: NVIDIA's from sm_90 on."""

# No `from __future__ import annotations` here: Triton reads the annotations of the arguments.
import triton
import triton.language as tl

NO_MIN = tl.constexpr(2.0**100)  # above any magnitude whose square is a finite float32


@triton.jit
def four_loads(p, step):
    """All are under way before the first is used."""
    a = tl.load(p, eviction_policy="evict_first")
    b = tl.load(p + step, eviction_policy="evict_first")
    c = tl.load(p + 2 * step, eviction_policy="evict_first")
    d = tl.load(p + 3 * step, eviction_policy="evict_first")
    return a, b, c, d


@triton.jit
def _packed_step(words, high, low, filled):
    """Largest and smallest magnitude and count of what is not zero, for words of two elements, on the bits of |x|.

    `low` is the smallest of bits - 1: zero wraps around. Triton 3.4 mistakes the third result of one assembly.
    """
    bits = words & 0x7FFF7FFF
    high, low = tl.inline_asm_elementwise(
        """{
            .reg .b32 most, least;
            max.u16x2 most, $2, $3;
            mov.b32 least, 0xffffffff;
            add.u16x2 least, $2, least;
            min.u16x2 $1, least, $4;
            mov.b32 $0, most;
        }""",
        "=r,=r,r,r,r",
        [bits, high, low],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    some = tl.inline_asm_elementwise(
        "{ .reg .b32 one; mov.b32 one, 0x00010001; min.u16x2 $0, $1, one; }",
        "=r,r",
        [bits],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return high, low, filled + some


@triton.jit
def _element(bits, DTYPE: tl.constexpr):
    """float32 of the element of 16 bits in the lower half of a word; a bfloat16 is the upper half of its float32."""
    if tl.bfloat16 == DTYPE:
        x = (bits << 16).to(tl.float32, bitcast=True)
    else:
        x = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return x


@triton.jit
def _sums_step(a, b, sum_sq, total, DTYPE: tl.constexpr):
    """Two words a lane, four elements, added to the sums."""
    e = _element(a, DTYPE)
    f = _element(a >> 16, DTYPE)
    g = _element(b, DTYPE)
    h = _element(b >> 16, DTYPE)
    return sum_sq + ((e * e + f * f) + (g * g + h * h)), total + ((e + f) + (g + h))


@triton.jit
def packed(vector, full, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Sums, largest and smallest magnitude and zeros of `full` elements from `vector` on, LANES of each; float32."""
    lanes = tl.arange(0, LANES)
    sum_sq = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    most = tl.zeros([LANES], tl.int32)
    least = tl.full([LANES], -1, tl.int32)
    filled = tl.zeros([LANES], tl.int32)
    for j in range(0, full // 2, 4 * LANES):
        p = vector + j + lanes
        a, b, c, d = four_loads(p, LANES)
        most, least, filled = _packed_step(a, most, least, filled)
        most, least, filled = _packed_step(b, most, least, filled)
        most, least, filled = _packed_step(c, most, least, filled)
        most, least, filled = _packed_step(d, most, least, filled)
        sum_sq, total = _sums_step(a, b, sum_sq, total, DTYPE)
        sum_sq, total = _sums_step(c, d, sum_sq, total, DTYPE)
    high = _element(tl.maximum(most & 0xFFFF, (most >> 16) & 0xFFFF), DTYPE)
    least = tl.minimum(least & 0xFFFF, (least >> 16) & 0xFFFF)
    low = tl.where(least == 0xFFFF, NO_MIN, _element(least + 1, DTYPE))
    zeros = (full // LANES - (filled & 0xFFFF) - (filled >> 16)).to(tl.float32)
    return sum_sq, total, high, low, zeros
