"""What the rules say where a clip policy is at work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guard_helpers import loss_at, make_model

import fastguard
from fastguard.diagnosis import RULES, diagnose
from fastguard.records import TrainingHistory


def _train(clip: Any, steps: int = 70, *, before: float | None = None, **settings: Any) -> Any:
    """A guarded run, whose gradients somebody clips to `before` ahead of the guard."""
    model = make_model()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3, **settings)
    fastguard.wrap(optimizer, model, clip=clip, check_every=0)
    for step in range(steps):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        if before is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), before)
        optimizer.step()
    optimizer.guard.flush()
    return optimizer.guard


def _said(history: TrainingHistory, rule: str) -> Any:
    return next(iter(diagnose(history, rules=[RULES[rule]])), None)


@pytest.mark.parametrize("make", [lambda: fastguard.GlobalNorm(0.1), lambda: fastguard.Spikes(max_norm=0.1)])
def test_already_clipped_is_not_the_guards_own_clipping(make: Any) -> None:
    guard = _train(make())
    assert guard.history.num_clipped == 70 and _said(guard.history, "already-clipped") is None
    twice = _train(make(), before=0.5)
    finding = _said(twice.history, "already-clipped")
    assert finding is not None and repr(make()) in finding.summary and repr(make()) in finding.recommendation
    assert "give the guard max_norm" not in finding.recommendation


def test_clipping_at_every_step_is_what_some_are_for() -> None:
    assert _said(_train(fastguard.GlobalNorm(0.01)).history, "clip-rate-high") is not None
    for policy in (fastguard.AGC(1e-4), fastguard.Value(1e-4)):
        guard = _train(policy)
        assert guard.history.num_clipped == 70 and _said(guard.history, "clip-rate-high") is None


def test_a_run_of_skips_says_whose_they_are() -> None:
    history = TrainingHistory()
    history.note_model(clip_policy="SkipSpikes(sigma=6, window=128)")
    for step in range(30):
        history.add(fastguard.StepStats(step, fastguard.tensor_stats([torch.ones(4)]), skipped=step >= 20))
    finding = _said(history, "skip-run")
    assert "10 of them by SkipSpikes(sigma=6, window=128)" in finding.summary and "Spikes" in finding.recommendation
