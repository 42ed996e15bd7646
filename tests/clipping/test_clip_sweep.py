"""`fastguard.clip_grad_norm_` and torch's, over all that may meet: dtypes, orders, values, limits, errors, ways.

What differs is in `DIFFERENCES`, with the reason; everything else is torch's: norm and its dtype, gradients, warnings,
and the type of an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch_rivals import GRAD_RTOL, NORM_RTOL, as_parameters, copied, make_gradients, outcome, true_norm

import fastguard

from pairs import pairs

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


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _gradients(dtypes: Sequence[torch.dtype], values: str) -> list[torch.Tensor]:
    """Two tensors of each dtype; what is not finite is in the last one only."""
    if values == "empty":
        return [torch.empty(0, dtype=dtype) for dtype in dtypes]
    gradients = [g for i, dtype in enumerate(dtypes) for g in make_gradients([(5, 3), (17,)], dtype, seed=i)]
    if values == "zero":
        return [g.zero_() for g in gradients]
    if values != "finite":
        gradients[-1][7] = float(values)
    return gradients


def _clip(function: Callable[..., Any], gradients: list[torch.Tensor], case: Case) -> Outcome:
    parameters = as_parameters(copied(gradients))
    result, warnings = outcome(
        function, parameters, case.max_norm, case.order, case.error_if_nonfinite, foreach=case.foreach
    )
    return Outcome(result, warnings, [p.grad for p in parameters])


def _is_close(got: torch.Tensor, expected: torch.Tensor, rtol: float) -> bool:
    atol = 1e-7 if _real(got.dtype) is torch.float16 else 0.0  # its subnormals have few digits
    return got.dtype is expected.dtype and torch.allclose(got, expected, rtol, atol, equal_nan=True)


def _is_the_same(ours: Outcome, theirs: Outcome) -> bool:
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


def _is_the_truth(ours: Outcome, gradients: list[torch.Tensor], max_norm: float) -> bool:
    """Norm and gradients are what float64 arithmetic says, rounded once to their dtypes."""
    exact = true_norm(gradients)
    coefficient = min(1.0, max_norm / (exact + 1e-6))
    expected = [(g.to(torch.promote_types(g.dtype, torch.float64)) * coefficient).to(g.dtype) for g in gradients]
    return abs(float(ours.result) - exact) <= NORM_RTOL[ours.result.dtype] * exact and all(
        _is_close(a, b, GRAD_RTOL[_real(b.dtype)]) for a, b in zip(ours.gradients, expected, strict=True)
    )


def _is_rounded_in_between(case: Case, ours: Outcome, theirs: Outcome, gradients: list[torch.Tensor]) -> bool:
    """torch rounds each tensor's norm to the tensor's dtype before it joins them, and clips by what comes of that."""
    narrow = max(NORM_RTOL[_real(dtype)] for dtype in case.dtypes)
    return (
        len({_real(dtype) for dtype in case.dtypes}) > 1
        and float(case.order) == 2.0
        and case.values == "finite"
        and _is_close(ours.result, theirs.result, narrow)
        and _is_the_truth(ours, gradients, case.max_norm)
    )


def _is_zero_over_zero(case: Case, ours: Outcome, theirs: Outcome, gradients: list[torch.Tensor]) -> bool:
    """torch divides in float16, where 1 / 1e-6 is Inf: gradients of zeros clipped to 0 become NaN. Ours stay zeros."""
    return (
        case.dtypes == (torch.float16,)
        and case.max_norm == 0.0
        and case.values == "zero"
        and all(g.isnan().all() for g in theirs.gradients)
        and _is_the_truth(ours, gradients, case.max_norm)
    )


DIFFERENCES = {"rounded in between": _is_rounded_in_between, "zero over zero": _is_zero_over_zero}


def difference(case: Case) -> str | None:
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


def test_any_two_of_them_together() -> None:
    rows = [Case(*row) for row in pairs(MIXES, ORDERS, VALUES, ERRORS, WAYS, LIMITS)]
    assert len(rows) >= len(MIXES) * len(ORDERS)
    found = Counter(map(difference, rows))
    assert found[None] > 0.9 * len(rows)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_on_purpose_still_does(name: str) -> None:
    """So that no difference stays in the table that is none any more."""
    cases = {
        "rounded in between": Case((torch.float16, torch.bfloat16), 2, "finite", False, None, 0.5),
        "zero over zero": Case((torch.float16,), 2, "zero", False, None, 0.0),
    }
    assert difference(cases[name]) == name
