"""Scaling in place, bit for bit what torch's mul_ gives, and copies of many tensors in one call."""

from __future__ import annotations

import pytest
import torch

from fastguard import UnsupportedTensorError, scale_
from fastguard.kernels import cpu, run_copy
from fastguard.kernels.registry import BACKENDS

from cases import COMPLEX, DTYPES, LAYOUTS, NASTY, image, nasty

FACTORS = (0.3, 1 / 3, 2.0**-16, 1e-5, 3.0, -0.7, 0.0, float("nan"), float("inf"))
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal bit for bit, but for the payload of NaNs."""
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    assert a.dtype == b.dtype
    nan = a.isnan()
    assert torch.equal(nan, b.isnan())
    bits = _BITS[a.element_size()]
    assert torch.equal(a.contiguous().view(bits)[~nan], b.contiguous().view(bits)[~nan])


@pytest.mark.long_interpreted
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES + COMPLEX, ids=str)
def test_as_torch_multiplies(backend: str, dtype: torch.dtype, factor: float) -> None:
    if dtype.is_complex:
        tensors = [torch.randn(n, dtype=dtype) for n in (0, 1, 33, 5000)]
    else:
        tensors = [nasty(value, dtype, 5000) for value in NASTY.values()]
        tensors += [torch.randn(n).mul(10.0 ** -(n % 9)).to(dtype) for n in (0, 1, 17, 4097, 70_001)]
    wanted = [(torch.view_as_real(t) if dtype.is_complex else t).clone().mul_(factor) for t in tensors]
    scale_(tensors, factor, backend=backend)
    for got, want in zip(tensors, wanted, strict=True):
        assert_same_bits(torch.view_as_real(got) if dtype.is_complex else got, want)


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("factor", FACTORS)
def test_every_float16_and_bfloat16_bit_pattern(backend: str, factor: float) -> None:
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        got = patterns.clone().view(dtype)
        want = got.clone().mul_(factor)
        scale_([got], factor, backend=backend)
        assert_same_bits(got, want)


@pytest.mark.thinned(n=3, interpreted=10)
@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if name not in ("expanded", "expanded scalar", "unfolded")]
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_layouts_touch_only_their_own_elements(backend: str, dtype: torch.dtype, layout: str) -> None:
    base = image(dtype)
    if layout == "channels_last":
        base = base.to(memory_format=torch.channels_last)
    want = base.clone(memory_format=torch.preserve_format)
    LAYOUTS[layout](want).mul_(0.25)
    scale_([LAYOUTS[layout](base)], 0.25, backend=backend)
    assert_same_bits(base, want)


@pytest.mark.parametrize("layout", ["expanded", "expanded scalar", "unfolded"])
def test_a_tensor_that_overlaps_itself_is_refused_and_nothing_is_lost(backend: str, layout: str) -> None:
    base = image(torch.float32)
    kept, first = base.clone(), torch.ones(3)
    with pytest.raises(UnsupportedTensorError, match=r"`tensors\[1\]` cannot be scaled in place.*clone"):
        scale_([first, LAYOUTS[layout](base)], 0.5, backend=backend)
    assert torch.equal(base, kept)
    assert torch.equal(first, torch.ones(3))


def test_lazy_conjugates_and_negatives(backend: str) -> None:
    z = torch.randn(100, dtype=torch.complex64)
    want = z.clone() * 0.5
    scale_([z.conj()], 0.5, backend=backend)
    assert_same_bits(z, want)
    imaginary = z.conj().imag
    wanted = imaginary.clone() * 0.5
    scale_([imaginary], 0.5, backend=backend)
    assert torch.equal(z.conj().imag, wanted)


def test_one_touches_nothing(backend: str) -> None:
    tensor = torch.randn(10)
    version = tensor._version
    scale_([tensor], 1.0, backend=backend)
    assert tensor._version == version


def test_autograd_is_told(backend: str) -> None:
    leaf = torch.randn(5, requires_grad=True)
    saved = leaf * 2
    loss = (saved**2).sum()
    scale_([saved], 0.5, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors(backend: str) -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        scale_([tensor], 2.0, backend=backend)
        assert tensor.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn], ids=str)
def test_what_cannot_be_written_is_refused(backend: str, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedTensorError, match="got torch"):
        scale_([torch.zeros(3).to(dtype)], 0.5, backend=backend)


has_kernels = BACKENDS["cpu"].unavailable() is None
SIZES = (0, 1, 3, 2047, 2048, 2049, 65_536, 262_144 + 5, 1_000_003)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_and_no_other(dtype: torch.dtype) -> None:
    source, to, around = [], [], []
    for size in SIZES:
        whole = torch.full((size + 40,), 7.0, dtype=dtype)
        source.append(torch.randn(size + 1).to(dtype)[1:])  # at an odd address
        to.append(whole[17 : 17 + size])
        around.append(whole)
    source[4][:2] = torch.tensor([float("nan"), float("-inf")])
    run_copy(to, source)
    for got, want, whole in zip(to, source, around, strict=True):
        assert torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))
        assert (whole[:17] == 7.0).all() and (whole[17 + len(got) :] == 7.0).all()


def test_what_does_not_lie_alike_goes_through_torch() -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 8, 8)
    source = [image, image.to(memory_format=torch.channels_last), torch.arange(5), torch.randn(4, dtype=torch.cfloat)]
    source += [torch._neg_view(torch.randn(6)), torch.randn(3, 5).t(), torch.ones(4, dtype=torch.bool)]
    to = [torch.empty_like(x) for x in source]
    source.append(torch.ones(3).half())
    to[4], to[5] = torch.empty(6), torch.empty(5, 3)
    to.append(torch.empty(3))  # of another dtype
    if has_kernels:
        assert cpu.extension.copy(to, source, 1) == [1, 2, 3, 4, 5, 6, 7]
    run_copy(to, source)
    for got, want in zip(to, source, strict=True):
        assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])  # the latter through torch
def test_parameters_are_written_without_a_word_to_autograd(dtype: torch.dtype) -> None:
    to = torch.nn.Parameter(torch.zeros(5, dtype=dtype), requires_grad=dtype.is_floating_point)
    version, values = to._version, torch.arange(5).to(dtype).requires_grad_(dtype.is_floating_point)
    with torch.no_grad():
        run_copy([to], [values])
    assert torch.equal(to.detach(), values.detach()) and to._version == version and to.is_leaf


@pytest.mark.skipif(not has_kernels, reason="no C++ kernels")
def test_memory_that_was_given_up_is_not_read() -> None:
    gone = torch.randn(64)
    gone.untyped_storage().resize_(0)
    assert cpu.extension.copy([torch.zeros(64)], [gone], 1) == [0]
