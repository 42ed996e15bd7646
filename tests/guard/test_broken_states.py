"""A saved state is loaded whole, or refused in words with nothing changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_helpers import guarded_model, make_model, take_step, train
from torch import nn

import fastguard
from fastguard.clip import ClipPolicy
from fastguard.records import strict_json


def _sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **settings)


def _state_of_a_run() -> tuple[nn.Module, Any, dict[str, Any]]:
    model, optimizer = guarded_model(max_norm=0.5, weights=2)
    for step in range(6):
        take_step(model, optimizer, step, bad=math.nan if step in (2, 5) else None)
        optimizer.guard.observe(loss=1.0, val_loss=2.0)
    return model, optimizer, strict_json.encode(optimizer.guard.state_dict())


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not a dict": (lambda s: [s], "`state` must be a dict"),
    "older": (lambda s: s.update(version=0), "of version 0"),
    "newer": (lambda s: s.update(version=2), "of version 2"),
    "an older history": (
        lambda s: s["history"].update(version=1),
        r"version 3, got 1 - at `state\['history'\]\['version'\]`",
    ),
    "without a step": (lambda s: s.pop("step"), r"without \['step'\]"),
    "a step of text": (lambda s: s.update(step="6"), r"must be a whole number, got '6' - at `state\['step'\]`"),
    "a step beyond counting": (lambda s: s.update(step=2**60), r"below 2\*\*53"),
    "a step of NaN": (lambda s: s.update(step=math.nan), r"`state\['step'\]`"),
    "names that are none": (lambda s: s.update(skipped_tensors=[1]), r"`state\['skipped_tensors'\]\[0\]`"),
    "a run that is none": (lambda s: s.update(skipped_run=None), r"a list, got None - at `state\['skipped_run'\]`"),
    "without the clean steps": (lambda s: s["history"].pop("clean"), r"missing - at `state\['history'\]\['clean'\]`"),
    "a counter of text": (lambda s: s["history"].update(num_steps="6"), r"\['history'\]\['num_steps'\]`"),
    "a norm of text": (
        lambda s: s["history"]["recent"][1].__setitem__(1, "x"),
        r"must be a number, got 'x' - at `state\['history'\]\['recent'\]\[1\]\['norm'\]`",
    ),
    "a short entry": (lambda s: s["history"]["clean"][0].pop(), r"must have 9 entries, got 8 - at .*\['clean'\]\[0\]`"),
    "a tensor without its numbers": (lambda s: s["history"]["tensors"][-1].pop(), r"\['tensors'\]\['_data'\]`"),
    "a tensor seen less than never": (
        lambda s: s["history"]["tensors"][-1].__setitem__(3, -1.0),
        r"must be finite and >= 0, got -1.0 - at .*\['tensors'\]\['_data'\]\[3\]`",
    ),
    "a sample that is none": (
        lambda s: s["history"]["weights"][3]["0.weight"][1][1].pop("norm"),
        r"\['weights'\]\['_windows'\]\['0.weight'\]\[1\]\[1\]\['norm'\]`",
    ),
    "events that do not fit": (lambda s: s["history"].update(last_events=[]), r"\['history'\]\['num_nonfinite'\]`"),
    "a model of text": (lambda s: s["history"].update(model="m"), r"\['history'\]\['model'\]`"),
    "a severity of one's own": (
        lambda s: s["checkup"]["severities"].update(odd="bad"),
        r"\['checkup'\]\['severities'\]\['odd'\]`",
    ),
    "other evidence": (
        lambda s: s["evidence"].update(batches=[1]),
        r"must have 5 numbers, got 1 - at `state\['evidence'\]\['batches'\]`",
    ),
    "a policy of text": (lambda s: s.update(clip="x"), r"`state\['clip'\]`"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_state_is_loaded_whole_or_not_at_all(damage: Any, message: str) -> None:
    _, _, state = _state_of_a_run()
    other = make_model()
    optimizer = _sgd(other, max_norm=0.5)
    train(other, optimizer, range(3))
    before = copy.deepcopy(optimizer.guard.state_dict())
    result = damage(state)
    with pytest.raises(ValueError, match=message):
        optimizer.guard.load_state_dict(result if isinstance(result, list) and result[:1] == [state] else state)
    assert optimizer.guard.state_dict() == before
    optimizer.guard.observe(loss=1.0)  # the step just taken is still held
    assert optimizer.guard.last.loss == 1.0
    train(other, optimizer, range(3, 6))
    assert optimizer.guard.last.step == 5


def test_a_policy_that_refuses_its_state_changes_nothing() -> None:
    class Counting(ClipPolicy):
        count = 0

        def limits(self) -> tuple[float, float]:
            return math.inf, math.inf

        def observe(self, norms: Any, loss: float | None = None) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = -1
            self.count = state["count"]

    model, optimizer = guarded_model(clip=Counting())
    train(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.guard.state_dict())
    train(model, optimizer, range(3, 5))
    before = copy.deepcopy(optimizer.guard.state_dict())
    with pytest.raises(ValueError, match=r"clip policy .*count"):
        optimizer.guard.load_state_dict({**state, "clip": {}})
    assert optimizer.guard.state_dict() == before and optimizer.guard.clip.count == 5
    optimizer.guard.load_state_dict(state)
    assert optimizer.guard.clip.count == 3 and optimizer.guard._run.step == 3
