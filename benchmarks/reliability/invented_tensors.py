"""Random tensors: every dtype, layout and kind of value, and some that must be refused."""

from __future__ import annotations

import math
import random
import warnings

import torch

REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*REAL, *REAL[:2], torch.complex64, torch.complex128, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
REASONS = ("storage was freed or cut short", "at most 2\\^53 elements", "must be float16, bfloat16", "must be strided")


class Refused:
    """A tensor that no kernel may read, and the reason that it must be given.

    Attributes:
        tensor: do not show it: torch reads beyond its memory.
        reason: a regular expression.
    """

    def __init__(self, tensor: torch.Tensor, reason: str) -> None:
        self.tensor, self.reason = tensor, reason


def _size(rng: random.Random) -> int:
    """Mostly small; at times around the lanes, blocks and chunks of the kernels."""
    edge = rng.choice((0, 1, 16, 32, 256, 512, 4096, 8192))
    chance = rng.random()
    if chance < 0.75:
        return int(2 ** rng.uniform(0, 9))
    if chance < 0.9:
        return max(0, edge + rng.randint(-2, 2))
    if chance < 0.99:
        return rng.randint(1000, 12_000)
    return rng.choice((65_535, 65_536, 65_537, 70_001, 131_073))


def _real_values(rng: random.Random, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Float64 numbers, not yet rounded to `dtype`."""
    reach = 307 if dtype in (torch.float64, torch.complex128) else 44
    kind = rng.randrange(9)
    noise = torch.randn(size, dtype=torch.float64)
    if kind == 0:
        return noise * 10.0 ** rng.uniform(-reach, reach)
    if kind == 1:  # each of its own magnitude
        return noise.sign() * 10.0 ** ((torch.rand(size, dtype=torch.float64) * 2 - 1) * reach)
    if kind == 2:  # a dominating mean
        mean = 10.0 ** rng.uniform(-8, 8)
        return rng.choice((-1, 1)) * mean * (1 + noise * 10.0 ** rng.uniform(-9, 0))
    if kind == 3:  # one number throughout
        return torch.full((size,), 10.0 ** rng.uniform(-reach, reach) * rng.choice((-1, 1)), dtype=torch.float64)
    if kind == 4:
        return noise * (torch.rand(size) < rng.random())  # zeros
    if kind == 5:
        return torch.full(
            (size,), rng.choice((5e-324, 1e-40, 1e-45, 6e-8, 1.7e308, 3e38, 65504.0)), dtype=torch.float64
        )
    return noise


def values(rng: random.Random, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A dense vector; NaN, Inf, zeros and extremes among the numbers at times, or bits at random."""
    if dtype.is_complex:
        part = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}[dtype]
        pairs = values(rng, 2 * size, part).view(size, 2)
        return torch.view_as_complex(pairs)
    if rng.random() < 0.1:
        width = dtype.itemsize
        bits = torch.randint(0, 256, (size * width,), dtype=torch.uint8)
        return bits.view(INTEGERS[width]).view(dtype) if size else torch.empty(0, dtype=dtype)
    wide = _real_values(rng, size, dtype)
    if size and rng.random() < 0.35:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(size)
            wide[at : at + rng.choice((1, 1, 9, size))] = rng.choice(
                (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 1e-310, 3e38, -1e300)
            )
    return wide.to(dtype)


def _strided(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    size = _size(rng)
    kind = rng.randrange(12)
    if kind < 4 or dtype.itemsize == 1:
        x = values(rng, size, dtype)
        return x.view(*_factors(rng, size)) if rng.random() < 0.5 else x
    if kind == 4:
        return values(rng, 1, dtype)[0]
    if kind == 5:  # an offset, odd for wide loads
        return values(rng, size + 3, dtype)[3:]
    if kind == 6:
        return values(rng, size, dtype)[:: rng.randint(2, 5)]
    if kind == 7:
        return values(rng, size, dtype).view(*_factors(rng, size)).movedim(0, -1)
    if kind == 8:
        x = values(rng, min(size, 300), dtype)
        return x.view(*_factors(rng, len(x))).unsqueeze(0).expand(rng.randint(1, 5), *_factors(rng, len(x)))
    if kind == 9:  # strides that lead nowhere, where a dimension has one index
        return values(rng, size, dtype).as_strided((1, size), (2**59, 1))
    if kind == 10:
        shape = [rng.randint(1, 7) for _ in range(4)]
        x = values(rng, math.prod(shape), dtype).view(shape)
        return x.to(memory_format=torch.channels_last)[..., :: rng.randint(1, 2)]
    n = min(size, 400) + 8  # windows that overlap
    return values(rng, n, dtype).unfold(0, 8, rng.randint(1, 9))


def _factors(rng: random.Random, size: int) -> tuple[int, ...]:
    """A shape of `size` elements, the same for the same state of `rng`'s choice of two."""
    first = next((f for f in (7, 5, 4, 3, 2) if size and size % f == 0), 1)
    return first, size // first


def _lazy(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Its negative, conjugate, or a part of the conjugate: the same memory with a bit that tells."""
    if not x.is_complex():
        return torch._neg_view(x)
    return rng.choice((lambda: x.conj(), lambda: x.conj().imag, lambda: torch._neg_view(x)))()


def _sparse(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    count, rows, columns = rng.randint(0, 40), rng.randint(1, 30), rng.randint(1, 5)
    indices = torch.randint(0, rows, (1, count))
    data = values(rng, count * columns, dtype).view(count, columns)
    return torch.sparse_coo_tensor(indices, data, (rows, columns), check_invariants=False)


def _refused(rng: random.Random, dtype: torch.dtype) -> Refused:
    kind = rng.randrange(4)
    if kind == 0:
        x = values(rng, 400, dtype)
        offset, stride = rng.choice((0, 0, 1, 150)), rng.randint(1, 2)
        view = x[offset : offset + 100 : stride]
        x.untyped_storage().resize_(rng.choice((0, 0, dtype.itemsize * (offset + 50))))
        return Refused(view, REASONS[0])
    if kind == 1:
        return Refused(values(rng, 1, dtype).expand(2 ** rng.randint(54, 62)), REASONS[1])
    if kind == 2:
        return Refused(torch.arange(rng.randint(0, 9)), REASONS[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Refused(torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8), REASONS[3])


def tensor(rng: random.Random) -> torch.Tensor | Refused:
    """One tensor of whatever kind."""
    dtype = rng.choice(DTYPES)
    chance = rng.random()
    if chance < 0.03:
        return _refused(rng, dtype if dtype.itemsize > 1 else torch.float32)
    if chance < 0.08 and dtype in REAL[:2]:
        return _sparse(rng, dtype)
    x = _strided(rng, dtype)
    if chance < 0.2:
        x = _lazy(rng, x)
    return torch.nn.Parameter(x) if chance > 0.9 and x.dtype.itemsize > 1 and not x.is_neg() else x


def tensors(rng: random.Random) -> list[torch.Tensor | Refused]:
    """A list of some; `rng` decides all, torch's generator is seeded from it."""
    torch.manual_seed(rng.getrandbits(40))
    return [tensor(rng) for _ in range(rng.choice((1, 1, 2, 3, 5, 20)))]


def plain_values(x: torch.Tensor) -> torch.Tensor:
    """Its elements as a float64 vector, by torch's own operations: stored ones of a sparse tensor, coalesced."""
    x = x.detach()
    if x.layout is torch.sparse_coo:
        x = x.coalesce().values()
    if x.dtype.itemsize == 1 and x.is_neg():
        return -torch._neg_view(x).to(torch.float64).reshape(-1)
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.to(torch.float64).reshape(-1)
