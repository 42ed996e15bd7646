"""Ctrl-C and SIGTERM at every place where Python lets them in: no record is lost, and none comes twice.

Python runs the handlers of signals when a function begins, and when a function written in C has returned. A profile
function is called there, too, and may do what a handler does.
"""

import contextlib
import gc
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fastguard
from fastguard.records import history as core
from fastguard.records import running
from fastguard.sinks import jsonl, memory, sink
from fastguard.step import endings, ledger, ring

HISTORY = (core, running)
FILES = {module.__file__ for module in (endings, ledger, ring, *HISTORY, jsonl, memory, sink)}
NUM_STEPS = 7
BAD_STEP = 3


@pytest.fixture(autouse=True)
def _no_guards_of_earlier_tests():
    """Their ends, where they are collected within a step, would be among the places."""
    gc.collect()


class DeadError(BaseException):
    """The process would have ended here."""


class Interruption:
    """Does something at the place number `at` in `FILES`, once; counts the places."""

    def __init__(self, at, act):
        self.at, self.act, self.count, self.place = at, act, 0, "nowhere"

    def __call__(self, frame, event, argument):
        if event in ("call", "c_return") and frame.f_code.co_filename in FILES:
            self.count += 1
            if self.count == self.at:
                sys.setprofile(None)
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({event})"
                self.act()


def steps_in(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["step"] for line in lines if "step" in line]


class Run:
    """A short training under guard: a log, and two sinks that want records."""

    def __init__(self, folder, *, lines_only):
        self.path = folder / "run.jsonl"
        self.path.unlink(missing_ok=True)
        self.p = nn.Parameter(torch.ones(3))
        self.memory, self.other = fastguard.MemorySink(), fastguard.MemorySink()
        log = fastguard.JsonlSink(self.path, tensors_every=4)
        sinks = [log] if lines_only else [self.memory, log, self.other]
        self.optimizer = fastguard.wrap(torch.optim.SGD([self.p], lr=0.1), max_norm=1.0, sinks=sinks)
        self.guard = self.optimizer.guard
        self.lines_only = lines_only

    def go(self, interruption):
        """Trains on, whatever interrupts it; returns how many steps were interrupted."""
        num_interrupted = 0
        for step in range(NUM_STEPS):
            self.p.grad = torch.full((3,), math.nan if step == BAD_STEP else 1.0 + step)
            sys.setprofile(interruption)
            try:
                self.optimizer.step()
                self.guard.observe(loss=float(step))
                if step == 5:
                    self.guard.flush()
            except KeyboardInterrupt:
                num_interrupted += 1
            finally:
                sys.setprofile(None)
        return num_interrupted

    def check(self):
        expected = list(range(self.guard._run.step))
        assert steps_in(self.path) == expected
        if not self.lines_only:
            assert self.memory.series("step") == self.other.series("step") == expected
        assert self.guard._ledger.lost() == {}


def _places(folder, *, lines_only):
    counting = Interruption(0, lambda: None)
    run = Run(folder, lines_only=lines_only)
    run.go(counting)
    run.guard.close()
    run.check()
    assert run.guard.history.num_steps == NUM_STEPS
    return counting.count


def _interrupt():
    raise KeyboardInterrupt


SHARES = [pytest.param(23, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("lines_only", [True, False])
def test_ctrl_c_anywhere_loses_no_record_and_doubles_none(lines_only, share, tmp_path):
    count = _places(tmp_path, lines_only=lines_only)
    assert count > 100
    num_interrupted = 0
    for at in range(1 + count % share, count + 1, share):
        run = Run(tmp_path, lines_only=lines_only)
        num_interrupted += run.go(Interruption(at, _interrupt))
        run.guard.flush()
        run.check()
        history = run.guard.history
        expected = list(range(run.guard._run.step))
        assert history.num_steps == len(expected) and [e.step for e in history.recent] == expected, f"at {at}"
        assert history.num_nonfinite == history.num_skipped == len(history.last_events), f"at {at}"
        assert run.guard.report().numbers["num_records_lost"] == 0
        run.guard.close()
    assert num_interrupted > 0.8 * count / share


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("lines_only", [True, False])
def test_sigterm_anywhere_finds_all_records_written(lines_only, share, tmp_path, monkeypatch):
    def die(number):
        raise DeadError

    count = _places(tmp_path, lines_only=lines_only)
    monkeypatch.setattr(endings.signal, "getsignal", lambda number: endings._on_sigterm)
    monkeypatch.setattr(endings.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(endings.signal, "raise_signal", die)
    monkeypatch.setattr(os, "kill", lambda process, number: endings._on_sigterm(number, None))
    num_ended = 0
    for at in range(1 + count % share, count + 1, share):
        monkeypatch.setattr(endings, "_has_sigterm", False)
        run = Run(tmp_path, lines_only=lines_only)
        with contextlib.suppress(DeadError):
            run.go(Interruption(at, lambda: endings._on_sigterm(15, None)))
            continue
        num_ended += 1
        run.check()
    assert num_ended > 0.8 * count / share  # the first run, which was counted, comes to more places than a later one


def test_an_interrupt_in_a_sink_reaches_neither_those_before_nor_those_after():
    class Interrupted(fastguard.MemorySink):
        def write(self, record):
            if record.step == 1:
                raise KeyboardInterrupt
            super().write(record)

    p = nn.Parameter(torch.ones(3))
    first, second, unsure, last = fastguard.MemorySink(), Interrupted(), [], fastguard.MemorySink()

    def write(record):
        unsure.append(record.step)
        if record.step == 2:
            raise SystemExit

    optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1), sinks=[first, second, write, last])
    num_raised = 0
    for _ in range(8):
        p.grad = torch.ones(3)
        try:
            optimizer.step()
        except (KeyboardInterrupt, SystemExit):
            num_raised += 1
    optimizer.guard.close()
    assert num_raised == 4  # at step 1 three times: a sink that says that it has not taken a record is given it again
    taken = list(range(optimizer.guard._run.step))
    assert first.series("step") == last.series("step") == unsure == taken
    assert second.series("step") == [step for step in taken if step != 1]
    assert list(optimizer.guard._ledger.lost().values()) == [1, 1]  # the function may have lost its record, who knows
    assert optimizer.guard.report().numbers["num_records_lost"] == 2


class Asking:
    """A sink that asks the guard for things while it has a record in hand."""

    def __init__(self, ask):
        self.ask, self.steps, self.optimizer = ask, [], None

    def write(self, record):
        self.steps.append(record.step)
        if record.step == 2:
            self.ask(self.optimizer)

    def close(self):
        self.steps.append("closed")


ASKED = {
    "report": lambda optimizer: optimizer.guard.report(),
    "flush": lambda optimizer: optimizer.guard.flush(),
    "state_dict": lambda optimizer: optimizer.guard.state_dict(),
    "history": lambda optimizer: optimizer.guard.history.num_steps,
    "close": lambda optimizer: optimizer.guard.close(),
    "detach": lambda optimizer: optimizer.guard.detach(),
}


@pytest.mark.parametrize("long_way", [False, True])
@pytest.mark.parametrize("asked", ASKED)
def test_a_sink_may_ask_the_guard_for_anything(asked, long_way, tmp_path):
    p = nn.Parameter(torch.ones(3))
    asking, memory_ = Asking(ASKED[asked]), fastguard.MemorySink()
    log = fastguard.JsonlSink(tmp_path / "run.jsonl", tensors_every=0)
    optimizer = fastguard.wrap(
        torch.optim.SGD([p], lr=0.1),
        sinks=[asking, memory_, log],
        **({"backend": "reference"} if long_way else {}),
    )
    asking.optimizer = optimizer
    guard = optimizer.guard
    for step in range(6):
        p.grad = torch.full((3,), math.nan if step == 3 else 1.0)
        optimizer.step()
        assert p.grad is not None
    guard.close()
    logged = steps_in(tmp_path / "run.jsonl")
    if asked == "detach":
        assert not p.isfinite().any()  # nobody skipped step 3
        assert memory_.series("step")[:3] == logged[:3] == [0, 1, 2]
    elif asked == "close":  # the log is closed; the others do not mind
        assert logged == [0, 1, 2] and guard._ledger.lost() == {repr(log): 3}
        assert memory_.series("step") == list(range(6))
    else:
        assert memory_.series("step") == logged == [s for s in asking.steps if s != "closed"] == list(range(6))
        assert guard.history.num_steps == 6
    assert asking.steps[-1] == "closed"
