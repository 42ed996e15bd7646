"""What a clip policy says is checked: a step that it has no limits for is taken without clipping."""

from __future__ import annotations

import logging
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from guard_helpers import assert_identical, make_model, snapshot, train
from torch import nn

import fastguard
from fastguard.clip import ClipPolicy
from fastguard.diagnosis import Finding


def _sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **settings)


def _failed(report: Any, kind: str = "failed-parts") -> Finding:
    return next(finding for finding in report.findings if finding.rule == kind)


class Says(ClipPolicy):
    """Says what it is given; raises what is an exception."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def limits(self) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer, self.answer


WRONG = [math.nan, -math.inf, -0.5, None, "0.5", True, 1j, [0.5], torch.ones(2), np.ones(1), 10**400]
RIGHT = [0.5, Fraction(1, 2), Decimal("0.5"), np.float32(0.5), np.float64(0.5), torch.tensor(0.5), np.array(0.5)]


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("answer", [*WRONG, ValueError("no idea")], ids=repr)
def test_a_policy_that_says_what_is_no_limit(answer: Any, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    memory = fastguard.MemorySink()
    model, plain = make_model(), make_model()
    optimizer = _sgd(model, clip=Says(answer), sinks=[memory], backend=backend, check_every=0)
    unguarded = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(model, optimizer, range(4))
    train(plain, unguarded, range(4))
    assert_identical(snapshot(model, optimizer), snapshot(plain, unguarded))
    optimizer.guard.flush()
    assert [(r.clip_coef, type(r.clip_coef), r.clipped, r.skipped) for r in memory.records] == [
        (1.0, float, False, False)
    ] * 4
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1 and "clip policy Says failed" in told[0] and "without clipping" in told[0]
    finding = _failed(optimizer.guard.report())
    assert finding.evidence == {"clip policy Says": 4} and "clip policy Says 4 times" in finding.summary


@pytest.mark.parametrize("answer", RIGHT, ids=repr)
def test_a_policy_may_say_any_real_number(answer: Any) -> None:
    model = make_model()
    optimizer = _sgd(model, clip=Says(answer))
    train(model, optimizer, range(2))
    last = optimizer.guard.last
    assert (last.trigger, type(last.trigger), last.clipped_norm) == (0.5, float, pytest.approx(0.5))
    assert not len(optimizer.guard._run.failures)


@pytest.mark.parametrize("max_norm", [1, 1.0, Fraction(1), Decimal(1), np.float32(1), np.int64(1), np.array(1.0)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_max_norm_is_any_real_number(max_norm: Any, as_tensor: bool) -> None:
    given = torch.tensor(float(max_norm)) if as_tensor else max_norm
    model = make_model()
    optimizer = _sgd(model, max_norm=given)
    train(model, optimizer, range(2))
    assert (optimizer.guard.clip.max_norm, type(optimizer.guard.clip.max_norm)) == (1.0, float)
    optimizer.guard.clip.max_norm = np.float16(0.25)
    assert optimizer.guard.clip.limit == 0.25
    with pytest.raises(ValueError, match="`max_norm` must be a number > 0, got nan"):
        optimizer.guard.clip.max_norm = math.nan
    assert optimizer.guard.clip.limit == 0.25


@pytest.mark.parametrize("limit", [math.nan, -1.0, "1", RuntimeError("none")], ids=repr)
def test_a_policy_whose_limit_is_none(limit: Any) -> None:
    class Limited(ClipPolicy):
        @property
        def limit(self) -> Any:
            if isinstance(limit, Exception):
                raise limit
            return limit

    model, plain = make_model(), make_model()
    optimizer = _sgd(model, clip=Limited())
    train(model, optimizer, range(4))
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), range(4))
    assert_identical(snapshot(model)["parameters"], snapshot(plain)["parameters"])
    assert optimizer.guard._run.failures.known("clip policy Limited").times >= 3
    assert "clip policy Limited" in _failed(optimizer.guard.report()).summary
