"""`fastguard.clip_grad_norm_` against torch's, for every argument, and put in its place."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_rivals import (
    as_parameters,
    assert_as_torch,
    copied,
    make_gradients,
    outcome,
    true_norm,
)

import fastguard

# What has a norm of any order: an empty tensor has no largest element.


def test_the_signature_is_torchs() -> None:
    for name in ("clip_grad_norm_", "get_total_norm"):
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (fastguard, torch.nn.utils))
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


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


def test_shared_gradients_count_and_scale_as_often_as_they_are_listed() -> None:
    theirs, ours = (as_parameters([torch.full((9,), 2.0)]) * 2 for _ in range(2))
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(fastguard.clip_grad_norm_(ours, 1.0), expected)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-6, atol=0.0)


TORCHS = {name: getattr(torch.nn.utils, name) for name in ("clip_grad_norm_", "get_total_norm")}


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHS:
        monkeypatch.setattr(torch.nn.utils, name, getattr(fastguard, name))
    # by these names torch's own functions call one another
    monkeypatch.setattr(torch.nn.utils.clip_grad, "clip_grad_norm_", fastguard.clip_grad_norm_)
    monkeypatch.setattr(torch.nn.utils.clip_grad, "_get_total_norm", fastguard.get_total_norm)


@pytest.mark.usefixtures("replaced")
def test_what_is_passed_on_arrives_at_torchs() -> None:
    """Sparse gradients, meta tensors, subclasses, generators and a single tensor."""

    class Plain(torch.Tensor):
        pass

    sparse = torch.nn.Parameter(torch.zeros(3, 3))
    sparse.grad = torch.eye(3).to_sparse()
    for function, given in (("clip_grad_norm_", [[sparse], 1.0]), ("get_total_norm", [[sparse.grad]])):
        assert outcome(getattr(torch.nn.utils, function), *given) == outcome(TORCHS[function], *given)
    meta = torch.nn.Parameter(torch.zeros(2, device="meta"))
    meta.grad = torch.zeros(2, device="meta")
    assert torch.nn.utils.clip_grad_norm_([meta], 1.0).is_meta
    odd = as_parameters([torch.full((4,), 3.0).as_subclass(Plain)])
    assert torch.nn.utils.clip_grad_norm_(odd, 1.0).item() == 6.0
    for norm_type in (2.0, math.inf):
        parameters = as_parameters([torch.tensor([3.0]), torch.tensor([-4.0])])
        norm = torch.nn.utils.clip_grad_norm_((p for p in parameters), 1.0, norm_type)
        assert norm.item() == (5.0 if norm_type == 2.0 else 4.0)
        assert torch.nn.utils.clip_grad_norm_(parameters[0], 1e3, norm_type).item() == parameters[0].grad.item()
        with pytest.warns(UserWarning, match="empty generator"):
            assert torch.nn.utils.clip_grad_norm_((p for p in []), 1.0, norm_type).item() == 0.0


@pytest.mark.usefixtures("replaced")
def test_torchs_other_functions_take_our_norms() -> None:
    gradients = make_gradients([(5, 5), (7,)])
    theirs, ours = as_parameters(copied(gradients)), as_parameters(gradients)
    TORCHS["clip_grad_norm_"](theirs, 0.5)
    norm = torch.nn.utils.get_total_norm([p.grad for p in ours])
    torch.nn.utils.clip_grads_with_norm_(ours, 0.5, norm)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    with pytest.warns(FutureWarning, match="deprecated"):
        assert torch.nn.utils.clip_grad_norm(ours, 0.1).item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    "max_norm",
    [
        np.float32(0.5),
        np.float16(0.5),
        np.float64(0.5),
        np.int64(2),
        np.array(0.5),
        torch.tensor(0.5),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor([2]),
        Fraction(1, 2),
        Decimal("0.5"),
        "0.5",  # float() reads it, so torch takes it
        True,
    ],
    ids=lambda value: f"{type(value).__name__}-{value}",
)
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_max_norm_is_any_real_number(max_norm: Any, norm_type: float) -> None:
    assert_as_torch(make_gradients([(10, 10), (3,)]), max_norm, norm_type)


_NO_NUMBERS = [None, "a", [1.0, 2.0], torch.ones(2), 1j, pytest.param(object(), id="object")]


@pytest.mark.parametrize("max_norm", _NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_what_is_no_number_is_refused_as_torch_does(max_norm: Any, norm_type: float) -> None:
    gradients = make_gradients([(3, 3)])
    got, expected = (
        outcome(function, as_parameters(copied(gradients)), max_norm, norm_type)[0]
        for function in (fastguard.clip_grad_norm_, TORCHS["clip_grad_norm_"])
    )
    assert got == expected
    assert got[0] in (TypeError, ValueError, RuntimeError)
