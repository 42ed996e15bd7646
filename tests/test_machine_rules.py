"""The findings on page faults, swapping and cores, and what the process is read for them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import fastguard
from fastguard.observers import resources
from fastguard.observers.resources import MIN_SECONDS, MIN_STEPS, SETTLED_AFTER, ResourceUse

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


def test_an_idle_machine_and_one_that_is_not_known():
    assert found() == set()
    assert not signs_in(run(falling_losses(50))).keys() & set(RULES)


def test_other_allocators_are_left_alone():
    assert found(page_faults=1e6, system_share=0.5, is_glibc=0.0) == set()


class Machine:
    """Counters that a test turns on; as of a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.seconds, self.faults, self.thread = 0, 0.0, 0, 1
        monkeypatch.setattr(resources, "_usage", self.usage)
        monkeypatch.setattr(resources.time, "perf_counter", lambda: self.seconds)

    def usage(self, step: int) -> Any:
        cpu = 0.5 * self.seconds
        return resources._Usage(step, self.seconds, cpu, 0.1 * cpu, self.faults, 0, 0.25 * self.seconds, self.thread)

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


def test_short_windows_wait(counters):
    use = ResourceUse()
    counters.train(SETTLED_AFTER, 0)
    use.facts(counters.step)
    counters.train(MIN_STEPS - 1, 700)
    assert use.facts(counters.step) == {}  # too few steps: the window goes on
    counters.train(1, 700)
    use.facts(counters.step)
    counters.train(40, 700)
    assert use.facts(counters.step)["page_faults"] == 700.0
    counters.step, counters.seconds = counters.step + 1000, counters.seconds + 0.9 * MIN_SECONDS
    assert use.facts(counters.step) == {}


@pytest.mark.parametrize("change", ["resumed", "thread"])
def test_what_cannot_be_compared_begins_again(counters, change):
    use = ResourceUse()
    for _ in range(3):
        counters.train(SETTLED_AFTER, 700)
        facts = use.facts(counters.step)
    assert facts
    if change == "resumed":
        counters.step = SETTLED_AFTER
        counters.seconds += 10.0
    else:
        counters.train(MIN_STEPS, 700)
        counters.thread = 2
    assert use.facts(counters.step) == {}
    counters.train(MIN_STEPS, 100)
    assert use.facts(counters.step) == {}
    counters.train(MIN_STEPS, 100)
    assert use.facts(counters.step)["page_faults"] == 100.0


def test_a_guard_notes_what_its_process_used(monkeypatch):
    monkeypatch.setattr(resources, "MIN_SECONDS", 0.0)
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1), check_every=50)
    for _ in range(300):
        p.grad = torch.ones(4)
        optimizer.step()
    used = optimizer.guard.report() and optimizer.guard.history.model.resources
    assert 0.0 <= used["system_share"] <= 1.0 and used["page_faults"] >= 0.0 and used["major_faults"] >= 0.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, which Linux has")
def test_waiting_for_a_core_is_measured():
    """Two busy processes on the same core: each waits about half of the time."""
    import os

    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    script = f"""
import os, subprocess, sys, time
from fastguard.observers import resources
other = subprocess.Popen([sys.executable, "-c", {code!r}])
try:
    os.sched_setaffinity(0, [{core}])
    time.sleep(0.3)
    before = resources._usage(0)
    while time.perf_counter() < before.seconds + 1.0:
        pass
    print(resources._per_step(before, resources._usage(1))["core_wait_share"])
finally:
    other.kill()
    other.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    if not os.path.exists("/proc/thread-self/schedstat"):
        pytest.skip("this kernel keeps no account of waiting")
    assert 0.2 < float(done.stdout) < 1.0
