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
    as_parameters,
    assert_as_torch,
    copied,
    make_gradients,
    true_norm,
)

import fastguard

# What has a norm of any order: an empty tensor has no largest element.


def test_the_signature_is_torchs() -> None:
    for name in ("clip_grad_norm_", "get_total_norm"):
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (fastguard, torch.nn.utils))
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


@pytest.mark.parametrize("max_norm", [-1.0, 0, 0.0, 5, math.inf, -math.inf, math.nan, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_max_norm(max_norm: float, as_tensor: bool) -> None:
    """As torch: a negative one reverses gradients, NaN poisons them, inf leaves them alone."""
    assert_as_torch(make_gradients(), torch.tensor(float(max_norm)) if as_tensor else max_norm)


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
