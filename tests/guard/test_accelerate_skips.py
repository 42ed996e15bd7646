"""The real accelerate: a step that is skipped under a scaler is one to it too, and its scheduler waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from guard_helpers import assert_identical, loss_at, make_model, poison, snapshot

import fastguard

pytestmark = pytest.mark.slow


def _train(guarded: str, fused: bool = False) -> tuple[list[bool], list[float], list[float], Any]:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    Accelerator(cpu=True)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    settings: dict[str, Any] = {} if guarded == "policy" else {"max_norm": 1e9}
    if guarded == "policy":
        settings["clip"] = fastguard.SkipSpikes()
    if guarded == "before":
        fastguard.wrap(inner, model, **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    outer = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu", init_scale=16.0))
    if guarded in ("after", "policy"):
        fastguard.wrap(outer, model, **settings)
    waiting = AcceleratedScheduler(scheduler, outer, step_with_optimizer=True, split_batches=True)
    skipped, rates, scales = [], [], []
    for step in range(8):
        outer.zero_grad()
        outer.scaler.scale(loss_at(model, step)).backward()
        if step in (0, 3, 4):
            poison(model, math.inf)
        outer.step()
        waiting.step()
        skipped.append(outer.step_was_skipped)
        rates.append(inner.param_groups[0]["lr"])
        scales.append(outer.scaler.get_scale())
    return skipped, rates, scales, snapshot(model, inner)


@pytest.mark.parametrize("guarded", ["before", "after", "policy"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skip_is_one_to_accelerate_and_its_scheduler_waits(
    guarded: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = pytest.importorskip("accelerate.state", reason="accelerate is not installed")
    monkeypatch.setattr(state.AcceleratorState, "_shared_state", {})  # not left to others
    expected, got = _train("not at all"), _train(guarded, fused)
    assert got[:3] == expected[:3]
    assert got[0] == [step in (0, 3, 4) for step in range(8)]
    if not fused:
        assert_identical(got[3], expected[3])
