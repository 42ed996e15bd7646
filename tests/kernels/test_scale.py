"""Scaling in place and copying, as torch does; and tensors whose address does not tell what they hold."""

import pytest
import torch

from fastguard import UnsupportedTensorError, activation_stats, tensor_stats
from fastguard.kernels import cpu, run_copy, run_scale
from fastguard.kernels.registry import BACKENDS

from cases import COMPLEX, DTYPES, LAYOUTS, NASTY, image, nasty

FACTORS = (0.3, 1 / 3, 2.0**-16, 1e-5, 3.0, -0.7, 0.0, float("nan"), float("inf"))
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(a, b):
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
def test_as_torch_multiplies(backend, dtype, factor):
    if dtype.is_complex:
        tensors = [torch.randn(n, dtype=dtype) for n in (0, 1, 33, 5000)]
    else:
        tensors = [nasty(value, dtype, 5000) for value in NASTY.values()]
        tensors += [torch.randn(n).mul(10.0 ** -(n % 9)).to(dtype) for n in (0, 1, 17, 4097, 70_001)]
    wanted = [(torch.view_as_real(t) if dtype.is_complex else t).clone().mul_(factor) for t in tensors]
    run_scale(tensors, factor, backend)
    for got, want in zip(tensors, wanted, strict=True):
        assert_same_bits(torch.view_as_real(got) if dtype.is_complex else got, want)


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("factor", FACTORS)
def test_every_float16_and_bfloat16_bit_pattern(backend, factor):
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        got = patterns.clone().view(dtype)
        want = got.clone().mul_(factor)
        run_scale([got], factor, backend)
        assert_same_bits(got, want)


@pytest.mark.thinned(n=3, interpreted=10)
@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if name not in ("expanded", "expanded scalar", "unfolded")]
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_layouts_touch_only_their_own_elements(backend, dtype, layout):
    base = image(dtype)
    if layout == "channels_last":
        base = base.to(memory_format=torch.channels_last)
    want = base.clone(memory_format=torch.preserve_format)
    LAYOUTS[layout](want).mul_(0.25)
    run_scale([LAYOUTS[layout](base)], 0.25, backend)
    assert_same_bits(base, want)


@pytest.mark.parametrize("layout", ["expanded", "expanded scalar", "unfolded"])
def test_a_tensor_that_overlaps_itself_is_refused_and_nothing_is_lost(backend, layout):
    base = image(torch.float32)
    kept, first = base.clone(), torch.ones(3)
    with pytest.raises(UnsupportedTensorError, match=r"`tensors\[1\]` cannot be scaled in place.*clone"):
        run_scale([first, LAYOUTS[layout](base)], 0.5, backend)
    assert torch.equal(base, kept)
    assert torch.equal(first, torch.ones(3))


def test_lazy_conjugates_and_negatives(backend):
    z = torch.randn(100, dtype=torch.complex64)
    want = z.clone() * 0.5
    run_scale([z.conj()], 0.5, backend)
    assert_same_bits(z, want)
    imaginary = z.conj().imag
    wanted = imaginary.clone() * 0.5
    run_scale([imaginary], 0.5, backend)
    assert torch.equal(z.conj().imag, wanted)


def test_autograd_is_told(backend):
    leaf = torch.randn(5, requires_grad=True)
    saved = leaf * 2
    loss = (saved**2).sum()
    run_scale([saved], 0.5, backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors(backend):
    with torch.inference_mode():
        tensor = torch.ones(3)
        run_scale([tensor], 2.0, backend)
        assert tensor.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn], ids=str)
def test_what_cannot_be_written_is_refused(backend, dtype):
    with pytest.raises(UnsupportedTensorError, match="got torch"):
        run_scale([torch.zeros(3).to(dtype)], 0.5, backend)


has_kernels = BACKENDS["cpu"].unavailable() is None
SIZES = (0, 1, 3, 2047, 2048, 2049, 65_536, 262_144 + 5, 1_000_003)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_and_no_other(dtype):
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


def test_what_does_not_lie_alike_goes_through_torch():
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
def test_parameters_are_written_without_a_word_to_autograd(dtype):
    to = torch.nn.Parameter(torch.zeros(5, dtype=dtype), requires_grad=dtype.is_floating_point)
    version, values = to._version, torch.arange(5).to(dtype).requires_grad_(dtype.is_floating_point)
    with torch.no_grad():
        run_copy([to], [values])
    assert torch.equal(to.detach(), values.detach()) and to._version == version and to.is_leaf


@pytest.mark.skipif(not has_kernels, reason="no C++ kernels")
def test_memory_that_was_given_up_is_not_read():
    gone = torch.randn(64)
    gone.untyped_storage().resize_(0)
    assert cpu.extension.copy([torch.zeros(64)], [gone], 1) == [0]


NEGATIVES = {
    "0-dim": lambda: torch.tensor(1 + 2j).conj().imag,
    "one element": lambda: torch.randn(1, dtype=torch.complex64).conj().imag,
    "dense": lambda: torch._neg_view(torch.randn(500)),
    "as_strided": lambda: torch.randn(40, dtype=torch.complex64).conj().imag.as_strided((20,), (1,)),
    "transposed": lambda: torch._neg_view(torch.randn(20, 30)).t(),
    "complex": lambda: torch._neg_view(torch.randn(30, dtype=torch.complex128)),
    "float64": lambda: torch._neg_view(torch.rand(3000, dtype=torch.float64)),
    "half": lambda: torch._neg_view(torch.rand(300).half()),
}


@pytest.mark.thinned(interpreted=9)
@pytest.mark.parametrize("make", NEGATIVES.values(), ids=NEGATIVES)
def test_lazy_negatives_have_the_sign_that_torch_shows(backend, make):
    tensor = make()
    assert tensor.is_neg()
    row = tensor_stats([torch.ones(3), tensor], backend=backend)[1]
    resolved = tensor.resolve_neg()
    values = torch.view_as_real(resolved) if resolved.is_complex() else resolved
    assert row.sum == pytest.approx(float(values.double().sum()), rel=1e-5, abs=1e-5)
    assert row.sum != 0.0
    if not tensor.is_complex():
        stats = activation_stats(tensor, backend=backend)
        assert (stats.min_val, stats.max_val) == (float(values.min()), float(values.max()))
        scaled = 2 * values
        run_scale([tensor], 2.0, backend)
        assert torch.equal(tensor.resolve_neg(), scaled)


def test_float8_negatives(backend):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = torch.randn(50).to(dtype)
        row = tensor_stats([torch._neg_view(values)], backend=backend)[0]
        assert row.sum == pytest.approx(-float(values.double().sum()), rel=1e-6)


def freed(offset, left_bytes=0, shown_as=lambda x: x):
    flat = torch.randn(100_000)
    view = shown_as(flat[offset : offset + 60])
    flat.untyped_storage().resize_(left_bytes)
    return view


@pytest.mark.parametrize(("offset", "left"), [(0, 0), (6, 0), (90_000, 0), (0, 100), (6, 100), (90_000, 360_100)])
def test_a_storage_that_was_freed_or_cut_short_is_refused(backend, offset, left):
    good = torch.ones(3)
    message = "must hold data, got a tensor whose storage was freed or cut short"
    for call in (
        lambda x: tensor_stats([good, x], backend=backend),
        lambda x: run_scale([good, x], 2.0, backend),
        lambda x: activation_stats(x, backend=backend),
    ):
        with pytest.raises(UnsupportedTensorError, match=message):
            call(freed(offset, left))
    for shown_as in (lambda x: x.view(6, 10).t()[::2], lambda x: torch.view_as_complex(x.view(30, 2)), torch._neg_view):
        with pytest.raises(UnsupportedTensorError, match=message):
            tensor_stats([freed(offset, left, shown_as)], backend=backend)
    assert torch.equal(good, torch.ones(3))
    assert tensor_stats([freed(0, 240)], backend=backend)[0].numel == 60  # just enough


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1).expand(2**53 + 1),
        lambda: torch.ones(1).expand(2**62),
        lambda: torch.ones(1, dtype=torch.complex64).expand(2**62),
        lambda: torch.ones(1, dtype=torch.complex64).expand(2**53),
        lambda: torch.ones(1, 1).expand(2**31, 2**31).unsqueeze(0),
    ],
)
def test_more_elements_than_can_be_counted_are_refused(backend, make):
    with pytest.raises(UnsupportedTensorError, match=r"must have at most 2\^53 elements, got shape"):
        tensor_stats([make()], backend=backend)
    if not make().is_complex():
        with pytest.raises(UnsupportedTensorError, match="at most"):
            activation_stats(make(), backend=backend)
