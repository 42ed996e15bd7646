"""Copies of a guarded optimizer, its state on disk, and torch.distributed.checkpoint."""

import copy
import io
import json
import math
import pickle

import pytest
import torch
from guard_helpers import adamw, assert_identical, guarded_model, make_model, snapshot, take_step, train, twins
from optimizer_cases import CASES
from torch.distributed.checkpoint import state_dict as dcp

import fastguard
from fastguard.records.values import MisfitError


def _through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def _through_torch_save(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {
    "pickle": _through_pickle,
    "deepcopy": copy.deepcopy,
    "torch.save": _through_torch_save,
}
every_way = pytest.mark.parametrize("copied", WAYS.values(), ids=WAYS)


@every_way
def test_trap_2_9_a_copy_is_unguarded_and_says_how_to_guard_it(copied):
    model, guarded = guarded_model(adamw, max_norm=1e-3)
    take_step(model, guarded, 0)
    model_copy, twin = copied((model, guarded))  # together, so that they share their parameters
    for ask in (fastguard.Guard.of, lambda optimizer: optimizer.guard):
        with pytest.raises(fastguard.NotGuardedError, match=r"AdamW is not guarded.*fastguard\.wrap\(optimizer, model"):
            ask(twin)
    assert not hasattr(twin, "guard")

    plain = copy.deepcopy(model)
    optimizer = adamw(plain.parameters())
    optimizer.load_state_dict(copy.deepcopy(guarded.state_dict()))
    train(plain, optimizer, [1, 2])
    train(model_copy, twin, [1, 2])  # neither clipped nor recorded
    assert_identical(snapshot(model_copy, twin), snapshot(plain, optimizer))
    guarded.guard.flush()
    assert guarded.guard.history.step == [0]

    fastguard.wrap(twin, model_copy, max_norm=1e-3)
    take_step(model_copy, twin, 3)
    assert twin.guard.last.clipped and twin.guard.last.step == 0
    assert guarded.guard.last.step == 0  # the original's guard saw nothing of it
    take_step(model, guarded, 1)
    assert guarded.guard.last.step == 1 and twin.guard.last.step == 0


@pytest.mark.thinned(n=4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_state_goes_into_and_out_of_a_guarded_optimizer(case):
    plain = make_model(case.model)
    model = copy.deepcopy(plain)
    optimizer = case.make(plain.parameters())
    train(plain, optimizer, range(3), closure=case.closure)
    state = _through_torch_save(optimizer.state_dict())

    model.load_state_dict(plain.state_dict())
    guarded = fastguard.wrap(case.make(model.parameters()), model, max_norm=1e6)
    train(model, guarded, [7], closure=case.closure)  # some state of its own, which has to go
    model.load_state_dict(plain.state_dict())
    guarded.load_state_dict(copy.deepcopy(state))  # a copy: loading does not make one
    other = copy.deepcopy(plain)
    unguarded = case.make(other.parameters())
    unguarded.load_state_dict(copy.deepcopy(state))
    assert_identical(guarded.state_dict(), unguarded.state_dict())

    train(other, unguarded, range(3, 6), closure=case.closure)
    train(model, guarded, range(3, 6), closure=case.closure)
    assert_identical(snapshot(model, guarded), snapshot(other, unguarded))
    assert_identical(_through_torch_save(guarded.state_dict()), unguarded.state_dict())
    guarded.guard.flush()
    assert guarded.guard.history.step == [0, 1, 2, 3]


DCP_CASES = [case for case in CASES if case.model == "mlp" and not case.closure and case.id != "GroupCounter"]


@pytest.mark.parametrize("case", DCP_CASES, ids=lambda case: case.id)
def test_trap_2_8_the_step_that_makes_state_is_no_training_step(case):
    plain, optimizer, model, guarded = twins(case.make, kind=case.model, max_norm=1e-3)
    assert_identical(_dcp_state(model, guarded), _dcp_state(plain, optimizer))
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    assert guarded.guard.last is None
    take_step(model, guarded, 0)
    assert guarded.guard.last.step == 0


def _dcp_state(model, optimizer):
    return copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_training_step_without_rate_or_without_gradient_is_recorded(lr):
    """Only both together, on a `step(closure=None)` and without state, are what checkpointing does."""
    model, guarded = guarded_model(lambda p: torch.optim.SGD(p, lr=lr))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    guarded.step()
    assert guarded.guard.last.step == 0
    for p in model.parameters():
        p.grad = torch.full_like(p, 1.0 if lr == 0.0 else 0.0)
    guarded.step(closure=None)
    assert guarded.guard.last.step == 1


def _records(model, guarded, steps, bad=()):
    for step in steps:
        take_step(model, guarded, step, bad=math.nan if step in bad else None)
        guarded.guard.observe(loss=0.1 * step)


@pytest.mark.parametrize("stored", ["torch.save", "json"])
def test_a_run_that_was_saved_and_resumed_is_the_run_that_was_not(stored):
    whole = make_model()
    model = copy.deepcopy(whole)
    sink, first, second = (fastguard.MemorySink() for _ in range(3))
    guarded = fastguard.wrap(adamw(whole.parameters()), whole, max_norm=0.1, max_consecutive_skips=3, sinks=[sink])
    _records(whole, guarded, range(10), bad=(1, 4, 5))
    guarded.guard.flush()

    half = fastguard.wrap(adamw(model.parameters()), model, max_norm=0.1, max_consecutive_skips=3, sinks=[first])
    _records(model, half, range(5), bad=(1, 4))
    state = half.guard.state_dict()
    # Plain data: a load that allows nothing else takes it, and so does JSON.
    if stored == "json":
        state = json.loads(json.dumps(state, allow_nan=False))
    else:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
    checkpoint = copy.deepcopy((model.state_dict(), half.state_dict()))
    half.guard.close()

    other = make_model(seed=5)
    other.load_state_dict(checkpoint[0])
    resumed = adamw(other.parameters())
    resumed.load_state_dict(checkpoint[1])
    fastguard.wrap(resumed, other, max_norm=0.1, max_consecutive_skips=3, sinks=[second])
    resumed.guard.load_state_dict(state)
    _records(other, resumed, range(5, 10), bad=(5,))
    resumed.guard.flush()

    assert_identical(snapshot(other, resumed), snapshot(whole, guarded))
    assert [*first.records, *second.records] == list(sink.records)
    assert _without_times(resumed.guard.state_dict()) == _without_times(guarded.guard.state_dict())
    assert resumed.guard.history.longest_skip_run == 2  # steps 4 and 5: the run went on across the restart


def _without_times(state):
    state = json.loads(json.dumps(state))
    history = state["history"]
    del history["overhead_total_s"], history["model"]["run_id"]
    for entries in (history["recent"], history["clean"]):
        for entry in entries:
            entry.pop()  # seconds, the last of an Entry
    return state


@every_way
@pytest.mark.parametrize(
    "error",
    [
        fastguard.UnsupportedTensorError(2, "must be dense", "w"),
        fastguard.NotGuardedError("no guard"),
        fastguard.RecoveryFailedError(["back to step 3"], "the loss rose", 3, ["`a` is high."]),
        fastguard.NonFiniteGradientsError([1, 2], ["w"]),
        fastguard.PolicySkipsError([1, 2], ["w"], [2], "SkipSpikes()"),
        MisfitError("must be a dict, got 1", ("kept",)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes(error, copied):
    found = copied(error)
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
