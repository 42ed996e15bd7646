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


def test_meta_tensors_are_left_to_torch() -> None:
    norm = fastguard.get_total_norm([torch.zeros(3, device="meta")])
    assert norm.is_meta and norm.shape == ()
