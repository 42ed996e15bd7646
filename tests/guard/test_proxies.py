"""Optimizers inside other objects, shards of state, what is refused; and several optimizers that share one decision."""

import copy
import math

import pytest
import torch
from guard_helpers import (
    adamw,
    assert_close,
    assert_identical,
    gradients,
    loss_at,
    make_model,
    poison,
    snapshot,
    take_step,
    train,
)

import fastguard


class Accelerated(torch.optim.Optimizer):
    """In the manner of accelerate's: is an Optimizer by class, has no groups of its own, and notices skipped steps by
    counting calls of the inner step, which it replaces while a scaler is at work."""

    def __init__(self, optimizer, scaler=None):
        self.optimizer = optimizer
        self.scaler = scaler
        self.was_called = False
        self.step_was_skipped = False
        # accelerate moves the state to the device when it prepares an optimizer
        optimizer.load_state_dict(optimizer.state_dict())

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        inner = self.optimizer.step

        def counting(*args, **kwargs):
            self.was_called = True
            return inner(*args, **kwargs)

        self.optimizer.step = counting
        self.was_called = False
        self.scaler.step(self.optimizer)
        self.optimizer.step = inner
        self.scaler.update()
        self.step_was_skipped = not self.was_called

    def __getstate__(self):
        return self.__dict__.copy()

    def __setstate__(self, state):
        self.__dict__.update(state)


class Lit:
    """In the manner of Lightning's: passes every unknown attribute on, and runs the batch inside `step`."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["_optimizer"], name)

    def step(self, closure=None, **kwargs):
        return self._optimizer.step(closure=closure, **kwargs)


every_proxy = pytest.mark.parametrize("proxy", [Accelerated, Lit])


@pytest.mark.parametrize(
    "proxy", [Accelerated, Lit, lambda inner: Lit(Accelerated(inner)), lambda inner: Lit(Lit(inner))]
)
@pytest.mark.parametrize("is_late", [False, True])
def test_wrapping_a_proxy_guards_what_is_inside(proxy, is_late):
    model = make_model()
    inner = adamw(model.parameters())
    if is_late:
        fastguard.wrap(inner, model)
    outer = proxy(inner)
    assert fastguard.wrap(outer, model) is outer
    guard = inner.guard
    assert outer.guard is guard
    assert fastguard.Guard.of(outer) is fastguard.Guard.of(inner) is guard
    take_step(model, outer, 0)
    take_step(model, inner, 1)
    guard.flush()
    assert guard.history.step == [0, 1]
    with pytest.raises(fastguard.AlreadyGuardedError, match="guarded already"):
        fastguard.wrap(outer, model, on_guarded="raise")
    if proxy is Accelerated:
        with pytest.raises(fastguard.NotGuardedError, match=r"fastguard\.wrap"):
            fastguard.Guard.of(copy.deepcopy(outer))
    guard.detach()
    for layer in (outer, vars(outer).get("_optimizer", inner), inner):
        assert "guard" not in vars(layer) and "_guard" not in vars(layer)


def test_a_proxy_that_shows_nothing_of_what_it_wraps_gets_the_guard_itself():
    class Opaque:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = make_model()
    inner = adamw(model.parameters())
    outer = fastguard.wrap(Opaque(inner), model)
    guard = outer.guard
    assert guard is inner.guard
    guard.detach()
    assert not hasattr(outer, "guard")


@every_proxy
def test_training_through_a_proxy_is_bit_identical(proxy):
    plain = make_model()
    model = copy.deepcopy(plain)
    optimizer, inner = adamw(plain.parameters()), adamw(model.parameters())
    outer = fastguard.wrap(proxy(inner), model, max_norm=1e6)
    train(plain, proxy(optimizer), [0, 1, 3])
    for step in range(4):
        take_step(model, outer, step, closure=proxy is Lit, bad=math.nan if step == 2 else None)
    assert_identical(snapshot(model, inner), snapshot(plain, optimizer))
    assert outer.guard.history.num_skipped == 1


@every_proxy
def test_trap_2_1_groups_that_are_replaced_are_read_anew(proxy):
    """load_state_dict puts new groups in place of the old; who kept the old ones watches nothing."""
    model = make_model()
    inner = adamw(model.parameters())
    outer = fastguard.wrap(proxy(inner), model, max_norm=0.01)
    take_step(model, outer, 0)
    outer.load_state_dict(copy.deepcopy(outer.state_dict()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    take_step(model, outer, 1)
    scheduler.step()
    take_step(model, outer, 2)
    assert outer.guard.last.lr == 0.025
    assert outer.guard.last.clipped and len(outer.guard.last.tensors) == 4


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("proxy", "unscales", "max_norm"),
    [(Lit, False, 1e6), (Lit, False, 0.05), (Lit, True, 1e6), (Lit, True, 0.05), (Accelerated, False, 1e6)],
)
def test_traps_2_3_and_2_7_a_proxy_under_a_scaler(proxy, unscales, max_norm, fused):
    """Lightning's passes `_step_supports_amp_scaling` on, so that the scaler sets its attributes on the proxy.
    accelerate's replaces the step, to see whether it was called."""
    plain = make_model()
    model = copy.deepcopy(plain)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    optimizer, inner = adamw(plain.parameters()), adamw(model.parameters(), fused=fused)
    outer = fastguard.wrap(Lit(inner) if proxy is Lit else Accelerated(inner, scalers[1]), model, max_norm=max_norm)
    for step in range(5):
        for m, o, scaler in ((plain, optimizer, scalers[0]), (model, outer, scalers[1])):
            o.zero_grad()
            scaler.scale(loss_at(m, step)).backward()
            if step in (0, 3):
                poison(m, math.inf)
            if unscales or m is plain:
                scaler.unscale_(o)
            if m is plain:
                torch.nn.utils.clip_grad_norm_(m.parameters(), max_norm)
            if proxy is Accelerated and m is model:
                o.step()
                # As with any fused optimizer, the scaler leaves the decision to the step, and so it is always called.
                assert not outer.step_was_skipped
            else:
                scaler.step(o)
                scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert outer.guard.last.skipped == (step in (0, 3))
    assert not {"grad_scale", "found_inf"} & (vars(inner).keys() | vars(outer).keys())
    assert_close(snapshot(model)["parameters"], snapshot(plain)["parameters"], rtol=2e-5, atol=1e-6)
    guard = outer.guard
    guard.flush()
    assert [e.loss_scale for e in guard.history.recent] == ([None] * 5 if unscales else [1024, 512, 512, 512, 256])


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trap_2_11_zero_redundancy_optimizer_is_guarded_at_its_outside():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(model):
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)

    plain = make_model()
    model = copy.deepcopy(plain)
    optimizer, guarded = make(plain), make(model)
    assert fastguard.wrap(guarded, model, max_norm=1e6) is guarded
    assert fastguard.Guard.of(guarded)._run.members[0].optimizer is guarded
    train(plain, optimizer, [0, 1, 3])
    for step in range(4):
        take_step(model, guarded, step, bad=math.nan if step == 2 else None)
    assert_identical(snapshot(model)["parameters"], snapshot(plain)["parameters"])
    assert_identical(snapshot(model, guarded.optim), snapshot(plain, optimizer.optim))
    guarded.guard.flush()
    assert guarded.guard.history.step == [0, 1, 2, 3]
    assert guarded.guard.last.tensors.names == ("0.weight", "0.bias", "2.weight", "2.bias")


@pytest.mark.parametrize("is_optimizer", [True, False])
def test_trap_2_11_deepspeed_is_refused(is_optimizer):
    base = torch.optim.SGD if is_optimizer else object
    cls = type("ZeroStage3", (base,), {"__module__": "deepspeed.runtime.zero.stage3"})
    instance = cls(make_model().parameters(), lr=0.1) if is_optimizer else cls()
    with pytest.raises(TypeError, match=r"DeepSpeed's ZeroStage3.*without ZeRO"):
        fastguard.wrap(instance)
    assert "_guard" not in vars(instance)


def _matrices_and_rest(model):
    """Muon for the matrices where torch has it, AdamW for the rest: how Muon is meant to be used."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    first = getattr(torch.optim, "Muon", torch.optim.RMSprop)
    return [first(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.05)]


def _step(model, optimizers, step, *, bad_index=None, max_norm=None):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_at(model, step).backward()
    if bad_index is not None:
        poison(model, math.nan, bad_index)
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for optimizer in optimizers:
        optimizer.step()


def _pair(dtype=torch.float32, **settings):
    plain = make_model(dtype=dtype)
    model = copy.deepcopy(plain)
    optimizers = _matrices_and_rest(plain)
    guarded = fastguard.wrap(_matrices_and_rest(model), model, **settings)
    return plain, optimizers, model, guarded


def test_clipping_uses_the_norm_of_all_gradients(backend):
    def both(model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        return [torch.optim.RMSprop(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.05)]

    plain, model = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    optimizers, guarded = both(plain), fastguard.wrap(both(model), model, max_norm=0.05, backend=backend)
    for step in range(5):
        _step(plain, optimizers, step, max_norm=0.05)
        _step(model, guarded, step)
        assert guarded[0].guard.last.clipped
    assert_close(snapshot(model, *guarded), snapshot(plain, *optimizers), rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
def test_muon_is_neither_clipped_by_a_shared_norm_nor_part_of_it(backend):
    plain, optimizers, model, guarded = _pair(torch.float64, max_norm=0.05, backend=backend)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_at(plain, step).backward()
        torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.ndim < 2], 0.05)
        for optimizer in optimizers:
            optimizer.step()
        _step(model, guarded, step)
        last = guarded[0].guard.last
        after = float(fastguard.tensor_stats([p.grad for p in model.parameters()]).total_norm())
        assert last.clipped and last.clipped_norm == pytest.approx(after) and last.over == ()
        assert last.trigger == 0.05
    # Muon orthogonalises in bfloat16: equal to a rounding unless an element sits right between two of its values.
    assert_close(snapshot(model, *guarded), snapshot(plain, *optimizers), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad_index", [0, 1], ids=["in-the-first", "in-the-second"])
def test_a_bad_gradient_in_one_skips_all(bad_index):
    plain, optimizers, model, guarded = _pair(max_norm=1e6)
    for step in (0, 1, 3, 4):
        _step(plain, optimizers, step)
    for step in range(5):
        before = snapshot(model, *guarded)
        _step(model, guarded, step, bad_index=bad_index if step == 2 else None)
        if step == 2:
            assert_identical(snapshot(model, *guarded), before)
            assert all(g is not None for g in gradients(model))
    assert_identical(snapshot(model, *guarded), snapshot(plain, *optimizers))
    guard = guarded[1].guard
    guard.flush()
    assert [entry.skipped for entry in guard.history.recent] == [False, False, True, False, False]
    assert guard.history.first_events[0].names == ("0.weight" if bad_index == 0 else "0.bias",)
    assert guard.history.step == [0, 1, 2, 3, 4] and len(guard.last.tensors.names) == 4
    assert guard.last.lr == 0.02  # of the first group of the first optimizer


def test_differently_scaled_gradients_are_refused():
    model = make_model()
    guarded = fastguard.wrap(_matrices_and_rest(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_at(model, 0)).backward()
    scaler.unscale_(guarded[0])
    scaler.step(guarded[0])
    with pytest.raises(RuntimeError, match=r"scaled alike.*unscale_ on all"):
        scaler.step(guarded[1])


@pytest.mark.parametrize("with_model", [True, False])
def test_a_group_added_later_is_watched_and_named(with_model):
    model = make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    guarded = fastguard.wrap(optimizer, model if with_model else None)
    _step(model, [guarded], 0)
    first = ("0.weight", "0.bias") if with_model else ("group0.param0", "group0.param1")
    later = ("2.weight", "2.bias") if with_model else ("group1.param0", "group1.param1")
    assert guarded.guard.last.tensors.names == first
    guarded.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
    _step(model, [guarded], 1)
    assert guarded.guard.last.tensors.names == first + later
    before = snapshot(model, guarded)
    _step(model, [guarded], 2, bad_index=3)
    assert_identical(snapshot(model, guarded), before)
    assert guarded.guard.last.nonfinite == [later[1]]
