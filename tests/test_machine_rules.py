"""The findings on page faults, swapping and cores, and what the process is read for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastguard
from fastguard.observers import resources
from fastguard.observers.resources import SETTLED_AFTER, ResourceUse

from made_runs import falling_losses, machine, run, signs_in

RULES = ("page-faults", "swapping", "starved-of-cores")


def found(**used: float) -> set[str]:
    history = run(falling_losses(50), resources=machine(**used))
    return signs_in(history).keys() & {*RULES}


@pytest.mark.parametrize(
    ("rule", "used"),
    [
        ("page-faults", {"page_faults": 1000.0, "system_share": 0.1}),
        ("swapping", {"major_faults": 1.0, "swapped_bytes": 1.0}),
        ("starved-of-cores", {"core_wait_share": 0.2}),
    ],
)
def test_each_limit(rule, used):
    assert found(**used) == {rule}
    for name in used:
        assert found(**{**used, name: used[name] * 0.99 if used[name] != 1.0 else 0.0}) == set()


class Machine:
    """Counters that a test turns on; as of a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.seconds, self.faults, self.thread = 0, 0.0, 0, 1
        monkeypatch.setattr(resources, "_usage", self.usage)
        monkeypatch.setattr(resources.time, "perf_counter", lambda: self.seconds)

    def usage(self, step: int) -> Any:
        cpu = 0.5 * self.seconds
        used = {"cpu_s": cpu, "system_s": 0.1 * cpu, "page_faults": self.faults, "major_faults": 0}
        at = {"step": step, "seconds": self.seconds, "core_wait_s": 0.25 * self.seconds, "thread": self.thread}
        return {**used, **at}

    def train(self, num_steps: int, faults_a_step: int) -> None:
        self.step += num_steps
        self.seconds += 0.1 * num_steps
        self.faults += faults_a_step * num_steps


@pytest.fixture
def counters(monkeypatch):
    return Machine(monkeypatch)


def test_two_windows_are_compared_and_the_smaller_one_counts(counters):
    use = ResourceUse()
    assert use.facts(0) == {}
    counters.train(SETTLED_AFTER, 10_000)  # the first steps count for nothing
    assert use.facts(counters.step) == {}
    counters.train(40, 500)
    assert use.facts(counters.step) == {}  # one window
    counters.train(40, 200)
    facts = use.facts(counters.step)
    assert facts["page_faults"] == 200.0
    assert facts["system_share"] == pytest.approx(0.1) and facts["core_wait_share"] == pytest.approx(0.25)
    counters.train(40, 900)
    assert use.facts(counters.step)["page_faults"] == 200.0
    counters.train(40, 900)
    assert use.facts(counters.step)["page_faults"] == 900.0


def test_a_guard_notes_what_its_process_used(monkeypatch):
    monkeypatch.setattr(resources, "MIN_SECONDS", 0.0)
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1), check_every=50)
    for _ in range(300):
        p.grad = torch.ones(4)
        optimizer.step()
    used = optimizer.guard.report() and optimizer.guard.history.model.resources
    assert 0.0 <= used["system_share"] <= 1.0 and used["page_faults"] >= 0.0 and used["major_faults"] >= 0.0
