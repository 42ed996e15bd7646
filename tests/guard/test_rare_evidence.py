"""What the guard sees of running statistics and of single elements, and how early it asks what looks ahead."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle

import pytest
import torch
from guard_helpers import needs_extension
from torch import nn

import fastguard
from fastguard.diagnosis import by_sign, diagnose
from fastguard.diagnosis.checkup import GLANCE_EVERY
from fastguard.observers.batches import NormStatistics
from fastguard.records import ModelNotes
from fastguard.records.failures import Failures


def train(model, num_steps=60, change=None, shift=0.0, **options):
    """Steps on random numbers; `change` is called with the step between backward and step."""
    torch.manual_seed(0)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model, **options)
    for step in range(num_steps):
        loss = model(torch.randn(64, 8) + shift).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if change is not None:
            change(step)
        optimizer.step()
        optimizer.guard.observe(loss=loss)
    optimizer.guard.flush()
    optimizer.guard.report()
    return optimizer.guard


def normed(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=momentum), nn.ReLU(), nn.Linear(32, 4))


class TestNormStatistics:
    @pytest.mark.parametrize(("momentum", "low", "high"), [(0.1, 0.0, 0.5), (1e-6, 0.5, 9.0)])
    def test_running_means_beside_those_of_a_batch(self, momentum, low, high):
        guard = train(normed(momentum), shift=3.0)
        [(name, (gap, ratio))] = guard.history.model.norm_statistics.items()
        assert name == "1" and low <= gap < high and 0.1 < ratio < 10.0
        fired = by_sign(diagnose(guard.history)).keys()
        assert ("running-statistics-apart" in fired) == (momentum < 0.1)

    def test_figures(self):
        model, x = nn.BatchNorm1d(2), torch.tensor([[0.0, 4.0], [2.0, 8.0]] * 8)
        watch = NormStatistics(model, Failures())
        watch.arm()
        model(x)
        deviations = x.std(0)
        expected = ((x.mean(0) / deviations).square().mean()).sqrt()
        [(gap, ratio)] = watch.found.values()
        assert gap == pytest.approx(float(expected), rel=1e-3)
        assert ratio == pytest.approx(1.0 / float(deviations.square().log().mean().exp()), rel=1e-3)
        assert not model._forward_pre_hooks  # for one pass

    @pytest.mark.parametrize("kind", ["float16", "NaN"])
    def test_running_statistics_that_are_not_finite_are_no_health(self, kind):
        model = normed()
        if kind == "float16":
            model[1].half()

        def spoilt(step):
            if kind == "NaN" and step == 30:
                model[1].running_mean[3] = math.nan

        class Cast(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x):
                x = self.model[0](x) * 1200.0
                x = self.model[1](x.half()).float() if kind == "float16" else self.model[1](x)
                return self.model[3](self.model[2](x))

        guard = train(Cast(), change=spoilt)
        assert not torch.isfinite(model[1].running_mean + model[1].running_var).all() and guard.history.num_skipped == 0
        assert guard.history.model.norm_statistics == {"model.1": (math.inf, math.inf)}
        report = guard.report()
        assert report.status == "critical" and report.causes[0].rule == "normalisation-statistics"
        again = ModelNotes.of(json.loads(json.dumps(guard.history.model.state(), allow_nan=False)))
        assert again.norm_statistics == guard.history.model.norm_statistics

    @pytest.mark.parametrize("x", [torch.zeros(15, 2), torch.zeros(64, 3)[:, :2].to_sparse()], ids=["few", "sparse"])
    def test_what_cannot_be_told_is_left_out(self, x):
        watch, failures = NormStatistics(nn.BatchNorm1d(2), failures := Failures()), failures
        watch.compare("norm", nn.BatchNorm1d(2), x)
        assert not watch.found

    def test_images(self):
        model = nn.BatchNorm2d(3)
        watch = NormStatistics(model, Failures())
        watch.arm()
        model(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)))
        [(gap, ratio)] = watch.found.values()
        assert gap < 0.3 and 0.7 < ratio < 1.4

    def test_without_autograd_it_waits(self):
        model = nn.BatchNorm1d(2)
        watch = NormStatistics(model, Failures())
        watch.arm()
        with torch.no_grad():
            model(torch.randn(32, 2))
        assert not watch.found and model._forward_pre_hooks
        model(torch.randn(32, 2))
        assert watch.found and not model._forward_pre_hooks

    def test_copies_of_a_model_have_no_hook_that_looks(self):
        model = nn.BatchNorm1d(2)
        watch = NormStatistics(model, Failures())
        watch.arm()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.randn(32, 2))
        assert not watch.found
        watch.close()
        assert not model._forward_pre_hooks


class TestLoneElement:
    def flipping(self, model, at):
        def change(step):
            if step in at:
                gradient = model[2].weight.grad
                gradient.view(-1)[5] = 1e12

        return change

    @needs_extension
    @pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}], ids=["", "clipped"])
    def test_its_step_is_kept_with_its_tensor(self, options):
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        guard = train(model, 60, self.flipping(model, {37}), skip_nonfinite=True, **options)
        [one] = guard.history.lone_elements
        assert (one.step, one.name) == (37, "2.weight") and one.value == pytest.approx(1e12)
        assert 0.0 < one.usual < 10.0

    def test_the_last_step_too(self):
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        guard = train(model, 38, self.flipping(model, {37}))
        assert [one.step for one in guard.history.lone_elements] == [37]

    @needs_extension
    def test_sixteen_are_enough(self):
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        guard = train(model, 60, self.flipping(model, set(range(60))), max_norm=1e-6)
        steps = [one.step for one in guard.history.lone_elements]
        assert len(steps) == 16 and steps[0] < 60 and "lone-element" not in by_sign(diagnose(guard.history))

    def test_no_small_model_has_one(self):
        model = nn.Linear(8, 4)
        guard = train(nn.Sequential(model), 30, lambda step: model.weight.grad.view(-1)[0].fill_(1e9))
        assert not guard.history.lone_elements


def test_what_looks_ahead_is_asked_more_often_than_the_others(monkeypatch):
    asked = []
    model = nn.Linear(8, 4)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    checkup = optimizer.guard._checkup
    monkeypatch.setattr(checkup, "glance", lambda: asked.append(optimizer.guard.history.num_steps) or [])
    for step in range(200):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.guard.observe(loss=1.0 if step < 50 else 1.1)  # before it rises there is nothing to see ahead
    gaps = {b - a for a, b in itertools.pairwise(asked) if a > 50}
    assert len(asked) >= 5 and gaps == {GLANCE_EVERY}


@pytest.mark.parametrize(("factor", "gap"), [(1.0, None), (1.1, 16), (math.nan, 16)])
def test_late_steps_are_looked_at_where_the_loss_is_above_its_best(monkeypatch, factor, gap):
    asked = []
    model = nn.Linear(8, 4)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    guard = optimizer.guard
    monkeypatch.setattr(guard._checkup, "glance", lambda: asked.append(guard.history.newest_step) or [])
    for step in range(1250):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + step % 3)
        optimizer.step()
        guard.observe(loss=0.5 if step < 1100 else 0.5 * factor)
    late = [step for step in asked if step >= 1120]
    assert {b - a for a, b in itertools.pairwise(late)} == ({gap} if gap else set()) and (len(late) >= 4) is bool(gap)
    assert guard.history.num_steps == 1249


def test_with_no_checkup_nobody_looks_ahead(monkeypatch):
    model = nn.Linear(8, 4)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model, check_every=0)
    monkeypatch.setattr(optimizer.guard._checkup, "glance", lambda: pytest.fail("asked"))
    for _ in range(100):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
