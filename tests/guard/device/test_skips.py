"""Skips that the host hears of later, and what fused kernels do with a flag or with odd gradients."""

import copy
import math

import pytest
import torch
from device_helpers import slow, watched
from foreign_optimizers import WantsGradients
from guard_helpers import (
    Convolution,
    assert_close,
    assert_identical,
    guarded_model,
    loss_at,
    make_model,
    poison,
    snapshot,
    take_step,
    train,
    twins,
)

import fastguard

pytestmark = pytest.mark.usefixtures("engine")
FUSED = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "SGD-nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, fused=True),
}
OTHERS = {
    "SGD-foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.05),
    "foreign": WantsGradients,
}
every_one = pytest.mark.parametrize("make", [*FUSED.values(), *OTHERS.values()], ids=[*FUSED, *OTHERS])


def _guarded(model, **settings):
    return fastguard.wrap(FUSED["AdamW"](model.parameters()), model, **settings)


@pytest.mark.thinned(interpreted=6)
@every_one
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_skipped_step_changes_no_bit_although_nobody_has_heard_of_it(make, max_norm):
    model, optimizer = guarded_model(make, max_norm=max_norm)
    slow(optimizer)
    train(model, optimizer, range(2))
    names = set(vars(optimizer))
    before = snapshot(model, optimizer)
    for step, bad in ((2, math.nan), (3, math.inf)):
        take_step(model, optimizer, step, bad=bad)
        assert_identical(snapshot(model, optimizer), before)
        assert set(vars(optimizer)) == names
    assert optimizer.guard.last is None
    optimizer.guard.flush()
    assert [e.skipped for e in optimizer.guard.history.recent] == [False, False, True, True]


@pytest.mark.thinned(interpreted=6)
@every_one
def test_training_goes_on_as_if_the_step_had_never_been(make):
    plain, optimizer, model, guarded = twins(make)
    train(plain, optimizer, [1, 2, 4])
    for step in range(5):  # the very first one too
        take_step(model, guarded, step, bad=math.nan if step in (0, 3) else None)
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))


@pytest.mark.thinned(interpreted=6)
@every_one
@pytest.mark.parametrize("clip_through", ["scale", "grad_scale"])
def test_clipping_is_torchs_whichever_way(make, clip_through):
    plain, optimizer, model, guarded = twins(make, max_norm=0.05, clip_through=clip_through)
    slow(guarded)
    for step in range(4):
        take_step(plain, optimizer, step, before_step=lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
        take_step(model, guarded, step)
        rtol, atol = (2e-6, 1e-8) if step == 0 else (2e-5, 1e-6)  # the models differ by some roundings from then on
        assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol, atol)
        assert "grad_scale" not in vars(guarded) and "found_inf" not in vars(guarded)
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=2e-5, atol=1e-6)
    guarded.guard.flush()
    assert guarded.guard.history.num_clipped == 4


def test_too_many_skips_raise_in_a_later_step():
    model = make_model()
    optimizer = _guarded(model, max_consecutive_skips=3)
    couriers = slow(optimizer)
    take_step(model, optimizer, 0)
    before = snapshot(model, optimizer)
    for step in range(1, 6):
        take_step(model, optimizer, step, bad=math.nan)
    couriers[0].run()
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        take_step(model, optimizer, 6)
    assert caught.value.steps == [1, 2, 3, 4]  # the fourth came in with the third; the fifth is not sent yet
    assert caught.value.tensors == ["0.weight"]
    assert_identical(snapshot(model, optimizer), before)
    take_step(model, optimizer, 6)  # who goes on may
    optimizer.guard.flush()
    assert [e.step for e in optimizer.guard.history.recent] == list(range(7))
    assert not optimizer.guard.last.skipped


def test_the_run_of_skips_goes_on_across_a_restart():
    model = make_model()
    optimizer = _guarded(model, max_consecutive_skips=3)
    for step in range(2):
        take_step(model, optimizer, step, bad=math.nan)
    state = optimizer.guard.state_dict()
    assert state["skipped_run"] == [0, 1]
    other = make_model()
    resumed = _guarded(other, max_consecutive_skips=3)
    resumed.guard.load_state_dict(state)
    take_step(other, resumed, 2, bad=math.nan)
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        take_step(other, resumed, 3)
    assert caught.value.steps == [0, 1, 2]


def test_a_step_cannot_be_captured(monkeypatch):
    model = make_model()
    optimizer = _guarded(model)
    monkeypatch.setattr("fastguard.step.device_judge.is_capturing", lambda device: True)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="cannot be captured in a graph"):
        take_step(model, optimizer, 0)
    assert_identical(snapshot(model, optimizer), before)


def _sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "fused": True, **settings})


@pytest.mark.parametrize("bad_step", [0, 2])
def test_with_dampening_the_host_decides_on_the_first_step(bad_step):
    """A first step is not damped, the following ones are: zeros would not do. From then on nothing waits."""
    plain = make_model()
    model = copy.deepcopy(plain)
    optimizer, guarded = _sgd(plain, dampening=0.5), fastguard.wrap(_sgd(model, dampening=0.5), model)
    train(plain, optimizer, [step for step in range(5) if step != bad_step])
    for step in range(5):
        guarded.zero_grad()
        loss_at(model, step).backward()
        if step == bad_step:
            poison(model)
        with watched() as watch:
            guarded.step()
        assert bool(watch.waits) is (step == 0 or step == 1 == bad_step + 1), watch.waits
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))


def test_a_buffer_that_is_missing_later_is_made_too():
    """A parameter that had no gradient before; and a state that was loaded without buffers."""
    model = make_model()
    guarded = fastguard.wrap(_sgd(model), model)
    loss_at(model, 0).backward()
    model[0].bias.grad = None
    guarded.step()
    assert "momentum_buffer" not in guarded.state[model[0].bias]
    before = snapshot(model)["parameters"]
    take_step(model, guarded, 1, bad=math.nan)
    assert_identical(snapshot(model)["parameters"], before)
    assert not guarded.state[model[0].bias]["momentum_buffer"].any()
    state = guarded.state_dict()
    guarded.load_state_dict({**state, "state": {}})
    take_step(model, guarded, 2, bad=math.nan)
    assert all(not s["momentum_buffer"].any() for s in guarded.state.values())
    assert len(guarded.state) == 4


@pytest.mark.thinned(interpreted=4)
@pytest.mark.parametrize("max_norm", [1e6, 0.5])
@pytest.mark.parametrize("fused", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_that_lie_otherwise_are_put_straight(max_norm, fused):
    plain = Convolution()
    model = copy.deepcopy(plain)
    optimizer = fused(plain.parameters(), lr=0.1, foreach=False)
    guarded = fastguard.wrap(fused(model.parameters(), lr=0.1, fused=True), model, max_norm=max_norm)
    slow(guarded)
    for step in range(5):
        bad = step == 2
        model.set_gradients(step, otherwise=step != 3, bad=bad)
        given, strides = model.weight.grad, model.weight.grad.stride()
        before = snapshot(model, guarded)
        guarded.step()
        assert model.weight.grad is given and given.stride() == strides
        if bad:
            assert_identical(snapshot(model, guarded), before)
            continue
        plain.set_gradients(step, otherwise=False)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
        torch.testing.assert_close(model.weight.grad.contiguous(), plain.weight.grad, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model.square.grad.contiguous(), plain.square.grad, rtol=1e-12, atol=1e-14)
    assert_close(snapshot(model)["parameters"], snapshot(plain)["parameters"], rtol=1e-12, atol=1e-14)


class Decaying(torch.optim.AdamW):
    """Changes parameters outside of what it inherits: no flag holds that back."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(0.9)
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    """Adds nothing that matters."""


@pytest.mark.parametrize(("cls", "waits"), [(Decaying, True), (Renamed, False), (torch.optim.AdamW, False)])
def test_a_step_of_a_subclasss_own_is_not_trusted_with_a_flag(cls, waits):
    model, guarded = guarded_model(lambda p: cls(p, lr=0.1, fused=True))
    take_step(model, guarded, 0)
    before = snapshot(model, guarded)
    loss_at(model, 1).backward()
    poison(model)
    with watched() as watch:
        guarded.step()
    assert_identical(snapshot(model, guarded), before)
    assert bool(watch.waits) is waits


def test_groups_of_which_only_one_is_fused():
    model = make_model()
    groups = [
        {"params": model[0].parameters(), "fused": True},
        {"params": model[2].parameters(), "fused": False, "foreach": False},
    ]
    guarded = fastguard.wrap(torch.optim.AdamW(groups, lr=0.1), model, max_norm=0.05)
    train(model, guarded, range(2))
    before = snapshot(model, guarded)
    take_step(model, guarded, 2, bad=math.nan)
    assert_identical(snapshot(model, guarded), before)


def test_what_a_step_that_raised_left_is_gone_in_the_next():
    def raises(*_):
        if raising:
            raise LookupError("in between")

    model = make_model()
    guarded = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    fastguard.wrap(guarded, model, max_norm=0.05, clip_through="grad_scale")
    guarded.register_step_pre_hook(raises)
    raising = True
    with pytest.raises(LookupError):
        take_step(model, guarded, 0)
    assert "grad_scale" in vars(guarded)
    raising = False
    plain = copy.deepcopy(model)
    take_step(model, guarded, 1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    take_step(plain, optimizer, 1, before_step=lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
    assert "grad_scale" not in vars(guarded) and "found_inf" not in vars(guarded)
    assert_close(snapshot(model)["parameters"], snapshot(plain)["parameters"], rtol=1e-5, atol=1e-6)
