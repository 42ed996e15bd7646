"""What a guard holds is freed by its last reference, without the garbage collector, as torch's tests want it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastguard

SETTINGS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda folder: {},
    "clipping": lambda folder: {"max_norm": 1.0},
    "a log": lambda folder: {"sinks": [fastguard.JsonlSink(folder / "run.jsonl")]},
    "sinks": lambda folder: {"sinks": [fastguard.MemorySink(), lambda record: None]},
    "activations": lambda folder: {"activations": {"every": 1, "modules": "all"}},
    "weights": lambda folder: {"weights": 1},
    "recovery": lambda folder: {"recovery": fastguard.Recovery(every=1, replay=True)},
    "everything": lambda folder: {
        "max_norm": 1e-3,
        "activations": {"every": 2},
        "weights": 2,
        "check_every": 1,
        "sinks": [fastguard.JsonlSink(folder / "run.jsonl"), fastguard.MemorySink()],
    },
}


@pytest.fixture(autouse=True)
def _no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


CASES = [(name, 3, True) for name in SETTINGS] + [("plain", 0, True), ("plain", 3, False), ("everything", 0, True)]


@pytest.mark.parametrize(("name", "num_steps", "with_model"), CASES)
def test_nothing_is_left_to_the_collector(name: str, num_steps: int, with_model: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    _step(model, torch.optim.SGD(model.parameters(), lr=0.5))
    str(fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.5)).guard.report())
    gc.freeze()  # what is there by now, torch's and the rules' own things among it, is not looked through
    given = SETTINGS[name](tmp_path)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model if with_model else None, **given)
    given.clear()
    for _ in range(num_steps):
        _step(model, optimizer)
    guard = optimizer.guard
    str(guard.report())
    refs = [weakref.ref(x) for x in (optimizer, guard, guard._run, guard._ledger, guard._judge, guard.history)]
    del optimizer, guard
    assert [ref() for ref in refs] == [None] * len(refs)
    assert gc.collect() == 0
    _step(model, torch.optim.SGD(model.parameters(), lr=0.5))  # no hook is left that calls what is gone
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_last_record_is_written_where_all_goes_at_once() -> None:
    records = fastguard.MemorySink()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fastguard.wrap(optimizer, model, activations={"every": 1, "overhead_budget": None}, sinks=[records])
    _step(model, optimizer)
    optimizer.itself = optimizer  # left to the collector, which clears weak references before anybody is told
    del optimizer, model
    assert not records.records
    gc.collect()
    assert [record.step for record in records.records] == [0]
