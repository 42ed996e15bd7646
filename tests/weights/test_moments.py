"""Second moments beside the weights: what is told of them, and the rules on them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fastguard
from fastguard.records import TrainingHistory
from fastguard.sinks import JsonlSink


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def step(model: nn.Module, optimizer: Any, number: int, scale: float = 1.0) -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    loss = scale * (model(x) - x[:, :4]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.guard.observe(loss=loss)


def found(optimizer: Any) -> dict[str, Any]:
    return fastguard.diagnosis.by_sign(optimizer.guard.report().findings)


MAKERS = {
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3), "exp_avg_sq", 1e-3),
    "adamw-fused": (lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), "exp_avg_sq", 1e-8),
    "radam": (lambda p: torch.optim.RAdam(p, lr=0.01), "exp_avg_sq", 1e-8),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.01), "square_avg", 1e-8),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_told_is_what_the_state_holds(name: str, tmp_path: Any) -> None:
    make, key, eps = MAKERS[name]
    model = make_model()
    with JsonlSink(tmp_path / "run.jsonl") as log:
        optimizer = fastguard.wrap(make(model.parameters()), model, weights=4, sinks=[log])
        for number in range(5):
            step(model, optimizer, number)
        weights = optimizer.guard.last.weights
        share = 1.0 - 0.999**5 if key == "exp_avg_sq" else 1.0
        for told, p in zip(weights, model.parameters()):
            v = optimizer.state[p][key].double()
            rms = math.sqrt(float(v.mean()) / share)
            assert told.moment_rms == pytest.approx(rms, rel=1e-5)
            assert told.effective_step == pytest.approx(0.01 / (rms + eps), rel=1e-5)
            assert (told.moment_min, told.moment_max) == (float(v[v > 0].min()), float(v.max()))
        optimizer.guard.close()
    history = TrainingHistory.from_jsonl(tmp_path / "run.jsonl")
    assert [window.last.value for _, window in history.weights.current()] == list(weights)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adafactor(p, lr=0.01)])
def test_others_have_none(make: Any) -> None:
    model = make_model()
    optimizer = fastguard.wrap(make(model.parameters()), model, weights=1)
    step(model, optimizer, 0)
    assert {w.moment_rms for w in optimizer.guard.last.weights} == {None}
    assert "moment_rms" not in optimizer.guard.last.weights[0].to_dict()


@pytest.mark.parametrize("value", [1e4, math.inf])
def test_a_moment_that_no_gradient_can_have_made(value: float) -> None:
    model = make_model()
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3), model, weights=5)
    for number in range(20):
        step(model, optimizer, number)
    optimizer.state[model[0].weight]["exp_avg_sq"][0, 0] = value  # type: ignore[index]
    for number in range(20, 26):
        step(model, optimizer, number)
    finding = found(optimizer)["moment-out-of-bounds"]
    assert (finding.severity, finding.layers) == ("critical" if value == math.inf else "warning", ("0.weight",))
    assert optimizer.guard.report().causes[0].rule == "hardware-fault"


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=10.0),  # whose decay is in the moment
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.5), amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.5),
    ],
)
@pytest.mark.parametrize("clipped", [None, 0.01])
def test_sound_runs_have_moments_within_bounds(make: Any, clipped: float | None) -> None:
    model = make_model()
    optimizer = fastguard.wrap(make(model.parameters()), model, weights=3, max_norm=clipped)
    for number in range(60):
        step(model, optimizer, number, 100.0 if number % 20 == 10 else 1.0)
    assert "moment-out-of-bounds" not in found(optimizer)


def test_a_state_from_before_the_guard_is_no_fault() -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        (1e3 * model(torch.randn(4, 6)).square().mean()).backward()
        optimizer.step()
    optimizer = fastguard.wrap(optimizer, model, weights=5)
    for number in range(40):
        step(model, optimizer, number)
    assert "moment-out-of-bounds" not in found(optimizer)
