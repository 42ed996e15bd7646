"""`get_total_norm` against torch's, where ours is better on purpose, and clipping beside memory and autograd."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_rivals import SHAPES, as_parameters, compare, copied, make_gradients, outcome, true_norm

import fastguard
from fastguard.clip import limits_of


def _versions(parameters):
    return [p.grad._version for p in parameters]


def test_float16_whose_norm_overflows():
    """torch's norm is Inf and its gradients are all 0; ours are what they should be."""
    gradients = [torch.full((1000,), 6e4, dtype=torch.float16)]
    theirs, ours = as_parameters(copied(gradients)), as_parameters(copied(gradients))
    assert torch.nn.utils.clip_grad_norm_(theirs, 100.0).isinf()
    assert not theirs[0].grad.any()

    norm = fastguard.clip_grad_norm_(ours, 100.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(true_norm(gradients), rel=1e-6)
    assert ours[0].grad.dtype == torch.float16
    expected = torch.full((1000,), 100.0 / math.sqrt(1000), dtype=torch.float64).half()
    torch.testing.assert_close(ours[0].grad, expected, rtol=1e-3, atol=0.0)


def test_the_coefficient_comes_from_the_accurate_norm():
    """torch puts its bfloat16 norm, 9.75 where 9.761 is true, into the coefficient; ours is rounded at the end only."""
    gradients = make_gradients([(95,)], torch.bfloat16)
    gradients[0].mul_(9.761 / true_norm(gradients))
    whole = copied(gradients)
    ours = as_parameters(gradients)
    norm = fastguard.clip_grad_norm_(ours, 1.0)
    assert norm.dtype == torch.bfloat16
    assert norm == torch.tensor(true_norm(whole), dtype=torch.bfloat16)
    expected = (whole[0].double() / (true_norm(whole) + 1e-6)).bfloat16()
    assert torch.equal(ours[0].grad, expected)


@pytest.mark.parametrize("value", [1.5e38, 1e-30, 1e-42])
def test_float32_at_its_ends(value):
    """The squares of these are no float32 any more; their norm is."""
    gradients = [torch.full((4,), value)]
    norm = fastguard.get_total_norm(gradients)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(true_norm(gradients), rel=1e-6)
    assert norm.item() > 0.0


def test_a_norm_beyond_float32_is_infinite_as_with_torch_but_clips():
    ours = as_parameters([torch.full((4,), 3e38)])
    assert fastguard.clip_grad_norm_(ours, 1.0).item() == math.inf
    torch.testing.assert_close(ours[0].grad, torch.full((4,), 0.5), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("norm_type", [2, 1, math.inf])
def test_clipping_bumps_versions(norm_type):
    parameters = as_parameters(make_gradients([(5, 5), (7,)]))
    before = _versions(parameters)
    fastguard.clip_grad_norm_(parameters, 0.01, norm_type)
    assert all(now > then for now, then in zip(_versions(parameters), before, strict=True))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_read_only_memory_will_do_where_nothing_is_clipped(tmp_path):
    """The proof that nothing is written: a write to this memory would end the process."""
    values = make_gradients([(1000,)])[0]
    path = tmp_path / "gradients.bin"
    path.write_bytes(values.numpy().tobytes())
    parameters = as_parameters([torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r"))])
    norm = fastguard.clip_grad_norm_(parameters, 1e6)
    assert norm.item() == pytest.approx(true_norm([values]), rel=1e-6)
    assert torch.equal(parameters[0].grad, values)


@pytest.mark.parametrize("clips", [True, False])
def test_a_graph_through_clipped_gradients_fails_rather_than_go_on(clips):
    x = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    x.grad = gradient
    penalty = gradient.square().sum()
    fastguard.clip_grad_norm_([x], 0.1 if clips else 1e6)
    if clips:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()
    else:
        (second,) = torch.autograd.grad(penalty, x)
        torch.testing.assert_close(second, 36.0 * torch.tensor([8.0, 27.0]))


def test_gradients_that_require_grad_are_clipped_in_place():
    x = torch.nn.Parameter(torch.ones(2))
    x.grad = torch.tensor([3.0, 4.0], requires_grad=True)
    own = x.grad
    norm = fastguard.clip_grad_norm_([x], 1.0)
    assert not norm.requires_grad
    assert x.grad is own and own.requires_grad and own.is_leaf
    torch.testing.assert_close(own.detach(), torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0.0)


def assert_as_torch(tensors, *args, rtol=None, **kwargs):
    expected, expected_warnings = outcome(torch.nn.utils.get_total_norm, tensors, *args, **kwargs)
    got, got_warnings = outcome(fastguard.get_total_norm, tensors, *args, **kwargs)
    assert got_warnings == expected_warnings
    compare(got, expected, rtol)
    return got


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    ids=str,
)
def test_every_dtype(dtype):
    tensors = make_gradients(SHAPES, dtype)
    norm = assert_as_torch(tensors)
    real = dtype.to_real() if dtype.is_complex else dtype
    assert norm == torch.tensor(true_norm(tensors), dtype=real)  # the exact norm, rounded once


def test_nothing():
    for nothing in ([], (), (t for t in [])):
        norm = fastguard.get_total_norm(nothing)
        assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())
    assert_as_torch([])
    assert_as_torch([torch.empty(0)])
    assert_as_torch([torch.empty(0, dtype=torch.float64), torch.ones(2, dtype=torch.float64)])


def test_a_single_tensor_counts_as_a_list_of_one():
    assert fastguard.get_total_norm(torch.full((3, 3), 2.0)).item() == 6.0
    assert_as_torch(torch.tensor(-3.0))


@pytest.mark.parametrize(
    "tensors",
    [[torch.ones(2, dtype=torch.int64)], [torch.eye(2).to_sparse()], [None], [torch.ones(1), None]],
    ids=["integers", "sparse", "none", "one-none"],
)
def test_what_torch_refuses_is_refused_alike(tensors):
    kind, _ = outcome(fastguard.get_total_norm, tensors)[0]
    assert kind is outcome(torch.nn.utils.get_total_norm, tensors)[0][0]


def test_tensors_are_only_read():
    tensors = make_gradients()
    before = [(t.clone(), t._version) for t in tensors]
    fastguard.get_total_norm(tensors)
    assert all(torch.equal(t, b) and t._version == version for t, (b, version) in zip(tensors, before, strict=True))


numbers = st.floats(-(2.0**60), 2.0**60, width=32)


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.lists(numbers, max_size=20), max_size=6))
def test_any_lists_of_numbers(values):
    tensors = [torch.tensor(v, dtype=torch.float32) for v in values]
    exact = true_norm(tensors)
    assert fastguard.get_total_norm(tensors).item() == pytest.approx(exact, rel=1e-6, abs=1.5e-45)


@settings(max_examples=100, derandomize=True)
@given(st.floats(0, 1e300), st.floats(1e-300, 1e300))
def test_global_norm_is_torchs_formula(norm, max_norm):
    limits = limits_of(fastguard.GlobalNorm(max_norm))
    assert limits is not None
    coefficient = limits.apply(norm, (), None).coefficient
    assert coefficient == min(1.0, max_norm / (norm + 1e-6))
    assert 0.0 <= coefficient <= 1.0


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def by_torch(gradients, max_norm):
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
