"""Going back beside scalers, several optimizers, accumulation, random states and clip policies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from recovery_helpers import QUICK, loss_of, make, ruin, train, wrapped

import fastguard


def test_under_a_scaler_whose_scale_goes_on() -> None:
    model = make()
    guarded = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=20)
    for step in range(90):
        if step == 60:
            ruin(model)
        guarded.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(guarded)
        scaler.step(guarded)
        scaler.update()
        guarded.guard.observe(loss=loss)
    assert len(guarded.guard.recoveries) == 1 and scaler.get_scale() >= 1024.0 * 8
    assert not {"grad_scale", "found_inf"} & {k for k, v in vars(guarded).items() if v is not None}


def test_several_optimizers_go_back_together(way: str) -> None:
    model = make(norm=False)
    pair = [torch.optim.AdamW(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.05)]
    fastguard.wrap(pair, model, recovery=QUICK, check_every=0)
    guard = pair[0].guard
    losses = []
    for step in range(100):
        if step == 60:
            ruin(model)
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in pair:
            optimizer.step()
        guard.observe(loss=loss)
        losses.append(float(loss.detach()))
    assert len(guard.recoveries) == 1 and max(losses[-20:]) < 2.0 * max(losses[40:60])


def test_the_random_state_and_what_is_given_go_back_on_demand() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    for replay in (False, True):
        model, counter = make(), Counter()
        settings = fastguard.Recovery(every=10, patience=3, quarantine=4, replay=replay, state=[counter])
        guarded = wrapped(model, settings)
        drawn: dict[int, float] = {}
        for step in range(70):
            if step == 60:
                with torch.random.fork_rng():
                    ruin(model)
            was = counter.count
            train(model, guarded, [step])
            if guarded.guard.recoveries and len(guarded.guard.recoveries) == 1 and counter.count < was:
                assert counter.count == 49  # as it was when the 49th step was over
                assert (float(torch.rand(())) == drawn[50]) is replay
                break
            counter.count += 1
            drawn[step + 1] = float(torch.rand(()))
        else:
            pytest.fail("it did not go back")


def test_a_policy_with_a_memory_goes_back_with_the_run() -> None:
    class Remembers(fastguard.clip.ClipPolicy):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def limits(self) -> tuple[float, float]:
            return math.inf, math.inf

        def observe(self, norms: float, loss: float | None = None) -> None:
            self.norms.append(norms)

        def state_dict(self) -> dict[str, Any]:
            return {"norms": self.norms}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.norms = state["norms"]

    model, policy = make(), Remembers()
    guarded = wrapped(model, clip=policy)
    train(model, guarded, range(64), fault=lambda step: ruin(model) if step == 60 else None)
    assert len(guarded.guard.recoveries) == 1 and len(policy.norms) <= 52
    assert guarded.guard.clip is policy
