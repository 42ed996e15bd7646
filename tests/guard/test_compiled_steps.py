"""Steps under torch.compile: right records, and no recompilation."""

import math

import pytest
import torch
from guard_helpers import assert_close, assert_identical, loss_at, make_model, poison, snapshot, twins
from torch._dynamo.testing import CompileCounter

import fastguard

pytestmark = pytest.mark.filterwarnings(
    # of dynamo and what it imports
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning:torch",
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    # a tensor, as torch asks for: a number that changes would itself recompile
    "Adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.05), foreach=False),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.05), fused=True),
}
_SLOW = [pytest.param(make, marks=pytest.mark.slow, id=name) for name, make in list(OPTIMIZERS.items())[1:]]
every_optimizer = pytest.mark.parametrize("make", [pytest.param(OPTIMIZERS["SGD"], id="SGD"), *_SLOW])


def _steps(model, optimizer, step, numbers, bad=None):
    for number in numbers:
        optimizer.zero_grad()
        loss_at(model, number).backward()
        if number == bad:
            poison(model, math.nan)
        step()


def _compiled(optimizer, backend="eager"):
    return torch.compile(lambda: optimizer.step(), backend=backend)


@every_optimizer
def test_trap_2_12_records_are_right_and_nothing_recompiles(make):
    plain, optimizer, model, guarded = twins(make, max_norm=1e6)
    counter, unguarded_counter = CompileCounter(), CompileCounter()
    step = _compiled(guarded, counter)
    _steps(model, guarded, step, range(3))
    early = counter.frame_count
    _steps(model, guarded, step, range(3, 12))
    assert counter.frame_count == early
    # Like a compiled step without the guard (which differs from an eager one in Adam's bias correction).
    _steps(plain, optimizer, _compiled(optimizer, unguarded_counter), range(12))
    assert early <= unguarded_counter.frame_count
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    guard = guarded.guard
    guard.flush()
    assert guard.history.step == list(range(12))
    assert len(set(guard.history.grad_norm)) == 12  # each step's own, not that of the tracing


@pytest.mark.slow
@every_optimizer
def test_a_compiled_step_is_clipped_and_skipped(make):
    plain, optimizer, model, guarded = twins(make, dtype=torch.float64, max_norm=0.05)
    update = _compiled(optimizer)

    def clip_and_update():
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        update()

    _steps(plain, optimizer, clip_and_update, range(3))
    _steps(plain, optimizer, clip_and_update, range(4, 6))
    step = _compiled(guarded)
    _steps(model, guarded, step, range(3))
    before = snapshot(model, guarded)
    _steps(model, guarded, step, range(3, 4), bad=3)
    assert guarded.guard.last.skipped
    assert_identical(snapshot(model, guarded), before)
    assert all(p.grad is not None for p in model.parameters())
    _steps(model, guarded, step, range(4, 6))
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=1e-12, atol=1e-14)
    guarded.guard.flush()
    assert guarded.guard.history.num_clipped == 5


def test_skips_in_a_row_recompile_once_at_most():
    model = make_model()
    guarded = fastguard.wrap(OPTIMIZERS["SGD"](model.parameters()), model)
    counter = CompileCounter()
    step = _compiled(guarded, counter)
    _steps(model, guarded, step, range(3))
    good = counter.frame_count
    for number in range(3, 8):
        _steps(model, guarded, step, range(number, number + 1), bad=number)
    assert counter.frame_count <= good + 1  # one more graph: that of a step without gradients
    _steps(model, guarded, step, range(8, 12))
    assert counter.frame_count <= good + 1
