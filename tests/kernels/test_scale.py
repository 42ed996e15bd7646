"""Scaling in place: bit for bit what torch's mul_ gives."""

from __future__ import annotations

import pytest
import torch

from fastguard import UnsupportedTensorError, scale_

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


def test_sparse_gradients(backend: str) -> None:
    indices = torch.tensor([[0, 1, 1]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (3,))
    scale_([sparse], 0.5, backend=backend)
    assert sparse.to_dense().tolist() == [0.5, 2.5, 0.0]


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
