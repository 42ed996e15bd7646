"""fastguard's functions put in the place of torch's: the only way into code that calls `torch.nn.utils` itself."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch_rivals import as_parameters, assert_as_torch, copied, make_gradients, outcome

import fastguard

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
