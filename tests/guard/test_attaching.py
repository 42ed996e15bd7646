"""What is sampled beside the gradients reaches the record of its step, whichever comes first."""

from __future__ import annotations

from typing import Any

import torch
from guard_helpers import loss_at, make_model, take_step

import fastguard
from fastguard.records.samples import WeightStats
from fastguard.step.ring import JudgedStep


def weights(name: str) -> tuple[WeightStats, ...]:
    return (WeightStats(name, 4, 1.0, 0.5, 0.7),)


def guarded() -> tuple[Any, Any, fastguard.MemorySink]:
    model, memory = make_model(), fastguard.MemorySink()
    return model, fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, sinks=[memory]), memory


def test_after_the_step_was_taken() -> None:
    model, optimizer, memory = guarded()
    take_step(model, optimizer, 0)
    optimizer.guard._run.ring.attach(0, weights=weights("a"))
    assert optimizer.guard.last.weights == weights("a")
    optimizer.guard.observe(loss=0.5)
    take_step(model, optimizer, 1)
    assert optimizer.guard.last.weights == ()
    assert (memory.records[0].weights, memory.records[0].loss) == (weights("a"), 0.5)


def test_before_its_record_has_come() -> None:
    """As of a forward pass, or of a step whose record is on its way from a GPU."""
    model, optimizer, memory = guarded()
    optimizer.guard._run.ring.attach(1, weights=weights("b"))
    for step in range(3):
        take_step(model, optimizer, step)
    optimizer.guard.flush()
    assert [r.weights for r in memory.records] == [(), weights("b"), ()]


def test_of_a_record_that_was_dropped_nothing_is_kept_for_ever() -> None:
    _, optimizer, _ = guarded()
    ring = optimizer.guard._run.ring
    ring.attach(0, weights=weights("d"))
    ring.attach(1, weights=weights("e"))
    ring.arrive(JudgedStep(3, bytearray(), None, (), 1.0))
    assert optimizer.guard.last.weights == weights("e")
    optimizer.guard.flush()
    assert not ring.samples


def test_a_guard_says_of_what_it_is_and_how_far() -> None:
    model = make_model()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    for step in range(2):
        loss_at(model, step).backward()
        optimizer.step()
    assert repr(optimizer.guard) == "<fastguard.Guard of SGD at step 2, clip=GlobalNorm(1)>"
    assert "clip=None" in repr(fastguard.wrap(torch.optim.Adam(model.parameters()), model).guard)
