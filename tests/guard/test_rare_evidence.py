"""What the guard sees of running statistics and of single elements, and how early it asks what looks ahead."""

from __future__ import annotations

import json
import math

import pytest
import torch
from guard_helpers import needs_extension
from torch import nn

import fastguard
from fastguard.diagnosis import by_sign, diagnose
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

    @needs_extension
    def test_sixteen_are_enough(self):
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        guard = train(model, 60, self.flipping(model, set(range(60))), max_norm=1e-6)
        steps = [one.step for one in guard.history.lone_elements]
        assert len(steps) == 16 and steps[0] < 60 and "lone-element" not in by_sign(diagnose(guard.history))
