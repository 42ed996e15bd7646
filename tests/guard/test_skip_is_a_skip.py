"""A skipped step changes nothing: not of the parameters, the state, the groups or the optimizer's own attributes."""

import copy
import math

import foreign_optimizers as foreign
import pytest
import torch
from foreign_optimizers import everything
from guard_helpers import (
    assert_identical,
    gradients,
    guarded_model,
    loss_at,
    make_model,
    poison,
    take_step,
    train,
    twins,
)

import fastguard
from fastguard.step import backup, skip

BAD = (0, 4, 5)  # the first step, and two in a row
EITHER_WAY = [(cls, False) for cls in foreign.WITHOUT_CLOSURE] + [(cls, True) for cls in foreign.WITH_CLOSURE]
each_way = pytest.mark.parametrize(
    ("cls", "closure"), EITHER_WAY, ids=[f"{cls.__name__}{'-closure' * closure}" for cls, closure in EITHER_WAY]
)


@each_way
def test_everything_is_as_it_was(cls, closure):
    plain, optimizer, model, guarded = twins(cls)
    for step in range(8):
        if step not in BAD:
            take_step(plain, optimizer, step, closure=closure)
            take_step(model, guarded, step, closure=closure)
            continue
        before = everything(model, guarded)
        take_step(model, guarded, step, closure=closure, bad=math.nan)
        assert guarded.guard.last.skipped
        assert_identical(everything(model, guarded), before)
        assert all(g is not None for g in gradients(model)) and bool(model[0].weight.grad.isnan().any())
    assert_identical(everything(model, guarded), everything(plain, optimizer))


@pytest.mark.parametrize("cls", [foreign.TensorInGroup, foreign.WantsGradients, foreign.Slow])
def test_under_a_scaler_too(cls):
    model, guarded = guarded_model(cls)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        guarded.zero_grad()
        scaler.scale(loss_at(model, step)).backward()
        before = everything(model, guarded)
        if step == 2:
            poison(model, math.inf)
        scaler.step(guarded)
        scaler.update()
        if step == 2:
            assert_identical(everything(model, guarded), before)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize(
    "cls", [foreign.TensorInGroup, foreign.WantsGradients, foreign.ZerosForMissing, foreign.SwapsData]
)
def test_where_torchs_wrapper_does_not_call_the_step(cls, monkeypatch):
    """As in compiled steps, which call their hooks from code of their own."""
    monkeypatch.setattr(skip, "HOOKED_STEP", compile("", "nowhere", "exec"))
    model = make_model()
    guarded = fastguard.wrap(cls(model.parameters()), model)
    train(model, guarded, range(2))
    before = everything(model, guarded)
    take_step(model, guarded, 2, bad=math.nan)
    own = gradients(model)
    assert_identical(everything(model, guarded), before)
    assert all(now is then for now, then in zip(gradients(model), own))


def test_the_step_of_a_skip_is_never_called():
    calls = []

    class Tells(torch.optim.SGD):
        def step(self, closure=None):
            calls.append("called")
            return super().step(closure)

    model, guarded = guarded_model(lambda p: Tells(p, lr=0.1))
    other = Tells(make_model().parameters(), lr=0.1)
    hook = guarded.register_step_post_hook(lambda *_: calls.append("post"))
    original = Tells.step.__closure__
    held = [cell.cell_contents for cell in original or ()]
    take_step(model, guarded, 0, bad=math.nan)
    assert calls == ["post"]
    hook.remove()
    assert [cell.cell_contents for cell in original or ()] == held  # nothing of the guard's stays in torch's wrapper
    other.step()
    take_step(model, guarded, 1)
    assert calls == ["post", "called", "called"]


def test_a_call_that_never_came_leaves_a_way_through():
    model, twin = make_model(), make_model()
    guarded, other = (foreign.WantsGradients(m.parameters()) for m in (model, twin))
    fastguard.wrap(guarded, model)

    def refuses(*_):
        if refusing:
            raise LookupError("not today")

    guarded.register_step_pre_hook(refuses)
    refusing = True
    before = everything(model, guarded)
    with pytest.raises(LookupError):
        take_step(model, guarded, 0, bad=math.nan)
    refusing = False
    assert_identical(everything(model, guarded), before)
    take_step(twin, other, 1)  # of the same class
    take_step(model, guarded, 1)
    assert_identical(everything(model, guarded), everything(twin, other))
    assert not any(isinstance(g, skip.SkippedCall) for g in vars(guarded).values())


def test_a_step_with_a_closure_that_raises_for_want_of_gradients_is_undone_and_told(caplog):
    model, guarded = guarded_model(foreign.DividesByNorm)
    before = everything(model, guarded)
    for step in range(2):
        take_step(model, guarded, step, closure=True, bad=math.nan)
        assert_identical(everything(model, guarded), before)
    told = [r.getMessage() for r in caplog.records if "raised without its gradients" in r.getMessage()]
    assert len(told) == 1 and "ZeroDivisionError" in told[0]
    take_step(model, guarded, 2, closure=True)
    assert not guarded.guard.last.skipped


def test_an_optimizer_that_moves_late_is_told_of_and_kept_from_then_on(caplog):
    class MovesLater(foreign.MovesFirst):
        def step(self, closure):
            if len(started) < 6:
                started.append(0)
                return super(foreign.MovesFirst, self).step(closure)
            return super().step(closure)

    started = []
    model, guarded = guarded_model(MovesLater)
    for step in range(6):
        take_step(model, guarded, step, closure=True)
    take_step(model, guarded, 6, closure=True, bad=math.nan)  # nobody has kept what it moved here first
    assert any("had moved parameters or state" in r.getMessage() for r in caplog.records)
    before = everything(model, guarded)
    take_step(model, guarded, 7, closure=True, bad=math.nan)
    assert_identical(everything(model, guarded), before)


def test_where_a_copy_does_not_fit_the_gradients_are_taken_away(monkeypatch, caplog):
    def full(kept):
        raise torch.OutOfMemoryError("no room")

    model, guarded = guarded_model(lambda p: torch.optim.Adam(p, lr=0.1))
    another, other = guarded_model(foreign.ZerosForMissing)
    train(another, other, range(5), closure=True)
    monkeypatch.setattr(backup._KeptTensor, "copy", full)
    for m, o in ((model, guarded), (another, other)):
        take_step(m, o, 5, closure=True, bad=math.nan)
        assert o.guard.last.skipped and all(bool(p.isfinite().all()) for p in m.parameters())
        assert all(g is not None for g in gradients(m))
    told = [r.getMessage() for r in caplog.records if "for want of a copy" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("ZerosForMissing")


def test_a_parameter_in_two_groups_gets_its_gradient_back():
    model = make_model()
    optimizer = foreign.WantsGradients(model.parameters())
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[0].weight]})
    fastguard.wrap(optimizer, model)
    given = []

    def closure():
        loss = loss_at(model, 0)
        loss.backward()
        poison(model)
        given.extend(gradients(model))
        return loss

    optimizer.step(closure)
    assert all(now is then for now, then in zip(gradients(model), given, strict=True))


def test_an_optimizer_that_holds_another_is_guarded_from_outside():
    model = make_model()
    optimizer = foreign.Slow(model.parameters())
    assert fastguard.wrap(optimizer, model, max_norm=1e-3) is optimizer
    assert "_guard" in vars(optimizer) and "_guard" not in vars(optimizer.optimizer)
    take_step(model, optimizer, 0)
    guard = fastguard.Guard.of(optimizer)
    assert guard.last.clipped and len(guard.last.tensors) == 4
    guard.flush()
    assert guard.history.step == [0]
    with pytest.raises(fastguard.AlreadyGuardedError):
        fastguard.wrap(optimizer)
    guard.detach()
    assert "_guard" not in vars(optimizer)


def test_optimizers_whose_steps_cannot_be_hooked_are_refused():
    model = make_model()
    optimizer = foreign.SlowWithoutInit(model.parameters())
    with pytest.raises(TypeError, match=r"SlowWithoutInit, which never calls Optimizer\.__init__.*super"):
        fastguard.wrap(optimizer, model)
    fastguard.wrap(optimizer.optimizer, model)  # the way out
    take_step(model, optimizer, 0)
    assert optimizer.guard.last.step == 0
    releases = foreign.WantsGradients(make_model().parameters(), gradient_release=True)
    with pytest.raises(TypeError, match=r"got WantsGradients with gradient_release=True.*[Ll]eave"):
        fastguard.wrap(releases)
    assert "_guard" not in vars(releases)


def _in_backward(number, **settings):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in params]
    fastguard.wrap(optimizers, **settings)
    for p, optimizer, value in zip(params, optimizers, (0.1, number)):
        p.grad = None if value is None else torch.tensor([value, 1.0])
        optimizer.step()
        p.grad = None
    return params, optimizers[0].guard


@pytest.mark.parametrize("number", [math.nan, 0.5, None])
def test_gradients_that_come_after_the_decision_are_noticed(number, caplog):
    params, guard = _in_backward(number, max_norm=10.0)
    told = [r.getMessage() for r in caplog.records if "were not there when the first optimizer" in r.getMessage()]
    assert len(told) == (number is not None) and all("a guard of its own" in text for text in told)
    is_bad = number is not None and math.isnan(number)
    assert bool(params[1].isfinite().all()) and guard.last.skipped is is_bad
    assert bool((params[1] == 1.0).all()) is (number != 0.5)
    if is_bad:
        applied, other = _in_backward(number, skip_nonfinite=False)
        assert bool(applied[1][0].isnan()) and not other.last.skipped
        with pytest.raises(fastguard.NonFiniteGradientsError):
            _in_backward(number, max_consecutive_skips=1)


def test_the_guard_is_no_public_attribute_and_leaves_the_optimizers_own():
    """torch expects that a copy has all public attributes of the original."""

    class Owned(torch.optim.SGD):
        pass

    model = make_model()
    for cls in (torch.optim.SGD, Owned):
        optimizer = cls(model.parameters(), lr=0.1)
        if cls is Owned:
            optimizer.guard = "mine"
        before = {name for name in vars(optimizer) if not name.startswith("_")}
        fastguard.wrap(optimizer, model)
        assert {name for name in vars(optimizer) if not name.startswith("_")} == before
        assert {name for name in vars(copy.deepcopy(optimizer)) if not name.startswith("_")} == before - {"guard"}
        assert isinstance(optimizer.guard, str if cls is Owned else fastguard.Guard)
        take_step(model, optimizer, 0)
        assert fastguard.Guard.of(optimizer).last.step == 0
        fastguard.Guard.of(optimizer).detach()
        assert getattr(optimizer, "guard", "mine") == "mine"
