"""`get_total_norm` against torch's, where ours is better on purpose, and clipping beside memory and autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_rivals import SHAPES, as_parameters, compare, copied, make_gradients, outcome, true_norm

import fastguard
from fastguard.clip import limits_of


def _versions(parameters: list[torch.nn.Parameter]) -> list[int]:
    return [p.grad._version for p in parameters]


def test_float16_whose_norm_overflows() -> None:
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


def test_the_coefficient_comes_from_the_accurate_norm() -> None:
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
def test_float32_at_its_ends(value: float) -> None:
    """The squares of these are no float32 any more; their norm is."""
    gradients = [torch.full((4,), value)]
    norm = fastguard.get_total_norm(gradients)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(true_norm(gradients), rel=1e-6)
    assert norm.item() > 0.0


def test_a_norm_beyond_float32_is_infinite_as_with_torch_but_clips() -> None:
    ours = as_parameters([torch.full((4,), 3e38)])
    assert fastguard.clip_grad_norm_(ours, 1.0).item() == math.inf
    torch.testing.assert_close(ours[0].grad, torch.full((4,), 0.5), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("norm_type", [2, 1, math.inf])
def test_clipping_bumps_versions(norm_type: float) -> None:
    parameters = as_parameters(make_gradients([(5, 5), (7,)]))
    before = _versions(parameters)
    fastguard.clip_grad_norm_(parameters, 0.01, norm_type)
    assert all(now > then for now, then in zip(_versions(parameters), before, strict=True))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_read_only_memory_will_do_where_nothing_is_clipped(tmp_path: Path) -> None:
    """The proof that nothing is written: a write to this memory would end the process."""
    values = make_gradients([(1000,)])[0]
    path = tmp_path / "gradients.bin"
    path.write_bytes(values.numpy().tobytes())
    parameters = as_parameters([torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r"))])
    norm = fastguard.clip_grad_norm_(parameters, 1e6)
    assert norm.item() == pytest.approx(true_norm([values]), rel=1e-6)
    assert torch.equal(parameters[0].grad, values)


@pytest.mark.parametrize("clips", [True, False])
def test_a_graph_through_clipped_gradients_fails_rather_than_go_on(clips: bool) -> None:
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


def test_gradients_that_require_grad_are_clipped_in_place() -> None:
    x = torch.nn.Parameter(torch.ones(2))
    x.grad = torch.tensor([3.0, 4.0], requires_grad=True)
    own = x.grad
    norm = fastguard.clip_grad_norm_([x], 1.0)
    assert not norm.requires_grad
    assert x.grad is own and own.requires_grad and own.is_leaf
    torch.testing.assert_close(own.detach(), torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0.0)


def assert_as_torch(tensors: Any, *args: Any, rtol: float | None = None, **kwargs: Any) -> Any:
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


@settings(max_examples=100, derandomize=True)
@given(st.floats(0, 1e300), st.floats(1e-300, 1e300))
def test_global_norm_is_torchs_formula(norm: float, max_norm: float) -> None:
    limits = limits_of(fastguard.GlobalNorm(max_norm))
    assert limits is not None
    coefficient = limits.apply(norm, (), None).coefficient
    assert coefficient == min(1.0, max_norm / (norm + 1e-6))
    assert 0.0 <= coefficient <= 1.0
