"""Trouble planted in recorded norms, and what a rule is asked about it."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

pytest.importorskip("benchmarks.protection", reason="the experiment is not beside these tests", exc_type=ImportError)

import fastguard
from benchmarks.protection import norms, replay
from benchmarks.protection.rivals import FixedNorm, Rule


def steady(count=300):
    return norms.Trace("steady", tuple((0.6, 0.8) for _ in range(count)), (1.0,) * count)


def test_a_trace_is_what_the_guard_recorded_without_what_was_skipped():
    p = torch.nn.Parameter(torch.zeros(2))
    sink = fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1), sinks=[sink])
    for gradient in ([3.0, 4.0], [float("nan"), 1.0], [0.0, 2.0]):
        p.grad = torch.tensor(gradient)
        optimizer.step()
        optimizer.guard.observe(loss=1.5)
    optimizer.guard.close()
    trace = norms.trace_of("run", sink.records)
    assert trace.norms == ((5.0,), (2.0,)) and trace.losses == (1.5, 1.5)


def test_what_is_planted_stays_within_the_trace_and_depends_on_the_trace_alone():
    trace = steady()
    found = norms.plants(trace, random.Random(0))
    assert found == norms.plants(trace, random.Random(0))
    assert {plant.kind for plant in found} == {"spike", "burst", "early spike"}
    for plant in found:
        room = norms.EARLY if plant.kind == "early spike" else range(norms.LATE, len(trace))
        assert plant.start in room and plant.steps[-1] < len(trace)
    assert norms.plants(steady(60), random.Random(0)) == []


def test_scaling_and_prolonging_leave_the_trace_as_it_was():
    trace = steady(100)
    spiked = trace.scaled(range(40, 42), 3.0)
    assert [spiked.total(i) for i in (39, 40, 41, 42)] == pytest.approx([1.0, 3.0, 3.0, 1.0])
    assert trace == steady(100)
    long = trace.prolonged(50, random.Random(0))
    assert len(long) == len(long.losses) == 150 and long.norms[:100] == trace.norms


def test_a_rule_that_does_nothing_and_one_that_clips():
    trace = steady()
    idle = replay.ask(Rule, trace)
    assert idle["healthy"] == {"trace": "steady", "num_steps": 300, "num_acted": 0}
    assert [run["largest"] for run in idle["planted"]] == pytest.approx([run["factor"] for run in idle["planted"]])
    assert idle["level"]["num_damped"] == 0
    clipped = replay.ask(lambda: FixedNorm(1.5), trace)
    assert all(run["largest"] == pytest.approx(1.5) for run in clipped["planted"])
    assert clipped["level"]["num_damped"] == len(trace) - clipped["level"]["start"] + norms.AFTER_LEVEL
    assert replay.ask(Rule, steady(120))["level"] is None
    always = replay.ask(lambda: FixedNorm(0.5), trace)
    assert always["level"]["num_damped"] == 0  # it damps as many without the change


def test_calm_is_a_trace_whose_own_norms_keep_below_twice_their_median():
    assert replay.is_calm(steady())
    restless = steady()
    for step in range(110, 300, 20):
        restless = restless.scaled(range(step, step + 1), 2.5)
    assert not replay.is_calm(restless)


def test_all_rules_meet_the_same_trouble():
    a, b = replay.ask(Rule, steady()), replay.ask(lambda: FixedNorm(1.5), steady())
    assert [(p["kind"], p["start"], p["factor"]) for p in a["planted"]] == [
        (p["kind"], p["start"], p["factor"]) for p in b["planted"]
    ]
    assert a["level"]["start"] == b["level"]["start"]
    assert dataclasses.is_dataclass(norms.Plant)
