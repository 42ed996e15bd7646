"""A snapshot holds all that a step changes, is touched by nothing, and comes back bit for bit, in place."""

import copy
import math
from collections import deque

import pytest
import torch
from foreign_optimizers import WITH_CLOSURE, WITHOUT_CLOSURE, everything
from guard_helpers import assert_identical, make_model, take_step
from torch import nn

from fastguard.observers.buffers import places_of
from fastguard.recovery.snapshots import Snapshot, Snapshots, are_finite, have_not_grown, largest

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True),
    "AdamW-capturable-lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.05)),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.05),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.05, history_size=3, max_iter=4),
}
ALL = [(cls, False) for cls in WITHOUT_CLOSURE] + [(cls, True) for cls in WITH_CLOSURE]
ALL += [(make, name == "LBFGS") for name, make in OPTIMIZERS.items()]


def _take(snapshot, model, optimizer, **more):
    snapshot.take([optimizer], places_of(model), more.pop("state", ()), **more)


@pytest.mark.parametrize(("make", "closure"), ALL, ids=[*(c.__name__ for c, _ in ALL[: -len(OPTIMIZERS)]), *OPTIMIZERS])
def test_twice_the_same_whatever_came_between(make, closure):
    model = make_model()
    optimizer = make(model.parameters())
    for step in range(3):
        take_step(model, optimizer, step, closure=closure)
    snapshot = Snapshot()
    _take(snapshot, model, optimizer)
    before = everything(model, optimizer)
    optimizer_then = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        for step in range(3, 7):
            take_step(model, optimizer, step, closure=closure)
        addresses = [p.data_ptr() for p in model.parameters()]
        snapshot.restore()
        assert_identical(everything(model, optimizer), before)
        assert_identical(optimizer.state_dict()["state"], optimizer_then["state"])
        assert [p.data_ptr() for p in model.parameters()] == addresses


def test_before_the_first_step_there_is_no_state():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    snapshot = Snapshot()
    _take(snapshot, model, optimizer)
    take_step(model, optimizer, 0)
    snapshot.restore()
    assert not optimizer.state


class Odd(torch.optim.Optimizer):
    """Keeps plain numbers in its state, its groups and itself, and tensors of many kinds."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.count = 0
        self.window = deque(maxlen=3)

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["d"] = group.get("d", torch.ones(())) * 1.5
            for p in group["params"]:
                state = self.state[p]
                state["calls"] = state.get("calls", 0) + 1
                state["wide"] = state.get("wide", torch.zeros(p.shape, dtype=torch.float32)) + 1.0 / 3.0
                state["list"] = [*state.get("list", []), p.abs().sum().reshape(1)]
                state["none"] = torch.zeros(0)
                state["pair"] = (state["calls"], state["wide"] * 2)
                self.window.append(float(p.abs().sum()))
                p.sub_(0.01 * p.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float64])
def test_odd_tensors_and_plain_numbers(dtype):
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((), (0,), (2, 3, 4, 4))]
    params.append(nn.Parameter(torch.randn(2, 3, 4, 4).to(dtype).to(memory_format=torch.channels_last)))
    params.append(nn.Parameter(torch.randn(6, 4).to(dtype).t()))
    optimizer = Odd(params)

    def step():
        for p in params:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()

    for _ in range(3):
        step()
    snapshot = Snapshot()
    snapshot.take([optimizer], (), ())
    saved = copy.deepcopy((optimizer.state_dict(), optimizer.count, list(optimizer.window)))
    values = [p.detach().clone() for p in params]
    strides = [p.stride() for p in params]
    for _ in range(2):
        step()
        step()
        snapshot.restore()
        assert_identical((optimizer.state_dict(), optimizer.count, list(optimizer.window)), saved)
        assert all(torch.equal(p, value) for p, value in zip(params, values, strict=True))
        assert [p.stride() for p in params] == strides
    assert all(s["wide"].dtype == torch.float32 for s in optimizer.state.values())
    assert optimizer.window.maxlen == 3


def _fill(loss=1.0):
    return lambda snapshot: setattr(snapshot, "loss", loss)


def test_the_last_that_counts_is_never_written_over_and_an_older_one_gives_up_what_came_after_it():
    snapshots = Snapshots(keep=2, quarantine=100, least=9)
    snapshots.take(0, _fill(), is_proved=True)
    for step in range(10, 60, 10):
        snapshots.take(step, _fill(math.nan))
    assert [one.step for one in snapshots._all] == [50, 0]
    assert snapshots.choose(older=True).step == 0 and [one.step for one in snapshots._all] == [0]
    snapshots = Snapshots(keep=3, quarantine=1, least=1)
    for step in (0, 10, 20):
        snapshots.take(step, _fill(), is_proved=True)
    assert snapshots.choose(older=True).step == 10
    assert [one.step for one in snapshots._all] == [10, 0]
    snapshots.take(30, _fill(), is_proved=True)
    snapshots.take(40, _fill())
    assert [one.step for one in snapshots._all] == [40, 30, 10]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_what_is_not_finite_is_found_wherever_it_is(bad, where):
    tensors = [
        torch.full((600, 1000), -0.5),  # with the next one more than is looked at together
        torch.full((700, 1000), 2.0).t(),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
    ]
    odd = [torch.zeros(2, dtype=torch.int64), torch.zeros(0), torch.empty(2, device="meta"), torch.eye(3).to_sparse()]
    found = largest([*tensors, *odd])
    assert found is not None and found.tolist() == [0.5, 2.0, 0.0, 1.0]
    assert are_finite([*tensors, *odd])
    tensors[where][-1] = bad
    found = largest([*tensors, *odd])
    assert found is not None and found.isfinite().tolist() == [i != where for i in range(4)]
    assert not are_finite([*tensors, *odd])


def test_what_has_grown():
    before = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for now, is_so in (([15.9, 0.15], True), ([16.1, 0.0], False), ([1.0, 0.17], False), ([math.nan, 0.0], False)):
        flag = have_not_grown(torch.tensor(now, dtype=torch.float64), before)
        assert flag is not None and bool(flag) is is_so
    assert have_not_grown(before[:1], before) is None and have_not_grown(None, before) is None
    assert largest([]) is None and are_finite([])
