"""Closures in every manner, gradients missing or gathered over batches, steps that raise, and traps of torch's."""

import copy
import math

import pytest
import torch
from guard_helpers import (
    Convolution,
    adamw,
    assert_close,
    assert_identical,
    gradients,
    guarded_model,
    loss_at,
    make_model,
    poison,
    snapshot,
    take_step,
    train,
    true_norm,
    twins,
)

import fastguard


def _closure(model, optimizer, step, bad=None):
    """Forward and backward, as Lightning passes it: the loss that it returns still has its graph."""

    def closure():
        optimizer.zero_grad()
        loss = loss_at(model, step)
        loss.backward()
        if bad is not None:
            poison(model, bad)
        return loss

    return closure


@pytest.fixture
def every_warning_is_raised():
    """torch warns of some things only once a process; here it must not depend on the order of the tests."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.usefixtures("every_warning_is_raised")
def test_closure_by_position_and_by_keyword(by_keyword, backend):
    plain, optimizer, model, guarded = twins(adamw, dtype=torch.float64, max_norm=0.05, backend=backend)
    for step in range(4):
        loss = loss_at(plain, step)
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
        optimizer.step()
        closure = _closure(model, guarded, step)
        returned = guarded.step(closure=closure) if by_keyword else guarded.step(closure)
        assert returned.item() == pytest.approx(loss.item(), rel=1e-12)
        assert guarded.guard.last.norm == pytest.approx(norm, rel=1e-12)  # not that of the step before
        assert guarded.guard.last.loss == returned.item()
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("left", [None, math.nan])
def test_trap_2_2_gradients_left_from_before_do_not_count(left):
    """Neither do bad ones have a good evaluation skipped, nor do good ones hide a bad one."""
    model, guarded = guarded_model(adamw)
    loss_at(model, 0).backward()
    if left is not None:
        poison(model, left)
    before = snapshot(model, guarded)
    guarded.step(_closure(model, guarded, 1, bad=math.inf if left is None else None))
    assert guarded.guard.last.skipped is (left is None) and guarded.guard.last.is_finite is (left is not None)
    if left is None:
        assert_identical(snapshot(model, guarded), before)


class CallsTwice(torch.optim.SGD):
    """Evaluates its closure twice a step, as sharpness-aware optimizers do, and counts steps in its groups."""

    def step(self, closure):
        with torch.enable_grad():
            closure()
            loss = closure()
        super().step()
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
        return loss


def _twice(bad_calls, **settings):
    """A closure that alternates between good and bad gradients, and the function that calls it."""
    model, guarded = guarded_model(lambda p: CallsTwice(p, lr=0.1), **settings)
    calls = []

    def closure():
        guarded.zero_grad()
        loss = loss_at(model, 0)
        loss.backward()
        if len(calls) % 2 in bad_calls:
            poison(model)
        calls.append(0)
        return loss

    return model, guarded, closure


@pytest.mark.parametrize("bad_call", [0, 1])
def test_the_last_call_of_a_closure_decides_about_the_skip(bad_call):
    model, guarded, closure = _twice({bad_call})
    before = snapshot(model, guarded)
    guarded.step(closure)
    assert guarded.guard.last.nonfinite == ["0.weight"]  # either way the record tells
    assert guarded.guard.last.skipped == (bad_call == 1)
    assert guarded.param_groups[0].get("num_steps", 0) == (bad_call == 0)
    unchanged = all(torch.equal(p, before["parameters"][n]) for n, p in model.named_parameters())
    assert unchanged == (bad_call == 1)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


THREE = 3


@pytest.mark.parametrize("odd", [None, (1.0, 2.0), {"loss": 1.0}, torch.ones(2), "done", THREE])
def test_whatever_a_closure_returns_passes_through(odd):
    model, guarded = guarded_model(adamw)

    def closure():
        loss_at(model, 0).backward()
        return odd

    assert guarded.step(closure) is odd
    assert guarded.guard.last.loss == (3.0 if odd is THREE else None)


def test_a_closure_that_raises_loses_nothing():
    plain, optimizer, model, guarded = twins(adamw)
    take_step(plain, optimizer, 0)
    take_step(model, guarded, 0)
    before = snapshot(model, guarded)

    def raises():
        raise LookupError("no more data")

    with pytest.raises(LookupError, match="no more data"):
        guarded.step(raises)
    assert_identical(snapshot(model, guarded), before)
    train(plain, optimizer, [1, 2], closure=True)
    train(model, guarded, [1, 2], closure=True)
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    guarded.guard.flush()
    assert guarded.guard.history.step == [0, 1, 2]  # the step that raised in its closure has no gradients to record


@pytest.mark.parametrize("bad_calls", [{0}, {1}, {0, 1}], ids=str)
def test_only_steps_that_were_skipped_count_towards_the_limit(bad_calls):
    _, guarded, closure = _twice(bad_calls, max_consecutive_skips=3)
    guarded.step(closure)
    guarded.step(closure)
    if 1 not in bad_calls:
        guarded.step(closure)  # no step was skipped: the second evaluation was good
        assert guarded.guard.state_dict()["skipped_run"] == []
        return
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        guarded.step(closure)
    assert caught.value.steps == [0, 1, 2]


class Stumbles(torch.optim.SGD):
    """Raises in the middle of a step when told to."""

    stumble = False

    def step(self, closure=None):
        if self.stumble:
            raise OSError("stumbled")
        return super().step(closure)


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_that_calls_its_parents_step_counts_once(closure):
    torch.optim.SGD(make_model().parameters(), lr=0.1)  # from now on SGD.step runs the hooks too
    plain, optimizer, model, guarded = twins(
        lambda p: Stumbles(p, lr=0.1, momentum=0.9), dtype=torch.float64, max_norm=0.05
    )
    for step in range(4):
        if step == 2:
            before = snapshot(model, guarded)
            take_step(model, guarded, step, closure=closure, bad=math.nan)
            assert_identical(snapshot(model, guarded), before)
            assert all(g is not None for g in gradients(model))
            continue
        clip = lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)  # noqa: E731
        take_step(plain, optimizer, step, closure=closure, before_step=clip)
        take_step(model, guarded, step, closure=closure)
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=1e-12, atol=1e-14)
    guarded.guard.flush()
    assert guarded.guard.history.step == [0, 1, 2, 3]


def test_missing_gradients_stay_missing_and_keep_the_names_right(backend):
    plain, optimizer, model, guarded = twins(adamw, backend=backend)

    def drop(model, step):
        def run():
            list(model.parameters())[step % 4].grad = None

        return run

    for step in range(8):
        take_step(plain, optimizer, step, before_step=drop(plain, step))
        take_step(model, guarded, step, before_step=drop(model, step))
        names = [name for name, p in model.named_parameters() if p.grad is not None]
        assert list(guarded.guard.last.tensors.names) == names and len(names) == 3
        for name, row in zip(names, guarded.guard.last.tensors, strict=True):
            assert row.norm == pytest.approx(true_norm([model.get_parameter(name).grad]), rel=1e-6)
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    assert_identical(gradients(model), gradients(plain))


def test_frozen_parameters():
    plain = make_model()
    plain[0].weight.requires_grad_(False)
    model = copy.deepcopy(plain)
    optimizer = adamw(plain.parameters())
    guarded = fastguard.wrap(adamw(model.parameters()), model)
    train(plain, optimizer, range(3))
    train(model, guarded, range(3))
    assert "0.weight" not in guarded.guard.last.tensors.names
    model[0].weight.requires_grad_(True)  # thawed later, as in fine-tuning
    plain[0].weight.requires_grad_(True)
    train(plain, optimizer, [3])
    train(model, guarded, [3])
    assert guarded.guard.last.tensors.names[0] == "0.weight"
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))


def test_gradients_gathered_over_batches_are_judged_once_at_the_step():
    plain, optimizer, model, guarded = twins(adamw, dtype=torch.float64, max_norm=0.05)
    for step in range(3):
        for m in (plain, model):
            m.zero_grad()
            for part in range(4):
                (loss_at(m, 4 * step + part) / 4).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
        optimizer.step()
        guarded.step()
        assert guarded.guard.last.norm == pytest.approx(norm, rel=1e-12)
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=1e-12, atol=1e-14)
    guarded.guard.flush()
    assert guarded.guard.history.num_steps == 3


def test_trap_1_without_skipping_the_poison_is_not_spread():
    """torch's clipping makes every gradient NaN; the guard leaves the others as they are."""
    model, optimizer = guarded_model(max_norm=0.01, skip_nonfinite=False)
    loss_at(model, 0).backward()
    poison(model)
    optimizer.step()
    assert [bool(p.isfinite().all()) for p in model.parameters()] == [False, True, True, True]
    assert optimizer.guard.last.clip_coef == 1.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [1e6, 0.5])
def test_trap_1_gradients_that_are_not_contiguous(fused, max_norm, backend):
    """Whatever the optimizer makes of their strides, it makes of them with the guard too."""
    plain = Convolution()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, fused=fused)
    guarded = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    fastguard.wrap(guarded, model, max_norm=max_norm, backend=backend)
    for step in range(3):
        plain.set_gradients(step)
        model.set_gradients(step)
        assert not model.weight.grad.is_contiguous()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
        guarded.step()
        assert model.weight.grad.stride() == plain.weight.grad.stride()
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=1e-12, atol=1e-14)


def test_a_group_whose_parameters_are_a_tuple_is_guarded_as_torch_steps_it():
    plain, model = make_model(), make_model()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=0.01)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        for one, steps in ((model, optimizer), (plain, other)):
            steps.param_groups[0]["params"] = tuple(steps.param_groups[0]["params"])
            steps.zero_grad()
            loss_at(one, step).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
        other.step()
    optimizer.guard.flush()
    assert optimizer.guard.history.num_clipped == 4
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0.0)
