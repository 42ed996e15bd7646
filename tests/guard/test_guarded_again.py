"""`wrap` of what has a guard: a cell of a notebook that is run again, `partial_fit`, a setting that was changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guard_helpers import make_model, take_step, train
from torch import nn

import fastguard


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


SETTINGS: dict[str, Any] = {
    "nothing": dict,
    "max_norm": lambda: {"max_norm": 1.0},
    "a policy": lambda: {"clip": fastguard.PerGroup({"0.*": 0.5, "*": fastguard.Percentile(90)})},
    "what is watched": lambda: {"activations": {"every": 5}, "weights": {"every": 3}},
    "recovery": lambda: {"recovery": fastguard.Recovery(every=20)},
    "names": lambda: {"names": ["a", "b", "c", "d"]},
}


@pytest.mark.parametrize("make", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_same_settings_leave_the_guard_and_its_steps(make: Any) -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, **make())
    train(model, optimizer, range(4))
    guard = optimizer.guard
    assert fastguard.wrap(optimizer, model, **make()) is optimizer
    assert optimizer.guard is guard
    take_step(model, optimizer, 4)
    assert guard.last.step == 4 and len(optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"max_norm": 1.0}, {"max_norm": 2.0}, "clip"),
        ({}, {"max_norm": 2.0}, "clip"),
        ({"clip": fastguard.Percentile(90)}, {"clip": fastguard.Percentile(95)}, "clip"),
        ({}, {"skip_nonfinite": False, "check_every": 7}, "skip_nonfinite, check_every"),
        ({"names": list("abcd")}, {"names": list("abce")}, "names"),
        ({"recovery": True}, {"recovery": fastguard.Recovery(every=7)}, "recovery"),
    ],
)
def test_other_settings_are_refused_by_name_or_replace(before: Any, after: Any, named: str) -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, **before)
    take_step(model, optimizer, 0)
    guard = optimizer.guard
    with pytest.raises(fastguard.AlreadyGuardedError, match=f"with another {named}. Use optimizer.guard, or.*replace"):
        fastguard.wrap(optimizer, model, **after)
    assert optimizer.guard is guard
    fastguard.wrap(optimizer, model, **after, on_guarded="replace")
    assert optimizer.guard is not guard and len(optimizer._optimizer_step_pre_hooks) == 1
    take_step(model, optimizer, 1)
    assert (guard.history.num_steps, optimizer.guard.last.step) == (1, 0)


def test_other_optimizers_or_another_model_are_refused() -> None:
    model = make_model()
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model[0], model[2]))
    fastguard.wrap([first, second], model)
    assert fastguard.wrap([second, first], model) == [second, first]
    assert fastguard.wrap([first, second], nn.DataParallel(model))[0] is first  # the same one inside
    for given, of, named in ((first, model, "optimizers"), ([first, second], make_model(), "model")):
        with pytest.raises(fastguard.AlreadyGuardedError, match=f"another {named}"):
            fastguard.wrap(given, of)
    with pytest.raises(ValueError, match=r"`on_guarded` must be one of \['reuse', 'raise', 'replace'\], got 'again'"):
        fastguard.wrap(first, model, on_guarded="again")


def test_sinks_that_are_given_again_take_the_place_of_the_old_ones(tmp_path: Path) -> None:
    """Else the list that the cell has made anew would stay empty."""
    model, path = make_model(), tmp_path / "run.jsonl"
    first, both = fastguard.MemorySink(), fastguard.MemorySink()
    optimizer = fastguard.wrap(_sgd(model), model, sinks=[first, both, fastguard.JsonlSink(path)])
    old = optimizer.guard._ledger.sinks[2].sink
    train(model, optimizer, range(3))
    second = fastguard.MemorySink()
    fastguard.wrap(optimizer, model, sinks=[second, both, fastguard.JsonlSink(path)])
    with pytest.raises(ValueError, match="must be open to write"):
        old.write(optimizer.guard.last)
    train(model, optimizer, range(3, 5))
    fastguard.wrap(optimizer, model)  # none are given: these stay
    take_step(model, optimizer, 5)
    optimizer.guard.close()
    steps = [[r.step for r in sink.records] for sink in (first, second, both)]
    assert steps == [[0, 1, 2], [3, 4, 5], [0, 1, 2, 3, 4, 5]]
    log = fastguard.sinks.read_jsonl(path)
    assert [r["step"] for r in log] == [0, 1, 2, 3, 4, 5]


def test_a_guard_says_of_what_it_is_and_how_far() -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, max_norm=1.0)
    train(model, optimizer, range(2))
    assert repr(optimizer.guard) == "<fastguard.Guard of SGD at step 2, clip=GlobalNorm(1)>"
    assert "clip=None" in repr(fastguard.wrap(torch.optim.Adam(model.parameters()), model).guard)
