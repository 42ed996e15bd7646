"""What the integrations share, without a framework."""

import logging
import math

import pytest
import torch

import fastguard
from fastguard.integrations.common import StepLoss, figures, guard_of, replace_method


def make():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, scale=1.0):
    optimizer.zero_grad()
    (model(torch.ones(3, 2)).sum() * scale).backward()
    optimizer.step()


def test_a_guard_that_is_there_is_kept(caplog):
    model, optimizer = make()
    guard = guard_of(optimizer, model, {"max_norm": 1.0, "sinks": [fastguard.MemorySink()]})
    sink = fastguard.MemorySink()
    with caplog.at_level(logging.WARNING, "fastguard"):
        assert guard_of(optimizer, model, {"max_norm": 1.0, "sinks": [sink]}) is guard
        assert guard_of(optimizer, model, {"max_norm": None}) is guard
        assert not caplog.records
        assert guard_of(optimizer, model, {"max_norm": 2.0}) is guard and guard.clip.max_norm == 1.0
    assert "['max_norm'] of the callback is not used" in caplog.text
    step(model, optimizer)
    guard.flush()
    assert len(sink.records) == 1


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_the_loss_of_a_step(kind):
    losses = StepLoss()
    assert losses.take(mean=True) is None
    for value in (1.0, None, 2.0, 6.0):
        losses.add(None if value is None else kind(value))
    assert float(losses.take(mean=True)) == 3.0
    losses.add(kind(1.0))
    losses.add(kind(2.0))
    assert float(losses.take(mean=False)) == 3.0
    assert losses.take(mean=False) is None


def test_figures_count_the_step_just_taken():
    model, optimizer = make()
    guard = guard_of(optimizer, model, {"max_norm": 1.0})
    assert figures([guard]) == {}
    for index, scale in enumerate((1.0, math.nan, 1.0)):
        step(model, optimizer, scale)
        guard.observe(loss=float(index))
        seen = figures([guard])
        assert seen["fastguard/loss"] == index
        assert seen["fastguard/num_skipped"] == (index > 0)
        assert seen["fastguard/num_clipped"] == (1, 1, 2)[index]
    guard.flush()
    assert figures([guard]) == seen
    assert figures([guard, guard]).keys() == {f"fastguard/{i}{key[9:]}" for i in (0, 1) for key in seen}


class Owner:
    def method(self):
        return "its own"


def test_a_method_is_put_back():
    owner = Owner()
    first = replace_method(owner, "method", lambda method: f"({method()})")
    second = replace_method(owner, "method", lambda method: f"[{method()}]")
    assert owner.method() == "[(its own)]"
    second()
    assert owner.method() == "(its own)"
    first()
    assert owner.method() == "its own" and "method" not in owner.__dict__
    late = replace_method(owner, "method", lambda method: "ours")
    owner.method = lambda: "somebody's"
    late()
    assert owner.method() == "somebody's"


def test_integrations_are_imported_when_used():
    with pytest.raises(AttributeError, match=r"no attribute 'keras'\. Known names: accelerate, fastai, ignite"):
        _ = fastguard.integrations.keras
    assert {"transformers", "lightning"} <= set(dir(fastguard.integrations))
