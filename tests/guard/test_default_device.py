"""`torch.set_default_device`: what the guard keeps on the host stays there, whatever device new tensors go to."""

import pytest
import torch
from guard_helpers import assert_identical, poison, snapshot
from torch import nn

import fastguard

EACH = {"every": 1, "overhead_budget": None}
SETTINGS = {
    "everything": {"activations": EACH, "weights": 2, "recovery": fastguard.Recovery(every=2), "max_norm": 1.0},
    "clipping in the optimizer": {"max_norm": 1e-3, "clip_through": "grad_scale"},
    "plain torch": {"backend": "reference", "max_norm": 1e-3, "activations": EACH, "weights": 2},
    "tensor by tensor": {"clip": fastguard.AGC(0.01)},
    "a scaler": {"max_norm": 1e-3},
}


@pytest.fixture
def elsewhere():
    """Has new tensors hold no data: what should be on the host cannot be read then."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


def _trained(settings, scaler, away):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), fused=scaler is None), model, **settings)
    x, y = torch.randn(32, 4), torch.randint(2, (32,))
    away()
    for step in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step == 3:
            poison(model)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.guard.observe(loss=loss)
    return snapshot(model, optimizer), optimizer.guard


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_the_cpu(name, elsewhere):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=4.0) if name == "a scaler" else None

    expected, guard = _trained(SETTINGS[name], scaler(), lambda: None)
    got, guard_elsewhere = _trained(SETTINGS[name], scaler(), elsewhere)
    assert_identical(got, expected)
    assert guard_elsewhere.last.norm == guard.last.norm
    assert guard_elsewhere.last.activations == guard.last.activations
    assert str(guard_elsewhere.report()).splitlines()[0] == str(guard.report()).splitlines()[0]
    assert not guard_elsewhere._run.failures.counts()
    assert guard_elsewhere.history.num_skipped == 1
