"""When a sampler samples, what it holds and says of the weights; and the table of gradients and weights."""

import math

import pytest
import torch
from torch import nn, optim

from fastguard.observers import weights
from fastguard.observers.weights import WeightSampler


def sampled(sampler, optimizer, parameters, **settings):
    for p in parameters:
        p.grad = torch.ones_like(p)
    sample = sampler.before(optimizer)
    optimizer.step()
    return sampler.after(sample, names=[f"p{i}" for i in range(len(parameters))], **settings)


def test_weights_are_those_before_the_step():
    p = nn.Parameter(torch.tensor([[3.0, -4.0], [0.0, 0.0]]))
    (found,) = sampled(WeightSampler(), optim.SGD([p], lr=10.0), [p], gradient_norms={"p0": 2.0})
    assert (found.name, found.numel, found.norm, found.abs_max, found.grad_norm) == ("p0", 4, 5.0, 4.0, 2.0)
    assert found.std == pytest.approx(float(torch.tensor([3.0, -4.0, 0.0, 0.0]).double().std(correction=0)), rel=1e-6)
    assert found.update_norm == 20.0 and found.update_ratio == 4.0 and found.gradient_ratio == 0.4


def test_nan_and_inf_in_the_weights():
    p = nn.Parameter(torch.tensor([math.nan, math.inf, 1.0]))
    (found,) = sampled(WeightSampler(), optim.SGD([p], lr=0.5), [p])
    assert found.num_nonfinite == 2 and math.isnan(found.norm) and found.abs_max == 1.0
    assert math.isnan(found.update_norm)


def test_due_every_so_many_steps_and_after_a_skipped_one():
    p = nn.Parameter(torch.ones(3))
    sampler, optimizer = WeightSampler(every=10), optim.SGD([p], lr=0.5)
    assert [step for step in range(31) if sampler.is_due(step)] == [0, 10, 20, 30]
    (found,) = sampled(sampler, optimizer, [p], skipped=True)
    assert found.update_norm is None and found.update_ratio is None and found.norm == pytest.approx(math.sqrt(3))
    assert sampler.is_due(11)
    sampled(sampler, optimizer, [p])
    assert not sampler.is_due(12)


def test_copies_stay_within_their_bound_and_every_update_is_measured(monkeypatch):
    monkeypatch.setattr(weights, "_MIN_BYTES", 900)
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(5)] + [nn.Parameter(torch.ones(1000))]
    optimizer, sampler = optim.Rprop(parameters, lr=0.5), WeightSampler()
    for _ in range(4):
        before = [p.detach().clone() for p in parameters]
        sample = sampler.before(optimizer)
        assert 0 < sum(c.numel() * c.element_size() for c in sample.copies) <= 900
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        found = sampler.after(sample, names=list("abcdef"))
        assert not sample.copies
        truth = [float((p.detach() - old).norm()) for p, old in zip(parameters, before)]
        assert [w.update_norm for w in found] == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.mT, lambda x: x[:, ::2]])
def test_the_norm_of_a_large_update_is_estimated(layout):
    p = nn.Parameter(layout(torch.randn(3000, 512)))  # 6 MB, or 3
    optimizer, sampler = optim.NAdam([p]), WeightSampler()
    for _ in range(3):
        before = p.detach().clone()
        p.grad = torch.randn_like(p) * torch.rand(p.shape[-1])
        sample = sampler.before(optimizer)
        assert sample.copies[0].nbytes <= 2**20
        optimizer.step()
        (found,) = sampler.after(sample, names=["w"])
        assert found.update_norm == pytest.approx(float((p.detach() - before).norm()), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_parameters_of_codes_are_left_out(dtype):
    weights, codes = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)
    optimizer = optim.SGD([codes, weights], lr=0.5)
    weights.grad = torch.ones(2)
    sampler = WeightSampler()
    sample = sampler.before(optimizer)
    optimizer.step()
    assert [w.name for w in sampler.after(sample, names=["codes", "weights"])] == ["weights"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, r"`every` must be an integer >= 1, got 0\. 100 samples"),
        ({"every": True}, "`every` must be an integer >= 1, got True"),
        ({"backend": "abacus"}, "`backend` must be one of"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightSampler(**settings)


@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_updates_are_the_exact_differences(cls, dtype):
    shapes = [(7, 5), (5,), (), (0,), (4, 3, 3, 2), (70_001,)]
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    parameters[4].data = parameters[4].data.to(memory_format=torch.channels_last)
    optimizer, sampler = cls(parameters, lr=0.01), WeightSampler(every=1)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for step in range(4):
        before = [p.detach().to(wide).clone() for p in parameters]
        for i, p in enumerate(parameters):
            p.grad = None if step == i == 2 else torch.randn_like(p) * 0.1**step  # smaller: amsgrad remembers
        sample = sampler.before(optimizer)
        optimizer.step()
        found = sampler.after(sample, names=list("abcdef"))
        assert [w.name for w in found] == list("abcdef")
        rel, share = (1e-9, 1e-15) if dtype is torch.float64 else (2e-5, 2e-7)  # of the update, and of the weights
        for w, p, b in zip(found, parameters, before, strict=True):
            truth = float((p.detach().to(wide) - b).abs().norm())
            assert w.update_norm == pytest.approx(truth, rel=rel, abs=share * float(b.abs().norm())), w.name
            assert truth > 0 or w.name in "cd"
