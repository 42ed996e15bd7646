"""Norms of updates against exact differences in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from fastguard.observers.weights import WeightSampler

ROUNDING = (2e-5, 2e-7)  # of the update, and of the weights, in float32
EXACT = (1e-9, 1e-15)  # in float64


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    shapes = [(7, 5), (5,), (), (0,), (4, 3, 3, 2), (70_001,)]
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    parameters[4].data = parameters[4].data.to(memory_format=torch.channels_last)
    return parameters


def give_gradients(parameters: list[nn.Parameter], missing: int | None = None, size: float = 1.0) -> None:
    for i, p in enumerate(parameters):
        p.grad = None if i == missing else torch.randn_like(p) * size


def measure(optimizer, parameters, sampler, **settings):
    """Update norms as sampled around one step, and as they are; these with the norms of the weights."""
    before = [p.detach().clone() for p in parameters]
    sample = sampler.before(optimizer)
    optimizer.step()
    names = [f"p{i}" for i in range(len(parameters))]
    found = sampler.after(optimizer, sample, names=names, **settings)
    assert [w.name for w in found] == names
    wide = [torch.complex128 if p.is_complex() else torch.float64 for p in parameters]
    return [w.update_norm for w in found], [
        (float((p.detach().to(d) - b.to(d)).abs().norm()), float(b.to(d).abs().norm()))
        for p, b, d in zip(parameters, before, wide, strict=True)
    ]


def assert_norms(found, truth, tolerance) -> None:
    assert found == [pytest.approx(norm, rel=tolerance[0], abs=tolerance[1] * size) for norm, size in truth]


@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_as_the_exact_difference(cls, dtype):
    parameters = make_parameters(dtype)
    optimizer, sampler = cls(parameters, lr=0.01), WeightSampler(every=1)
    for step in range(4):
        give_gradients(parameters, missing=2 if step == 2 else None, size=0.1**step)  # smaller: amsgrad remembers
        found, truth = measure(optimizer, parameters, sampler)
        assert_norms(found, truth, ROUNDING if dtype is torch.float32 else EXACT)
        assert truth[0][0] > 0


def test_complex():
    parameters = [nn.Parameter(torch.randn(33, 5, dtype=torch.complex64))]
    optimizer = optim.SGD(parameters, lr=0.01)
    parameters[0].grad = torch.randn(33, 5, dtype=torch.complex64).conj()
    assert_norms(*measure(optimizer, parameters, WeightSampler(every=1)), ROUNDING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_tells_what_rounding_left_of_the_update(dtype):
    p = nn.Parameter(torch.ones(1000, dtype=dtype))
    optimizer, sampler = optim.SGD([p], lr=1e-5), WeightSampler(every=1)
    p.grad = torch.ones_like(p)
    found, truth = measure(optimizer, [p], sampler)
    assert found == [truth[0][0]] == [0.0]  # asked for 3e-4, all of it lost


def test_a_parameter_without_a_gradient_is_left_alone_whatever_its_state():
    parameters = make_parameters()
    optimizer, sampler = optim.Adam(parameters), WeightSampler(every=1)
    give_gradients(parameters)
    optimizer.step()
    give_gradients(parameters, missing=0)
    found, truth = measure(optimizer, parameters, sampler)
    assert found[0] == truth[0][0] == 0.0 and found[1] > 0


def test_nan_in_the_update():
    parameters = make_parameters()
    for optimizer in (optim.SGD(parameters, lr=0.1), optim.NAdam(parameters)):
        give_gradients(parameters)
        parameters[0].grad[1, 1] = float("nan")
        found, _ = measure(optimizer, parameters, WeightSampler(every=1))
        assert found[0] != found[0] and found[1] > 0
