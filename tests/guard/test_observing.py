"""Which step a loss is of: whether it is observed before its step or after it, once or for each micro-batch."""

import weakref

import pytest
import torch
from guard_helpers import guarded_model, loss_at, make_model, take_step

import fastguard

NUM_STEPS = 12


def as_tensor(guard, loss):
    guard.observe(loss=loss)


def as_number(guard, loss):
    guard.observe(loss=float(loss.detach()))


def after_the_step(guard, loss, step, tell):
    loss.backward()
    step()
    tell(guard, loss)


def before_the_step(guard, loss, step, tell):
    loss.backward()
    tell(guard, loss)
    step()


def before_backward(guard, loss, step, tell):
    tell(guard, loss)
    loss.backward()
    step()


def run(order, tell, num_parts, first, model):
    """What was recorded, and the means of the losses of the micro-batches of each step.

    Args:
        first: micro-batches of the first step; less than `num_parts` where a loop steps at every so many from 0 on.
    """
    memory = fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, sinks=[memory])
    means, losses = [], []
    for number in range(first + (NUM_STEPS - 1) * num_parts):
        loss = loss_at(model, number)
        losses.append(float(loss.detach()))
        is_due = (number - first + 1) % num_parts == 0

        def step(is_due=is_due):
            if is_due:
                optimizer.step()
                optimizer.zero_grad()

        order(optimizer.guard, loss, step, tell)
        if is_due:
            means.append(sum(losses) / len(losses))
            losses = []
    optimizer.guard.flush()
    assert [r.step for r in memory.records] == list(range(NUM_STEPS))
    return [r.loss for r in memory.records], means


ORDERS = [after_the_step, before_the_step, before_backward]


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize(("num_parts", "first"), [(1, 1), (2, 2), (5, 5), (4, 1)])
@pytest.mark.parametrize("tell", [as_tensor, as_number])
@pytest.mark.parametrize("order", ORDERS)
def test_each_step_gets_the_mean_of_its_own(order, tell, num_parts, first):
    recorded, means = run(order, tell, num_parts, first, make_model())
    assert recorded == pytest.approx(means, rel=1e-12)


def test_late_in_a_run_too():
    """When nothing else is looked at when a step ends."""
    model = make_model()
    memory = fastguard.MemorySink()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, sinks=[memory])
    for step in range(130):
        take_step(model, optimizer, step)
    means = []
    for step in range(130, 140):  # somebody begins to accumulate, and to observe
        losses = []
        for part in range(3):
            loss = loss_at(model, 7 * step + part)
            losses.append(float(loss.detach()))
            loss.backward()
            if part == 2:
                optimizer.step()
                optimizer.zero_grad()
            optimizer.guard.observe(loss=loss)
        means.append(sum(losses) / 3)
    optimizer.guard.flush()
    assert memory.series("loss")[131:] == pytest.approx(means[1:], rel=1e-12)


def test_what_a_closure_returned_gives_way_to_what_is_observed():
    model, optimizer = guarded_model()
    for step in range(3):
        loss = take_step(model, optimizer, step, closure=True)
        assert optimizer.guard.last.loss == float(loss.detach())
        optimizer.guard.observe(loss=4.0, val_loss=2.0)
        optimizer.guard.observe(loss=8.0, val_loss=5.0)
        assert (optimizer.guard.last.loss, optimizer.guard.last.val_loss) == (6.0, 5.0)  # a mean, and the newest


def test_validation_before_the_first_step():
    model, optimizer = guarded_model()
    optimizer.guard.observe(val_loss=torch.tensor(3.5))
    assert optimizer.guard.last is None
    take_step(model, optimizer, 0)
    assert (optimizer.guard.last.val_loss, optimizer.guard.last.loss) == (3.5, None)
    take_step(model, optimizer, 1)
    assert optimizer.guard.last.val_loss is None


def test_a_loss_does_not_keep_its_graph():
    model = make_model()
    guard = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model).guard
    loss = loss_at(model, 0)
    ref = weakref.ref(loss)
    guard.observe(loss=loss)
    del loss
    assert ref() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x[None], lambda x: (2.0 * x).requires_grad_().mean() / 2.0])
def test_a_tensor_is_noted_as_the_number_that_it_is(dtype, make):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1))
    p.grad = torch.ones(3)
    loss = torch.tensor(3.1415926535, dtype=dtype)
    if dtype.is_floating_point:
        loss = make(loss)
    optimizer.step()
    optimizer.guard.observe(loss=loss)
    assert optimizer.guard.last.loss == float(loss.detach())
