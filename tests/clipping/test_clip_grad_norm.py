"""`fastguard.clip_grad_norm_` against torch's, for every argument, put in its place, and over all that may meet.

What differs is in `DIFFERENCES`, with the reason; everything else is torch's: norm and its dtype, gradients, warnings,
and the type of an error.
"""

import inspect
import math
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch_rivals import (
    GRAD_RTOL,
    NORM_RTOL,
    as_parameters,
    assert_as_torch,
    copied,
    make_gradients,
    outcome,
    true_norm,
)

import fastguard

from pairs import pairs


def test_the_signature_is_torchs():
    for name in ("clip_grad_norm_", "get_total_norm"):
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (fastguard, torch.nn.utils))
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


def test_parameters_in_every_form():
    gradients = make_gradients()
    expected = true_norm(gradients)

    class Parameters:
        def __iter__(self):
            return iter(as_parameters(copied(gradients)))

    forms = [
        as_parameters(copied(gradients)),
        tuple(as_parameters(copied(gradients))),
        (p for p in as_parameters(copied(gradients))),
        dict.fromkeys(as_parameters(copied(gradients))),
        Parameters(),
        nn.ParameterList(as_parameters(copied(gradients))),
    ]
    for parameters in forms:
        assert fastguard.clip_grad_norm_(parameters, 1e9).item() == pytest.approx(expected, rel=1e-6)


def test_an_empty_generator_warns_where_it_was_passed():
    with pytest.warns(UserWarning, match="`parameters` is an empty generator, no gradient clipping will occur") as seen:
        norm = fastguard.clip_grad_norm_((p for p in []), 1.0)
    assert norm.item() == 0.0
    assert [w.filename for w in seen] == [__file__]
    if "empty generator" not in inspect.getsource(torch.nn.utils.clip_grad):
        return  # torch 2.6 says nothing
    with pytest.warns(UserWarning, match="empty generator"):  # torch, too
        torch.nn.utils.clip_grad_norm_((p for p in []), 1.0)


def test_missing_gradients_are_left_out():
    first, second = make_gradients([(5, 2), (7,)])
    assert_as_torch([None, first, None, second, None], 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_every_layout(dtype, max_norm):
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
def test_expanded_gradients(max_norm):
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


def test_shared_gradients_count_and_scale_as_often_as_they_are_listed():
    theirs, ours = (as_parameters([torch.full((9,), 2.0)]) * 2 for _ in range(2))
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(fastguard.clip_grad_norm_(ours, 1.0), expected)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-6, atol=0.0)


TORCHS = {name: getattr(torch.nn.utils, name) for name in ("clip_grad_norm_", "get_total_norm")}


@pytest.fixture
def replaced(monkeypatch):
    for name in TORCHS:
        monkeypatch.setattr(torch.nn.utils, name, getattr(fastguard, name))
    # by these names torch's own functions call one another
    monkeypatch.setattr(torch.nn.utils.clip_grad, "clip_grad_norm_", fastguard.clip_grad_norm_)
    monkeypatch.setattr(torch.nn.utils.clip_grad, "_get_total_norm", fastguard.get_total_norm)


@pytest.mark.usefixtures("replaced")
def test_what_is_passed_on_arrives_at_torchs():
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
def test_torchs_other_functions_take_our_norms():
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
def test_max_norm_is_any_real_number(max_norm, norm_type):
    assert_as_torch(make_gradients([(10, 10), (3,)]), max_norm, norm_type)


_NO_NUMBERS = [None, "a", [1.0, 2.0], torch.ones(2), 1j, pytest.param(object(), id="object")]


@pytest.mark.parametrize("max_norm", _NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_what_is_no_number_is_refused_as_torch_does(max_norm, norm_type):
    gradients = make_gradients([(3, 3)])
    got, expected = (
        outcome(function, as_parameters(copied(gradients)), max_norm, norm_type)[0]
        for function in (fastguard.clip_grad_norm_, TORCHS["clip_grad_norm_"])
    )
    assert got == expected
    assert got[0] in (TypeError, ValueError, RuntimeError)


MIXES = [
    (torch.float32,),
    (torch.float64,),
    (torch.float16,),
    (torch.bfloat16,),
    (torch.complex64,),
    (torch.complex128,),
    (torch.float32, torch.float64),
    (torch.float16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64, torch.float16),
    (torch.complex64, torch.float64),
]
ORDERS = [0.5, 1, 1.5, 2, 2.0, 3, 4, 0, math.inf, -math.inf, -1, "2"]
VALUES = ["finite", "nan", "inf", "zero", "empty"]
ERRORS = [False, True]
WAYS = [None, True, False]
LIMITS = [0.0, 0.5, 1e4, math.inf]


class Case(NamedTuple):
    dtypes: tuple[torch.dtype, ...]
    order: Any
    values: str
    error_if_nonfinite: bool
    foreach: bool | None
    max_norm: float


class Outcome(NamedTuple):
    result: Any  # the norm, or type and message of an error
    warnings: list[Any]
    gradients: list[torch.Tensor]


def _real(dtype):
    return dtype.to_real() if dtype.is_complex else dtype


def _gradients(dtypes, values):
    """Two tensors of each dtype; what is not finite is in the last one only."""
    if values == "empty":
        return [torch.empty(0, dtype=dtype) for dtype in dtypes]
    gradients = [g for i, dtype in enumerate(dtypes) for g in make_gradients([(5, 3), (17,)], dtype, seed=i)]
    if values == "zero":
        return [g.zero_() for g in gradients]
    if values != "finite":
        gradients[-1][7] = float(values)
    return gradients


def _clip(function, gradients, case):
    parameters = as_parameters(copied(gradients))
    result, warnings = outcome(
        function, parameters, case.max_norm, case.order, case.error_if_nonfinite, foreach=case.foreach
    )
    return Outcome(result, warnings, [p.grad for p in parameters])


def _is_close(got, expected, rtol):
    atol = 1e-7 if _real(got.dtype) is torch.float16 else 0.0  # its subnormals have few digits
    return got.dtype is expected.dtype and torch.allclose(got, expected, rtol, atol, equal_nan=True)


def _is_the_same(ours, theirs):
    if ours.warnings != theirs.warnings:
        return False
    if isinstance(theirs.result, torch.Tensor):
        if not isinstance(ours.result, torch.Tensor):
            return False
        if not _is_close(ours.result, theirs.result, NORM_RTOL[theirs.result.dtype]):
            return False
    elif isinstance(ours.result, torch.Tensor) or ours.result[0] is not theirs.result[0]:
        return False
    pairs_of_gradients = zip(ours.gradients, theirs.gradients, strict=True)
    return all(_is_close(a, b, GRAD_RTOL[_real(b.dtype)]) for a, b in pairs_of_gradients)


def _is_the_truth(ours, gradients, max_norm):
    """Norm and gradients are what float64 arithmetic says, rounded once to their dtypes."""
    exact = true_norm(gradients)
    coefficient = min(1.0, max_norm / (exact + 1e-6))
    expected = [(g.to(torch.promote_types(g.dtype, torch.float64)) * coefficient).to(g.dtype) for g in gradients]
    return abs(float(ours.result) - exact) <= NORM_RTOL[ours.result.dtype] * exact and all(
        _is_close(a, b, GRAD_RTOL[_real(b.dtype)]) for a, b in zip(ours.gradients, expected, strict=True)
    )


def _is_rounded_in_between(case, ours, theirs, gradients):
    """torch rounds each tensor's norm to the tensor's dtype before it joins them, and clips by what comes of that."""
    narrow = max(NORM_RTOL[_real(dtype)] for dtype in case.dtypes)
    return (
        len({_real(dtype) for dtype in case.dtypes}) > 1
        and float(case.order) == 2.0
        and case.values == "finite"
        and _is_close(ours.result, theirs.result, narrow)
        and _is_the_truth(ours, gradients, case.max_norm)
    )


def _is_zero_over_zero(case, ours, theirs, gradients):
    """torch divides in float16, where 1 / 1e-6 is Inf: gradients of zeros clipped to 0 become NaN. Ours stay zeros."""
    return (
        case.dtypes == (torch.float16,)
        and case.max_norm == 0.0
        and case.values == "zero"
        and all(g.isnan().all() for g in theirs.gradients)
        and _is_the_truth(ours, gradients, case.max_norm)
    )


DIFFERENCES = {"rounded in between": _is_rounded_in_between, "zero over zero": _is_zero_over_zero}


def difference(case):
    """The name of what differs from torch in `case`, which one of `DIFFERENCES` must explain; None for nothing."""
    gradients = _gradients(case.dtypes, case.values)
    theirs = _clip(torch.nn.utils.clip_grad_norm_, gradients, case)
    ours = _clip(fastguard.clip_grad_norm_, gradients, case)
    if _is_the_same(ours, theirs):
        return None
    for name, explains in DIFFERENCES.items():
        if explains(case, ours, theirs, gradients):
            return name
    pytest.fail(f"{case}: torch gives {theirs}, fastguard {ours}")


def test_any_two_of_them_together():
    rows = [Case(*row) for row in pairs(MIXES, ORDERS, VALUES, ERRORS, WAYS, LIMITS)]
    assert len(rows) >= len(MIXES) * len(ORDERS)
    found = Counter(map(difference, rows))
    assert found[None] > 0.9 * len(rows)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_on_purpose_still_does(name):
    """So that no difference stays in the table that is none any more."""
    cases = {
        "rounded in between": Case((torch.float16, torch.bfloat16), 2, "finite", False, None, 0.5),
        "zero over zero": Case((torch.float16,), 2, "zero", False, None, 0.0),
    }
    assert difference(cases[name]) == name


def test_every_two_values_of_two_parameters_meet():
    values = [range(45), "ab", [True, False], (0, 3, 5), ["alone"]]
    rows = pairs(*values)
    for i, j in combinations(range(len(values)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(values[i], values[j]))
    assert 135 <= len(rows) <= 140  # the full product has 540
    assert rows == pairs(*values)
