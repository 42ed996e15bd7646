"""Counts of floor(log2 |x|), and what other formats make of the numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fastguard
from fastguard import MagnitudeHistogram, UnsupportedTensorError, magnitude_histogram

from cases import DTYPES, LAYOUTS, SIZES, image
from truth import elements

pytestmark = pytest.mark.full_size


@pytest.fixture
def backend(backend: str) -> str:
    """On a GPU plain torch counts, by default: the Triton kernels do not."""
    return "auto" if backend == "triton" else backend


def expected(*tensors: torch.Tensor) -> MagnitudeHistogram:
    x = np.concatenate([elements(t) for t in tensors])
    nonzero = x[np.isfinite(x) & (x != 0)]
    exponents, counts = np.unique(np.frexp(nonzero)[1] - 1, return_counts=True)
    found = dict(zip(exponents.tolist(), counts.tolist(), strict=True))
    return MagnitudeHistogram(found, int((x == 0).sum()), int(np.isnan(x).sum()), int(np.isinf(x).sum()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(backend: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        tensor = (torch.randn(size, dtype=torch.float64) * 10.0 ** torch.randint(-12, 9, (size,))).to(dtype)
        assert magnitude_histogram([tensor], backend=backend) == expected(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend: str, layout: str) -> None:
    tensors = [LAYOUTS[layout](image(dtype)) for dtype in DTYPES]
    assert magnitude_histogram(tensors, backend=backend) == expected(*tensors)


def test_every_exponent(backend: str) -> None:
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    for tensor in (patterns.view(torch.float16), patterns.view(torch.bfloat16)):
        assert magnitude_histogram([tensor], backend=backend) == expected(tensor)
    singles = torch.tensor(np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32))
    doubles = torch.tensor(np.ldexp(1.0, np.arange(-1074, 1024)))
    for tensor in (singles, doubles):
        below = torch.nextafter(tensor, torch.full_like(tensor, math.inf))
        together = torch.cat([tensor, -tensor, below, torch.tensor([math.nan, math.inf, -0.0]).to(tensor.dtype)])
        assert magnitude_histogram([together], backend=backend) == expected(together)


def test_lists_of_all_kinds(backend: str) -> None:
    z = torch.randn(40, dtype=torch.complex64)
    assert magnitude_histogram([z, torch.zeros(3)], backend=backend) == expected(z, torch.zeros(3))
    assert magnitude_histogram([], backend=backend) == MagnitudeHistogram({})
    assert magnitude_histogram(torch.ones(3), backend=backend).counts == {0: 3}
    assert magnitude_histogram([np.full((2, 2), 4.0)], backend=backend).counts == {2: 4}
    assert magnitude_histogram(np.full((2, 2), 4.0), backend=backend).counts == {2: 4}
    with pytest.raises(UnsupportedTensorError, match=r"`tensors\[1\]` must be .* got torch.int64"):
        magnitude_histogram([torch.ones(2), torch.arange(3)], backend=backend)
    with pytest.raises(TypeError, match="`tensors` must be tensors, got int"):
        magnitude_histogram(3, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_ratios_are_those_of_a_conversion(backend: str, name: str) -> None:
    """Of numbers away from the powers of two within which a format's limits lie."""
    dtype = getattr(torch, name)
    exponents = torch.arange(-145.0, 127.0).repeat_interleave(4)
    values = (1 + torch.rand(exponents.shape) * 0.8) * 2.0 ** exponents.double()
    values = values.float()[exponents != fastguard.records.magnitudes.FORMATS[name].largest]
    found = magnitude_histogram([values], backend=backend)
    converted = values.to(dtype).float()
    # A conversion to float8 may saturate at the largest number instead of giving Inf or NaN.
    lost = ~converted.isfinite() | (converted == torch.finfo(dtype).max) & (values > torch.finfo(dtype).max)
    assert found.overflow_ratio(name) == pytest.approx(float(lost.double().mean()), abs=1e-12)
    assert found.underflow_ratio(name) == pytest.approx(float((converted == 0).double().mean()), abs=1e-12)
    small = (values < torch.finfo(dtype).smallest_normal) & (converted != 0)
    assert found.subnormal_ratio(name) == pytest.approx(float(small.double().mean()), abs=1e-12)


def test_ratios_of_nothing() -> None:
    empty = MagnitudeHistogram({}, num_zeros=4, num_nans=1, num_infs=2)
    assert (
        empty.underflow_ratio("float16") == empty.overflow_ratio("float16") == empty.subnormal_ratio("bfloat16") == 0.0
    )
    assert empty.total_elements == 7
    with pytest.raises(ValueError, match=r"`dtype` must be one of \[float64, .*\], got 'int8'"):
        empty.underflow_ratio("int8")
    with pytest.raises(ValueError, match="`counts` must have 2101 numbers, got 1"):
        MagnitudeHistogram.from_counts([0])
