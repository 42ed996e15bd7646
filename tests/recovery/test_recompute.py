"""Gradients computed once more tell the machine from the data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from recovery_helpers import batch, make, wrapped
from torch import nn

import fastguard


class Flips(nn.Module):
    """Flips bits of the gradient that passes through, once it is told to: a fault of the machine."""

    flips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(self._flip)
        return x

    def _flip(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self.flips:
            return None
        self.flips = False
        flipped = gradient.clone()
        bits = flipped.view(torch.int32)
        bits[0, 0] = 0x7F800000  # exponent: all ones
        return flipped


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("machine", [False, True])
def test_a_fault_of_the_machine_is_told_from_bad_data(automatic: bool, machine: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Flips(), nn.Linear(8, 3))
    flips: Any = model[3]
    guarded = wrapped(model, fastguard.Recovery(recompute=True))
    for step in range(6):
        x, y = batch(step)
        if step == 4:
            flips.flips = machine
            x[0, 0] = x[0, 0] if machine else math.nan

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            guarded.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss.detach()

        if automatic:
            guarded.step(closure)
        else:
            closure()
            guarded.step()
        if step == 4:
            assert guarded.guard.last.skipped
            before = [p.grad.clone() for p in model.parameters()]
            buffers, random = [b.clone() for b in model.buffers()], torch.get_rng_state()
            if not automatic:
                found = guarded.guard.recompute(closure)
                assert found.verdict == ("machine" if machine else "data or model") and found.is_finite is machine
                assert found.step == 4 and bool(found.tensors) is machine
            for p, gradient in zip(model.parameters(), before, strict=True):
                torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0, equal_nan=True)
            assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
            assert torch.equal(torch.get_rng_state(), random)
    (told,) = guarded.guard.recoveries
    assert ("a transient fault of the machine" in told) is machine
    rules = [f.rule for f in guarded.guard.report().findings]
    assert ("hardware-fault" in rules) is machine


def test_when_nothing_can_be_recomputed() -> None:
    model = make()
    guarded = wrapped(model)
    with pytest.raises(RuntimeError, match="must have been asked for"):
        guarded.guard.recompute(lambda: None)
    other = wrapped(make(), fastguard.Recovery(recompute=True))
    with pytest.raises(RuntimeError, match="must follow a step that was skipped"):
        other.guard.recompute(lambda: None)
