"""What limits do to norms: the short way in C++ and the long way in Python give the same, to the bit."""

from __future__ import annotations

import math
import random
import struct
from array import array
from typing import Any

import pytest
import torch

from fastguard.clip.limits import Limits, factor_of, row_norms
from fastguard.kernels import backends, cpu
from fastguard.records.slot import FLAGS, HAS_TRIGGER, SKIPPED, TRIGGER

pytestmark = pytest.mark.skipif(not backends()["cpu"].available, reason=str(backends()["cpu"].reason))


def test_the_formula() -> None:
    assert factor_of(4.0, -1.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert factor_of(4.0, 2.0, 1.0) == 0.25 and factor_of(2.0, 2.0, 1.0) == 1.0
    assert factor_of(4.0, 2.0, 9.0) == 1.0 and factor_of(4.0, math.inf, math.inf) == 1.0


def _take(params: list[torch.Tensor], limits: Any) -> tuple[int, bytearray, list[Any]]:
    headers, found = bytearray(128), [bytearray(), None, None, None, None, None]
    outcome = cpu.take_step([{"params": params}], headers, 0, found, 0, 1, limits, True, True)
    return outcome, headers, found


def _limits(generator: random.Random, count: int, norms: list[float]) -> Limits:
    total = math.hypot(*norms)
    kind = generator.randrange(4)
    if kind == 0:
        return Limits(generator.choice([math.inf, total, 0.5 * total]), generator.choice([0.0, 0.3 * total]))
    groups = None if kind == 1 else array("i", [generator.randrange(-1, 2) for _ in range(count)])
    size = count if groups is None else 2
    own = array("d", [-1.0]) * size
    if generator.random() < 0.2:
        return Limits(0.5 * total, 0.25 * total, groups, norms=own)
    triggers = array("d", [generator.choice([0.5, 2.0, math.inf, 0.0]) for _ in range(size)])
    targets = array("d", [generator.choice([0.25, 0.0]) if kind == 3 else 0.25 for _ in range(size)])
    return Limits(math.inf, math.inf, groups, triggers, targets, own)


def test_both_ways_rule_alike() -> None:
    generator, num_over, num_dropped = random.Random(0), 0, 0
    for seed in range(300):
        torch.manual_seed(seed)
        count = generator.randrange(1, 8)
        params = [torch.nn.Parameter(torch.zeros(generator.randrange(1, 5))) for _ in range(count)]
        for p in params:
            p.grad = torch.randn(p.shape) * 10.0 ** generator.randrange(-1, 2)
        if count > 2:
            params[generator.randrange(count)].grad = None
        before = [None if p.grad is None else p.grad.clone() for p in params]
        rows = [float(cpu.CpuBackend().tensor_stats([g])[1][-1]) for g in before if g is not None]
        limits = _limits(generator, count, rows)
        own = limits.norms
        outcome, headers, found = _take(params, limits)
        written = None if own is None else list(own)
        words = struct.unpack("16d", headers)
        ruling = limits.apply(words[1], row_norms(found[0]), found[1])
        assert words[2] == ruling.coefficient
        assert written == (None if own is None else list(own))
        assert tuple(found[4] or ()) == ruling.over and bool(outcome & 64) is bool(ruling.over)
        assert bool(outcome & 32) is ruling.is_dropped is bool(int(words[FLAGS]) & SKIPPED)
        trigger = limits.trigger
        assert bool(int(words[FLAGS]) & HAS_TRIGGER) is (trigger < math.inf)
        assert words[TRIGGER] == (trigger if trigger < math.inf else 0.0)
        factors = ruling.factors or [ruling.coefficient] * len(rows)
        there = [(g, p.grad) for g, p in zip(before, params, strict=True) if g is not None]
        for (g, now), factor in zip(there, factors, strict=True):
            expected = g if factor == 1.0 else g * factor
            assert now is not None and torch.equal(now, expected)
        versions = [now._version for _, now in there]
        assert len(found[3] or []) == (sum(f != 1.0 for f in factors) if outcome & 8 else 0), versions
        num_over += bool(ruling.over)
        num_dropped += ruling.is_dropped
    assert num_over > 50 and num_dropped > 20


def test_limits_of_other_parameters_are_not_applied() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    own = array("d", [0.0, 0.0])
    outcome, headers, _ = _take([p], Limits(math.inf, math.inf, None, own, own, own))
    assert outcome == 128 and bytes(headers) == bytes(128)


@pytest.mark.parametrize(
    "limits",
    ["x", (1.0,), (1.0, "x"), (1.0, 1.0), Limits("x"), Limits(1.0, "x"), Limits(1.0, 1.0, norms=3),
     Limits(1.0, 1.0, array("i", [3]), norms=array("d", [0.0])),
     Limits(1.0, 1.0, triggers=array("d", [0.0]), norms=array("d", [0.0])),
     Limits(1.0, 1.0, norms=b"12345678"),
     Limits(1.0, 1.0, array("b", [0]), norms=array("d", [0.0]))],
    ids=repr,
)  # fmt: skip
def test_what_is_no_limits_is_refused(limits: Any) -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    with pytest.raises((TypeError, ValueError, BufferError)):
        _take([p], limits)
    assert p.grad.item() == 1.0
