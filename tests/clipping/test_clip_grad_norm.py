"""`fastguard.clip_grad_norm_` against `torch.nn.utils.clip_grad_norm_`, for every argument."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch_rivals import (
    SHAPES,
    as_parameters,
    assert_as_torch,
    copied,
    make_gradients,
    outcome,
    true_norm,
)

import fastguard

NORM_TYPES = [0.5, 1, 1.5, 2, 2.0, 4, 0, math.inf, -math.inf, "2", "inf", "1.5"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
# What has a norm of any order: an empty tensor has no largest element.
FULL = [s for s in SHAPES if s != (0,)]


def test_the_signature_is_torchs() -> None:
    for name in ("clip_grad_norm_", "get_total_norm"):
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (fastguard, torch.nn.utils))
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_every_order_of_norm(norm_type: Any, foreach: bool | None, max_norm: float) -> None:
    assert_as_torch(make_gradients(FULL), max_norm, norm_type, foreach=foreach)


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e4])
def test_every_dtype(dtype: torch.dtype, foreach: bool | None, max_norm: float) -> None:
    norm = assert_as_torch(make_gradients(SHAPES, dtype), max_norm, foreach=foreach)
    assert norm.dtype == (dtype.to_real() if dtype.is_complex else dtype)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float64),
        (torch.float16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64, torch.float16),
        (torch.complex64, torch.float32),
        (torch.complex64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_mixed_dtypes(dtypes: tuple[torch.dtype, ...], max_norm: float) -> None:
    gradients = [make_gradients([(17, 3)], dtype, seed=i)[0] for i, dtype in enumerate(dtypes)]
    assert_as_torch(gradients, max_norm, rtol=2e-2 if torch.bfloat16 in dtypes else 4e-3)


@pytest.mark.parametrize("max_norm", [-1.0, 0, 0.0, 5, math.inf, -math.inf, math.nan, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_max_norm(max_norm: float, as_tensor: bool) -> None:
    """As torch: a negative one reverses gradients, NaN poisons them, inf leaves them alone."""
    assert_as_torch(make_gradients(), torch.tensor(float(max_norm)) if as_tensor else max_norm)


@pytest.mark.thinned(n=4)
@pytest.mark.parametrize("error_if_nonfinite", [False, True])
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [0.5, 1, 2, 4, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_gradients_that_are_not_finite(
    bad: float, norm_type: float, foreach: bool | None, error_if_nonfinite: bool, max_norm: float
) -> None:
    """Same poison as torch: one NaN makes all NaN, one Inf makes itself NaN and the rest 0."""
    gradients = make_gradients(FULL)
    gradients[2].view(-1)[100] = bad
    before = copied(gradients)
    theirs, ours = as_parameters(copied(gradients)), as_parameters(gradients)
    expected, _ = outcome(torch.nn.utils.clip_grad_norm_, theirs, max_norm, norm_type, error_if_nonfinite, foreach)
    got, _ = outcome(fastguard.clip_grad_norm_, ours, max_norm, norm_type, error_if_nonfinite, foreach)
    if error_if_nonfinite:
        assert got[0] is expected[0] is RuntimeError
        order = f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite"
        assert got[1].startswith(order) and expected[1].startswith(order)
        assert "set `error_if_nonfinite=False`" in got[1]
        for p, gradient in zip(ours, before, strict=True):  # and nothing was touched
            torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0, equal_nan=True)
        return
    torch.testing.assert_close(got, expected, equal_nan=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)
        assert torch.equal(a.grad.isnan(), b.grad.isnan())


def test_nan_and_inf_together() -> None:
    gradients = make_gradients()
    gradients[0][0, 0], gradients[2][0, 0] = math.inf, math.nan
    assert math.isnan(assert_as_torch(gradients, 1.0))


def test_a_norm_that_is_finite_is_no_error() -> None:
    for norm_type in (0.5, 1, 2, 4, math.inf):
        assert_as_torch(make_gradients(FULL), 1.0, norm_type, error_if_nonfinite=True)


# --- what it is given ---


def test_parameters_in_every_form() -> None:
    gradients = make_gradients()
    expected = true_norm(gradients)

    class Parameters:
        def __iter__(self) -> Iterator[nn.Parameter]:
            return iter(as_parameters(copied(gradients)))

    forms: list[Any] = [
        as_parameters(copied(gradients)),
        tuple(as_parameters(copied(gradients))),
        (p for p in as_parameters(copied(gradients))),
        dict.fromkeys(as_parameters(copied(gradients))),
        Parameters(),
        nn.ParameterList(as_parameters(copied(gradients))),
    ]
    for parameters in forms:
        assert fastguard.clip_grad_norm_(parameters, 1e9).item() == pytest.approx(expected, rel=1e-6)


def test_a_single_tensor() -> None:
    theirs, ours = as_parameters([torch.ones(20)]), as_parameters([torch.ones(20)])
    expected = torch.nn.utils.clip_grad_norm_(theirs[0], 1.0)
    assert torch.equal(fastguard.clip_grad_norm_(ours[0], 1.0), expected)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("empty", [[], [None], [None, None]], ids=["no-parameters", "no-gradient", "no-gradients"])
@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_nothing_to_clip(empty: list[None], norm_type: float, foreach: bool | None) -> None:
    assert assert_as_torch(empty, 1.0, norm_type, foreach=foreach).item() == 0.0


def test_an_empty_generator_warns_where_it_was_passed() -> None:
    with pytest.warns(UserWarning, match="`parameters` is an empty generator, no gradient clipping will occur") as seen:
        norm = fastguard.clip_grad_norm_((p for p in []), 1.0)
    assert norm.item() == 0.0
    assert [w.filename for w in seen] == [__file__]
    if "empty generator" not in inspect.getsource(torch.nn.utils.clip_grad):
        return  # torch 2.6 says nothing
    with pytest.warns(UserWarning, match="empty generator"):  # torch, too
        torch.nn.utils.clip_grad_norm_((p for p in []), 1.0)


def test_missing_gradients_are_left_out() -> None:
    first, second = make_gradients([(5, 2), (7,)])
    assert_as_torch([None, first, None, second, None], 0.5)


@pytest.mark.parametrize("gradient", [torch.zeros(3), torch.zeros(0), torch.zeros(())], ids=["zeros", "empty", "0-dim"])
@pytest.mark.parametrize("max_norm", [1.0, 0.0])
def test_a_norm_of_zero(gradient: torch.Tensor, max_norm: float) -> None:
    assert assert_as_torch([gradient], max_norm).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_every_layout(dtype: torch.dtype, max_norm: float) -> None:
    base = make_gradients([(6, 8, 4, 4)], dtype)[0]
    gradients = [
        base.to(memory_format=torch.channels_last),
        base[:, ::2],
        base.transpose(0, 3),
        base.flatten()[5:],
        torch.as_strided(base.flatten().clone(), (3, 5), (1, 7), 2),
    ]
    assert_as_torch(gradients, max_norm)


def test_only_the_view_is_scaled() -> None:
    base = torch.ones(10)
    p = as_parameters([base[2:8:2]])[0]
    fastguard.clip_grad_norm_([p], 0.1)
    assert torch.equal(base != 1.0, torch.tensor([0, 0, 1, 0, 1, 0, 1, 0, 0, 0], dtype=torch.bool))


@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_expanded_gradients(max_norm: float) -> None:
    """Several indices over one memory location: they can be read, and torch too refuses to write them."""
    gradient = torch.ones(1).expand(16)
    ours = as_parameters([gradient])
    if max_norm == 1e4:
        assert fastguard.clip_grad_norm_(ours, max_norm).item() == 4.0  # torch raises even here: it always writes
        return
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.nn.utils.clip_grad_norm_(as_parameters([torch.ones(1).expand(16)]), max_norm)
    with pytest.raises(fastguard.UnsupportedTensorError, match=r"share one memory location \(expanded\?\)"):
        fastguard.clip_grad_norm_(ours, max_norm)
    assert torch.equal(gradient, torch.ones(16))


def test_sparse_gradients_fail_as_with_torch() -> None:
    p = nn.Parameter(torch.zeros(3, 3))
    p.grad = torch.eye(3).to_sparse()
    expected, _ = outcome(torch.nn.utils.clip_grad_norm_, [p], 1.0)
    got, _ = outcome(fastguard.clip_grad_norm_, [p], 1.0)
    assert got == expected
    assert got[0] is NotImplementedError


def test_subclasses_go_through_torch() -> None:
    """A tensor subclass has rules of its own: DTensor's norm is a reduction over ranks."""
    calls = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.full((4,), 3.0).as_subclass(Logged)
    assert fastguard.clip_grad_norm_([p], 1.0, foreach=False).item() == 6.0
    assert "linalg_vector_norm" in calls or "vector_norm" in calls
    torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), torch.full((4,), 0.5), rtol=1e-5, atol=0)


def test_shared_gradients_count_and_scale_as_often_as_they_are_listed() -> None:
    theirs, ours = (as_parameters([torch.full((9,), 2.0)]) * 2 for _ in range(2))
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(fastguard.clip_grad_norm_(ours, 1.0), expected)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-6, atol=0.0)


def test_many_tensors_of_one_element() -> None:
    assert_as_torch(make_gradients([()] * 500), 1.0)


def test_a_module_after_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))
    model(torch.randn(4, 10)).square().sum().backward()
    assert_as_torch([p.grad for p in model.parameters()], 0.01)


# --- scenarios of PyTorch's own tests of the function, told anew ---


@pytest.mark.parametrize("norm_type", [0.5, 1.5, 2.0, 4.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_reaches_the_limit_and_keeps_the_direction(norm_type: float, foreach: bool) -> None:
    gradients = [torch.arange(1.0, 101).view(10, 10), torch.ones(10).div(1000)]
    limit = 2.0
    whole = copied(gradients)
    parameters = as_parameters(gradients)
    before = float(torch.nn.utils.get_total_norm(whole, norm_type))
    norm = fastguard.clip_grad_norm_(parameters, limit, norm_type=norm_type, foreach=foreach)
    assert norm.item() == pytest.approx(before, rel=1e-5)
    after = float(torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type))
    assert after <= limit * (1 + 1e-5) and after == pytest.approx(limit, rel=1e-4)
    ratios = torch.cat([(p.grad / w).flatten() for p, w in zip(parameters, whole, strict=True)])
    assert float(ratios.std()) < 1e-7


def test_small_gradients_are_left_alone() -> None:
    gradients = [torch.rand(10, 10).div(10000), torch.ones(10).div(500)]
    whole = copied(gradients)
    norm = fastguard.clip_grad_norm_(as_parameters(gradients), 2.0)
    assert norm.item() < 2.0
    assert all(torch.equal(g, w) for g, w in zip(gradients, whole, strict=True))


def test_the_norm_is_computed_once_for_all_parameters() -> None:
    norm = fastguard.clip_grad_norm_(as_parameters([torch.full((9,), 1.0), torch.full((16,), 1.0)]), 1e3)
    assert norm.item() == 5.0


def test_clipped_in_one_list_and_in_parts_differ() -> None:
    together = as_parameters([torch.full((4,), 3.0), torch.full((4,), 4.0)])
    apart = as_parameters([torch.full((4,), 3.0), torch.full((4,), 4.0)])
    fastguard.clip_grad_norm_(together, 1.0)
    for p in apart:
        fastguard.clip_grad_norm_(p, 1.0)
    assert true_norm([p.grad for p in together]) == pytest.approx(1.0, rel=1e-5)
    assert true_norm([p.grad for p in apart]) == pytest.approx(math.sqrt(2.0), rel=1e-5)
