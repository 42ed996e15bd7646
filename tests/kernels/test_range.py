"""Spreads beside a large mean, and norms of float64 whose squares leave its range."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fastguard import tensor_stats
from fastguard.kernels import resolve_backend, run_stats
from fastguard.records import TensorStats

SIZES = (5e-324, 1e-310, 1e-300, 1e-200, 1e-170, 1e-160, 1e-150, 1e150, 1e154, 1e160, 1e200, 1e300)


def exact_std(values: np.ndarray) -> float:
    """With the mean in twice the digits, as float64 alone has none to spare."""
    shifted = values - values[0]
    mean = math.fsum(shifted) / len(shifted)
    return math.sqrt(math.fsum((shifted - mean) ** 2) / len(shifted))


@pytest.mark.thinned(interpreted=6)
@pytest.mark.parametrize(
    ("mean", "spread", "dtype", "tolerance"),
    [
        (1e9, 1.0, torch.float64, 1e-6),
        (1.0, 1e-9, torch.float64, 1e-4),  # of a sum of 70 000 ones float64 has 1e-12 to spare
        (-3e150, 1e147, torch.float64, 1e-6),
        (1e4, 1e-2, torch.float32, 1e-5),
        (-300.0, 1.0, torch.bfloat16, 1e-6),
    ],
)
def test_std_does_not_cancel(backend: str, mean: float, spread: float, dtype: torch.dtype, tolerance: float) -> None:
    parts = [(mean + spread * torch.randn(n, dtype=torch.float64)).to(dtype) for n in (3, 100, 5000, 70_001)]
    stats = tensor_stats(parts, backend=backend)
    for row, part in zip(stats, parts, strict=True):
        assert row.std == pytest.approx(exact_std(part.double().cpu().numpy()), rel=tolerance), len(part)
    whole = torch.cat(parts).double().cpu().numpy()
    assert stats.total().std == pytest.approx(exact_std(whole), rel=tolerance)


def test_std_of_groups_with_different_means(backend: str) -> None:
    parts = [torch.full((n,), float(value)) for n, value in ((10, 1.0), (5000, 1.0), (70_000, 3.0), (4, 2.0))]
    stats = tensor_stats(parts, backend=backend)
    assert [row.std for row in stats] == [0.0] * 4
    assert stats.total().std == pytest.approx(torch.cat(parts).double().std(correction=0).item(), rel=1e-12)


def test_std_leaves_out_what_is_not_finite(backend: str) -> None:
    x = torch.randn(9000, dtype=torch.float64) + 1e8
    x[::1000], x[7] = math.nan, -math.inf
    finite = x[x.isfinite()].cpu().numpy()
    assert tensor_stats([x], backend=backend)[0].std == pytest.approx(exact_std(finite), rel=1e-7)
    assert tensor_stats([x.float() * 1e-30], backend=backend)[0].std <= 1e-29


@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize("size", [pytest.param(s, marks=pytest.mark.slow) if i % 4 else s for i, s in enumerate(SIZES)])
def test_norms_of_any_magnitude(backend: str, size: float) -> None:
    tensors = [torch.randn(n, dtype=torch.float64) * size for n in (1, 3, 4097, 70_001)]
    tensors.append((torch.randn(30, 40, dtype=torch.float64) * size)[:, ::3])
    tensors.append(torch.randn(9, dtype=torch.complex128) * size)
    host = [torch.view_as_real(t).cpu() if t.is_complex() else t.cpu() for t in tensors]
    shares = [t / size for t in host]  # a GPU would multiply by 1 / size, which may be Inf
    stats = tensor_stats(tensors, backend=backend)
    for row, share in zip(stats, shares, strict=True):
        assert row.norm == pytest.approx(float(share.norm()) * size, rel=1e-12, abs=5e-324)
        assert row.is_finite
    total = math.sqrt(math.fsum(float(share.norm()) ** 2 for share in shares)) * size
    assert stats.total().norm == pytest.approx(total, rel=1e-12, abs=5e-324)
    std = torch.cat([share.reshape(-1) for share in shares]).std(correction=0).item() * size
    assert stats.total().std == pytest.approx(std, rel=1e-9, abs=1e-323)


def test_norms_of_tensors_of_all_magnitudes_together(backend: str) -> None:
    tensors = [torch.tensor([size], dtype=torch.float64) for size in (1e-300, 1e-170, 3.0, 4.0)]
    assert tensor_stats(tensors, backend=backend).total().norm == 5.0
    tensors += [torch.tensor([3e200, 1.0], dtype=torch.float64), torch.tensor([4e200], dtype=torch.float64)]
    assert tensor_stats(tensors, backend=backend).total().norm == pytest.approx(5e200, rel=1e-15)
    assert tensor_stats([torch.full((9,), 1.7e308, dtype=torch.float64)], backend=backend)[0].norm == math.inf


def test_non_finite_elements_among_extremes(backend: str) -> None:
    x = torch.tensor([3e-200, math.inf, 4e-200], dtype=torch.float64)
    row = tensor_stats([x], backend=backend)[0]
    assert (row.norm, row.num_infs) == (math.inf, 1)
    assert row.finite_norm == pytest.approx(5e-200, rel=1e-15, abs=0)


def test_unscaling_multiplies_norms_of_any_magnitude(backend: str) -> None:
    x = [torch.tensor([3e-150, 4e-150], dtype=torch.float64)]
    table, _ = run_stats(x, resolve_backend(backend), 1e-20)
    assert TensorStats(table)[0].norm == pytest.approx(5e-170, rel=1e-12, abs=0)
