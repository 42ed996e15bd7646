"""clip_gradients: copies of tensors and ndarrays, clipped by torch's formula."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

import fastguard

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def by_torch(gradients: list[torch.Tensor], max_norm: float) -> tuple[list[torch.Tensor], float]:
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return [p.grad for p in parameters], float(norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0, math.inf])
def test_as_torch_clips(dtype, max_norm):
    gradients = [torch.randn(s, dtype=dtype) for s in [(3, 5), (), (0,), (4, 3, 2, 2)]]
    gradients.append(torch.randn(6, 4, dtype=dtype).t()[::2])
    originals = copy.deepcopy(gradients)
    clipped, norm = fastguard.clip_gradients(gradients, max_norm)
    expected, expected_norm = by_torch(gradients, max_norm)
    eps = torch.finfo(dtype).eps
    assert isinstance(norm, float) and norm == pytest.approx(expected_norm, rel=4 * eps)
    for g, original, c, e in zip(gradients, originals, clipped, expected, strict=True):
        assert torch.equal(g, original) and (c.dtype, c.shape) == (g.dtype, g.shape)
        torch.testing.assert_close(c, e, rtol=8 * eps, atol=0)
        assert c.numel() == 0 or c.data_ptr() != g.data_ptr()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex128])
def test_arrays_stay_arrays(dtype):
    base = np.arange(-12, 12).reshape(4, 6).astype(dtype)
    gradients = [base, base[::-1, ::2], np.asfortranarray(base), np.ones((), dtype)]
    gradients[0].flags.writeable = False
    originals = [g.copy() for g in gradients]
    clipped, norm = fastguard.clip_gradients(gradients, max_norm=1.0)
    true = math.sqrt(sum(float((np.abs(g.astype(np.complex128)) ** 2).sum()) for g in gradients))
    assert norm == pytest.approx(true, rel=1e-6)
    for g, original, c in zip(gradients, originals, clipped, strict=True):
        assert type(c) is np.ndarray and c.dtype == dtype and c.shape == g.shape
        assert np.array_equal(g, original) and not np.shares_memory(c, g)
        np.testing.assert_allclose(c, g / (true + 1e-6), rtol=2 * float(np.finfo(dtype).eps))
    assert math.sqrt(sum(float((np.abs(c.astype(np.complex128)) ** 2).sum()) for c in clipped)) == pytest.approx(
        1.0, rel=1e-3
    )


def test_containers():
    g = torch.tensor([3.0, 4.0])
    assert fastguard.clip_gradients(g, 5.0)[0].tolist() == pytest.approx([3.0, 4.0])
    assert fastguard.clip_gradients((g, None))[0][1] is None and isinstance(fastguard.clip_gradients((g,))[0], tuple)
    clipped, norm = fastguard.clip_gradients({"a": g, "b": None, "c": g.numpy()}, max_norm=1.0)
    assert list(clipped) == ["a", "b", "c"] and clipped["b"] is None and isinstance(clipped["c"], np.ndarray)
    assert norm == pytest.approx(math.sqrt(50))
    assert fastguard.clip_gradients(np.array([3.0, 4.0]))[1] == 5.0
    assert fastguard.clip_gradients([]) == ([], 0.0)
    assert fastguard.clip_gradients(x for x in [g])[1] == 5.0


def test_new_memory_also_when_nothing_is_clipped():
    g, a = torch.ones(2), np.ones(2)
    clipped, _ = fastguard.clip_gradients([g, a], max_norm=100.0)
    clipped[0][0] = clipped[1][0] = 7.0
    assert g.tolist() == a.tolist() == [1.0, 1.0]


def test_tensors_that_require_gradients_and_sparse_ones():
    p = torch.tensor([3.0, 4.0], requires_grad=True)
    (clipped,), norm = fastguard.clip_gradients([p * 1], max_norm=1.0)
    assert norm == 5.0 and not clipped.requires_grad
    sparse = torch.sparse_coo_tensor([[0, 2, 0]], [1.0, 4.0, 2.0], (3,), check_invariants=True)
    (clipped,), norm = fastguard.clip_gradients([sparse], max_norm=1.0)
    assert norm == 5.0 and clipped.is_sparse
    assert clipped.to_dense().tolist() == pytest.approx([0.6, 0.0, 0.8])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_as_torch(bad):
    gradients = [torch.tensor([1.0, bad]), torch.tensor([2.0])]
    clipped, norm = fastguard.clip_gradients(gradients)
    expected, expected_norm = by_torch(gradients, 1.0)
    assert norm == expected_norm or (math.isnan(norm) and math.isnan(expected_norm))
    for c, e in zip(clipped, expected, strict=True):
        torch.testing.assert_close(c, e, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("gradients", "problem"),
    [
        ([np.arange(3)], r"`gradients\[0\]` must be float16, .* got torch.int64"),
        ([None, "text"], r"`gradients\[1\]` must be a torch\.Tensor or a numpy\.ndarray, got str"),
        ([np.float32(3.0)], "must be a torch.Tensor or a numpy.ndarray, got float32"),
        ([np.ones(2, dtype=">f4")], "must be of a dtype that torch has"),
        ([torch.ones(2), torch.ones(2, device="meta")], r"`gradients\[1\]` must hold data"),
        (3.0, "`gradients` must be tensors or arrays, got float"),
    ],
)
def test_what_is_no_gradient(gradients, problem):
    with pytest.raises(TypeError, match=problem):
        fastguard.clip_gradients(gradients)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, True])
def test_limits_that_are_none(max_norm):
    with pytest.raises(ValueError, match="`max_norm` must be >= 0, got "):
        fastguard.clip_gradients([torch.ones(2)], max_norm)
