"""The early-warning rules run at their own interval."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import fastguard
from fastguard.diagnosis.checkup import GLANCE_EVERY


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
