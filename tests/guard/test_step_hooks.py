"""The step hooks in C++ against those in Python: the same records, lines and parameters, and nothing kept alive."""

import copy
import gc
import json
import math
import pickle
import sys

import pytest
import torch
from guard_helpers import assert_identical, loss_at, make_model, poison, snapshot

import fastguard
from fastguard.kernels import cpu
from fastguard.observers import batches
from fastguard.observers.batches import schedule_for
from fastguard.sinks import JsonlSink
from fastguard.step import hooks
from fastguard.step.guard import Guard

pytestmark = pytest.mark.skipif(cpu.extension is None, reason="the extension is not installed")
NUM_STEPS = 330
SERIES = ["step", "grad_norm", "loss", "val_loss", "learning_rate", "num_clipped", "num_nonfinite", "num_skipped"]
NAN_STEPS, CLOSURE_STEPS, RAISING_STEPS = (57, 203), (80, 260), (120, 121, 290)


@pytest.fixture
def in_python(monkeypatch):
    """Call `undo` to get C++ back."""
    monkeypatch.setattr(hooks, "StepPreHook", None)
    monkeypatch.setattr(Guard, "observe", Guard.observe.__wrapped__)
    monkeypatch.setattr(batches, "schedule_for", lambda clock, model: schedule_for(None, model))
    return monkeypatch


class _StopError(Exception):
    pass


def _raise(*_):
    raise _StopError


def _train(path, *, early=False, max_norm=0.5):
    """A training with steps of every kind; with `early`, each loss is observed ahead of its step."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = fastguard.wrap(optimizer, model, max_norm=max_norm, sinks=[JsonlSink(path, tensors_every=50)])
    for step in range(NUM_STEPS):
        if step in CLOSURE_STEPS:

            def closure():
                optimizer.zero_grad()
                loss = loss_at(model, step)  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        loss = loss_at(model, step)
        if early:
            optimizer.guard.observe(loss)
        loss.backward()
        if step in NAN_STEPS:
            poison(model)
        if step in RAISING_STEPS:
            handle = optimizer.register_step_pre_hook(_raise)
            with pytest.raises(_StopError):
                optimizer.step()
            handle.remove()
            continue
        optimizer.step()
        if not early and step % 3:
            optimizer.guard.observe(loss=loss)
        if step % 50 == 49:
            model.eval()
            with torch.no_grad():
                optimizer.guard.observe(val_loss=loss_at(model, 10_000 + step))
            model.train()
        if step == 150:
            assert not hasattr(copy.deepcopy(optimizer), "_guard")
            pickle.loads(pickle.dumps((optimizer, copy.deepcopy(model))))
    return model, optimizer


def _lines(path):
    """The lines of steps; those about the model come when there is time for them."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["time"]
    return [line for line in lines if "step" in line]


@pytest.mark.parametrize(("early", "max_norm"), [(False, 0.5), (True, None)])
def test_cpp_and_python_do_the_same(early, max_norm, tmp_path, in_python):
    model, optimizer = _train(tmp_path / "python", early=early, max_norm=max_norm)
    in_python.undo()
    twin, other = _train(tmp_path / "cpp", early=early, max_norm=max_norm)
    assert type(other.guard._hooks[0]._handles[0]) is type(optimizer.guard._hooks[0]._handles[0])
    assert_identical(snapshot(model, optimizer), snapshot(twin, other))
    expected, found = optimizer.guard, other.guard
    assert found.last == expected.last or math.isnan(found.last.norm)
    for guard in (expected, found):
        guard.close()
    for name in SERIES:
        assert repr(getattr(found.history, name)) == repr(getattr(expected.history, name))
    lines = _lines(tmp_path / "cpp")
    assert lines == _lines(tmp_path / "python") and [line["step"] for line in lines] == expected.history.step
    assert len(found.history.step) >= NUM_STEPS - len(RAISING_STEPS)
    assert found.history.num_skipped == expected.history.num_skipped == len(NAN_STEPS)


def _hand_set(num_steps, optimizer, loss):
    for _ in range(num_steps):
        optimizer.step()
        optimizer.guard.observe(loss)


def test_thousands_of_steps_leak_nothing(tmp_path):
    model = make_model()
    optimizer = fastguard.wrap(
        torch.optim.SGD(model.parameters(), lr=1e-9), model, max_norm=1e9, sinks=[JsonlSink(tmp_path / "log")]
    )
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    guard, loss = optimizer.guard, torch.tensor(0.5)
    _hand_set(1500, optimizer, loss)
    run = guard._run
    held = [guard, run, run.ring, run.ring.headers, run.ring.found, run.clock, guard._ledger, run.clip, loss, optimizer]
    held += [guard._hooks[0], *model.parameters(), *(p.grad for p in model.parameters())]

    def counts():
        gc.collect()
        return [sys.getrefcount(one) for one in held]

    before, num_none, num_blocks = counts(), sys.getrefcount(None), sys.getallocatedblocks()
    _hand_set(5000, optimizer, loss)
    assert counts() == before
    assert abs(sys.getrefcount(None) - num_none) < 1000
    assert sys.getallocatedblocks() - num_blocks < 5000


def test_hooks_refuse_what_is_not_theirs():
    extension = cpu.extension
    for make in (extension.StepPreHook, extension.StepPostHook):
        with pytest.raises(TypeError):
            make(object(), print)
    with pytest.raises(TypeError):
        extension.ScheduleState(1, make_model())
    plain = extension.HooksState()
    calls = []
    hook = extension.StepPreHook(plain, lambda *given: calls.append(given))
    hook(1, (2,), {})  # no state that it knows: Python takes it
    hook(1)
    assert calls == [(1, (2,), {}), (1,)]
