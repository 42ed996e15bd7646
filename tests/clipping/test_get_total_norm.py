"""`fastguard.get_total_norm` against `torch.nn.utils.get_total_norm`, and the policy `GlobalNorm`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_rivals import SHAPES, compare, make_gradients, outcome, true_norm

import fastguard
from fastguard.clip import limits_of

FULL = [s for s in SHAPES if s != (0,)]


def assert_as_torch(tensors: Any, *args: Any, rtol: float | None = None, **kwargs: Any) -> Any:
    expected, expected_warnings = outcome(torch.nn.utils.get_total_norm, tensors, *args, **kwargs)
    got, got_warnings = outcome(fastguard.get_total_norm, tensors, *args, **kwargs)
    assert got_warnings == expected_warnings
    compare(got, expected, rtol)
    return got


@pytest.mark.parametrize("norm_type", [0.5, 1, 1.5, 2, 4, 0, math.inf, -math.inf, "2", "inf"])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_every_order_of_norm(norm_type: Any, foreach: bool | None) -> None:
    assert_as_torch(make_gradients(FULL), norm_type, foreach=foreach)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    ids=str,
)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensors = make_gradients(SHAPES, dtype)
    norm = assert_as_torch(tensors)
    real = dtype.to_real() if dtype.is_complex else dtype
    assert norm == torch.tensor(true_norm(tensors), dtype=real)  # the exact norm, rounded once


def test_mixed_dtypes() -> None:
    half, single, brain = (make_gradients([(9,)], t)[0] for t in (torch.float16, torch.float32, torch.bfloat16))
    assert assert_as_torch([half, single], rtol=2e-3).dtype == torch.float32
    assert assert_as_torch([half, brain], rtol=2e-2).dtype == torch.float32
    assert assert_as_torch([half, single.double()], rtol=2e-3).dtype == torch.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
@pytest.mark.parametrize("error_if_nonfinite", [False, True])
def test_values_that_are_not_finite(bad: float, norm_type: float, error_if_nonfinite: bool) -> None:
    tensors = make_gradients(FULL)
    tensors[0][3, 3] = bad
    if not error_if_nonfinite:
        assert_as_torch(tensors, norm_type)
        return
    with pytest.raises(RuntimeError, match=rf"total norm of order {float(norm_type)} for gradients .* is non-finite"):
        fastguard.get_total_norm(tensors, norm_type, error_if_nonfinite=True)


def test_nothing() -> None:
    for nothing in ([], (), (t for t in [])):
        norm = fastguard.get_total_norm(nothing)
        assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())
    assert_as_torch([])
    assert_as_torch([torch.empty(0)])
    assert_as_torch([torch.empty(0, dtype=torch.float64), torch.ones(2, dtype=torch.float64)])


def test_a_single_tensor_counts_as_a_list_of_one() -> None:
    assert fastguard.get_total_norm(torch.full((3, 3), 2.0)).item() == 6.0
    assert_as_torch(torch.tensor(-3.0))


def test_a_generator_is_read_once() -> None:
    assert fastguard.get_total_norm(t for t in [torch.tensor([3.0]), torch.tensor([4.0])]).item() == 5.0


@pytest.mark.parametrize(
    "tensors",
    [[torch.ones(2, dtype=torch.int64)], [torch.eye(2).to_sparse()], [None], [torch.ones(1), None]],
    ids=["integers", "sparse", "none", "one-none"],
)
def test_what_torch_refuses_is_refused_alike(tensors: Sequence[Any]) -> None:
    kind, _ = outcome(fastguard.get_total_norm, tensors)[0]
    assert kind is outcome(torch.nn.utils.get_total_norm, tensors)[0][0]


def test_tensors_are_only_read() -> None:
    tensors = make_gradients()
    before = [(t.clone(), t._version) for t in tensors]
    fastguard.get_total_norm(tensors)
    assert all(torch.equal(t, b) and t._version == version for t, (b, version) in zip(tensors, before, strict=True))


def test_parameters_have_a_norm_without_a_graph() -> None:
    p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    norm = fastguard.get_total_norm([p, p * 2])
    assert norm.item() == pytest.approx(math.sqrt(125.0))
    assert norm.grad_fn is None


@pytest.mark.skipif(
    not fastguard.backends()["cpu"].available,
    reason="only the compiled kernels promise it, and fastguard._C cannot be imported",
)
def test_results_do_not_depend_on_the_number_of_threads(threads) -> None:
    tensors = make_gradients([(600_001,), (7,), (1000, 33)])
    norms = []
    for count in (1, 2, 3):
        threads(count)
        norms.append(fastguard.get_total_norm([t.double() for t in tensors]).item())
    assert len(set(norms)) == 1


numbers = st.floats(-(2.0**60), 2.0**60, width=32)


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.lists(numbers, max_size=20), max_size=6))
def test_any_lists_of_numbers(values: list[list[float]]) -> None:
    tensors = [torch.tensor(v, dtype=torch.float32) for v in values]
    exact = true_norm(tensors)
    assert fastguard.get_total_norm(tensors).item() == pytest.approx(exact, rel=1e-6, abs=1.5e-45)


# --- the policy that `max_norm` is short for ---


@settings(max_examples=100, derandomize=True)
@given(st.floats(0, 1e300), st.floats(1e-300, 1e300))
def test_global_norm_is_torchs_formula(norm: float, max_norm: float) -> None:
    limits = limits_of(fastguard.GlobalNorm(max_norm))
    assert limits is not None
    coefficient = limits.apply(norm, (), None).coefficient
    assert coefficient == min(1.0, max_norm / (norm + 1e-6))
    assert 0.0 <= coefficient <= 1.0


def test_global_norm_says_what_it_is() -> None:
    policy = fastguard.GlobalNorm(2)
    assert repr(policy) == "GlobalNorm(2)"
    policy.load_state_dict(fastguard.GlobalNorm(5.0).state_dict())
    assert policy.max_norm == 2.0  # the limit of this run stays


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan, True, "1", None, torch.ones(1)])
def test_global_norm_needs_a_positive_number(max_norm: Any) -> None:
    with pytest.raises(ValueError, match=r"`max_norm` must be a number > 0, got .*Leave it out for no clipping"):
        fastguard.GlobalNorm(max_norm)


def test_meta_tensors_are_left_to_torch() -> None:
    norm = fastguard.get_total_norm([torch.zeros(3, device="meta")])
    assert norm.is_meta and norm.shape == ()
