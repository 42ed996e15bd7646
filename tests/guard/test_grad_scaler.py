"""Loss scaling: whatever way a GradScaler is used, guarded training is what unguarded training would be.

Traps of FACTS.md shown here: §1 (fused kernels take only found_inf 0.0 or 1.0; non-fused optimizers raise on the
scaler's attributes; an uninitialised momentum buffer), §2.4, §2.6.
"""

import copy
import math
from typing import NamedTuple

import pytest
import torch
from guard_helpers import (
    assert_close,
    assert_identical,
    guarded_model,
    loss_at,
    make_model,
    poison,
    snapshot,
    take_step,
    true_norm,
    twins,
)
from optimizer_cases import BY_ID, SKIPPING, Case

import fastguard

from pairs import pairs

NUM_STEPS = 6
MAX_NORM = 0.05


class Way(NamedTuple):
    """One way to use a scaler."""

    unscales: bool = False
    init_scale: float = 2.0**10
    enabled: bool = True


WAYS = {
    "step-alone": Way(),
    "after-unscale": Way(unscales=True),
    "odd-scale": Way(init_scale=1000.3),
    "odd-scale-after-unscale": Way(init_scale=1000.3, unscales=True),
    "disabled": Way(enabled=False),
}
# float32 and dense: a scaler's own kernels take no others.
DENSE = [case for case in SKIPPING if case.model != "embedding"]
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
SOME = [
    "SGD-momentum=0.9-weight_decay=0.01-foreach=False",
    "SGD-momentum=0.9-weight_decay=0.01-fused",
    "AdamW-foreach",
    "AdamW-fused",
    "Adagrad-lr_decay=0.1-fused",
    "NAdam-foreach=False",
]
some_cases = pytest.mark.parametrize("case", [BY_ID[i] for i in SOME], ids=SOME)


def _scaler(way):
    return torch.amp.GradScaler("cpu", init_scale=way.init_scale, growth_interval=3, enabled=way.enabled)


def _train(model, optimizer, way, *, bad=None, leave_out=(), max_norm=None):
    """A training with a scaler; the scales at the beginning of each step."""
    scaler = _scaler(way)
    scales = []
    for step in range(NUM_STEPS):
        scales.append(scaler.get_scale())
        if step in leave_out:
            continue
        optimizer.zero_grad()
        scaler.scale(loss_at(model, step)).backward()
        if step in (bad or {}):
            poison(model, bad[step])
        if way.unscales:
            scaler.unscale_(optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    return scales


@pytest.mark.thinned(n=2)
@every_way
@some_cases
def test_guarded_training_is_bit_identical(case, way):
    plain, optimizer, model, guarded = twins(case.make, kind=case.model, max_norm=1e6)
    names = set(vars(guarded))
    expected = _train(plain, optimizer, way)
    assert _train(model, guarded, way) == expected
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    assert set(vars(guarded)) == names  # grad_scale and found_inf are gone
    guard = guarded.guard
    guard.flush()
    assert guard.history.num_steps == NUM_STEPS
    still_scaled = way.enabled and not way.unscales
    as_float32 = torch.tensor(expected).tolist()  # before its first use a scaler has the number it was given
    assert [e.loss_scale for e in guard.history.recent] == (as_float32 if still_scaled else [None] * NUM_STEPS)


@pytest.mark.thinned(n=4)
@pytest.mark.parametrize(
    ("case", "unscales", "value", "bad_step"),
    pairs(DENSE, [False, True], [math.inf, math.nan], [0, 3]),
    ids=lambda value: value.id if isinstance(value, Case) else None,
)
def test_the_scalers_skip(case, unscales, value, bad_step):
    """Same scales as unguarded, and parameters as if the step had never been."""
    way = Way(unscales=unscales)
    reference = make_model(case.model)
    plain, model = copy.deepcopy(reference), copy.deepcopy(reference)
    never = case.make(reference.parameters())
    guarded = fastguard.wrap(case.make(model.parameters()), model, max_norm=1e6)
    # Not a fused one: torch's fused SGD goes on from an uninitialised buffer when its first step is skipped.
    unguarded = BY_ID[case.id.replace("-fused", "-foreach=False")].make(plain.parameters())
    expected = _train(plain, unguarded, way, bad={bad_step: value})
    assert _train(model, guarded, way, bad={bad_step: value}) == expected
    _train(reference, never, Way(unscales=True), leave_out=(bad_step,))
    # Scales are powers of two here, so that what they were does not show in the parameters.
    assert_identical(snapshot(model, guarded), snapshot(reference, never))
    guard = guarded.guard
    guard.flush()
    assert [e.skipped for e in guard.history.recent] == [s == bad_step for s in range(NUM_STEPS)]
    assert guard.history.first_events[0].names == ("0.weight",)


@pytest.mark.thinned(n=4)
@every_way
@some_cases
def test_clipping_is_that_of_unscale_and_clip_grad_norm(case, way, backend):
    plain, optimizer, model, guarded = twins(case.make, kind=case.model, max_norm=MAX_NORM, backend=backend)
    expected = _train(plain, optimizer, way._replace(unscales=True), max_norm=MAX_NORM)
    assert _train(model, guarded, way) == expected
    guarded.guard.flush()
    assert guarded.guard.history.num_clipped == NUM_STEPS
    # Unscaling and clipping are one multiplication here and two there, and torch's norm is a float32.
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=2e-5, atol=1e-6)


@pytest.mark.thinned(n=4)
@every_way
@some_cases
def test_norms_are_of_unscaled_gradients(case, way, backend):
    model, guarded = guarded_model(case.make, kind=case.model, backend=backend)
    scaler = _scaler(way)
    loss_at(model, 0).backward()
    expected = [true_norm([p.grad]) for p in model.parameters()]
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    guarded.zero_grad()
    scaler.scale(loss_at(model, 0)).backward()
    if way.unscales:
        scaler.unscale_(guarded)
    scaler.step(guarded)
    guarded.guard.flush()
    last = guarded.guard.last
    assert last.tensors.norm == pytest.approx(expected, rel=1e-6)
    assert last.norm == pytest.approx(math.hypot(*expected), rel=1e-6)
    assert last.gradients.max_val == pytest.approx(largest, rel=1e-6)
    assert not last.clipped
    assert last.loss_scale == (way.init_scale if way.enabled and not way.unscales else None) or (
        way.init_scale == 1000.3 and last.loss_scale == pytest.approx(1000.3, rel=1e-6)
    )


@pytest.mark.parametrize("fused", [False, True])
def test_trap_1_flags_summed_over_devices(fused):
    """found_inf is the number of devices that saw one; fused kernels understand 1.0 alone."""
    model, guarded = guarded_model(lambda p: torch.optim.AdamW(p, lr=0.1, fused=fused))
    loss_at(model, 0).backward()
    before = snapshot(model, guarded)
    guarded.grad_scale, guarded.found_inf = None, torch.tensor(2.0)
    guarded.step()
    assert guarded.guard.last.skipped
    assert_identical(snapshot(model, guarded), before)


def _one_step(model, optimizer, scaler, bad=None):
    optimizer.zero_grad()
    scaler.scale(loss_at(model, 0)).backward()
    if bad is not None:
        poison(model, bad)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_trap_2_6_steps_that_the_scaler_skips_are_seen(skip_nonfinite):
    model, guarded = guarded_model(lambda p: torch.optim.AdamW(p, lr=0.1), skip_nonfinite=skip_nonfinite)
    scaler = torch.amp.GradScaler("cpu")
    before = snapshot(model, guarded)
    _one_step(model, guarded, scaler, bad=math.inf)
    assert_identical(snapshot(model, guarded), before)  # the scaler's skip holds, whatever the guard was told
    last = guarded.guard.last
    assert (last.skipped, last.norm, last.nonfinite) == (True, math.inf, ["0.weight"])
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers_under_one_scaler(fused):
    def halves(model):
        return [torch.optim.AdamW(part.parameters(), lr=0.1, fused=fused) for part in (model[0], model[2])]

    def run(model, optimizers):
        scaler, scales = torch.amp.GradScaler("cpu", growth_interval=2), []
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(loss_at(model, step)).backward()
            if step == 2:
                poison(model, math.inf)  # in the first one only
            for optimizer in optimizers:
                scaler.step(optimizer)
            scales.append(scaler.get_scale())
            scaler.update()
        return scales

    plain = make_model()
    apart, together = copy.deepcopy(plain), copy.deepcopy(plain)
    optimizers, guarded = halves(plain), [fastguard.wrap(o, apart) for o in halves(apart)]
    sharing = fastguard.wrap(halves(together), together)
    expected = run(plain, optimizers)
    assert run(apart, guarded) == run(together, sharing) == expected
    if not fused:  # skipped by a fused kernel, an optimizer has state all the same
        assert_identical(snapshot(apart, *guarded), snapshot(plain, *optimizers))
    assert_identical(snapshot(apart)["parameters"], snapshot(plain)["parameters"])
    for guard in (*(o.guard for o in guarded), sharing[0].guard):
        guard.flush()
    assert [e.skipped for e in guarded[0].guard.history.recent] == [False, False, True, False, False]
    assert not any(e.skipped for e in guarded[1].guard.history.recent)  # one norm each: the other was fine
    assert [e.skipped for e in sharing[1].guard.history.recent] == [False, False, True, False, False]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raised_leaves_nothing_to_the_next(fused):
    """What a scaler sets, it deletes after the step; a step that raised must not leave it to the next one."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    guarded = fastguard.wrap(optimizer, model, max_consecutive_skips=1)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(fastguard.NonFiniteGradientsError):
        _one_step(model, guarded, scaler, bad=math.inf)
    scaler.update()
    plain = copy.deepcopy(model)
    _one_step(model, guarded, scaler)
    _one_step(plain, torch.optim.AdamW(plain.parameters(), lr=0.1, fused=fused), torch.amp.GradScaler("cpu"))
    assert not guarded.guard.last.skipped
    assert_close(snapshot(model)["parameters"], snapshot(plain)["parameters"], rtol=1e-6, atol=1e-7)


class TakesScaler(torch.optim.SGD):
    """An optimizer of the older contract: the scaler hands itself over as an argument."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        return super().step(closure)


def test_a_step_that_takes_the_scaler_itself_is_left_alone_with_a_way_out(caplog):
    """Nobody else knows how its gradients are scaled."""
    model, guarded = guarded_model(lambda p: TakesScaler(p, lr=0.1), max_norm=1e-3)
    assert [r.getMessage() for r in caplog.records if "scaler.unscale_(optimizer)" in r.getMessage()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_at(model, 0)).backward()
    plain = copy.deepcopy(model)
    for p, twin in zip(plain.parameters(), model.parameters()):
        p.grad = twin.grad.clone()
    with pytest.warns(FutureWarning, match="GradScaler"):
        scaler.step(guarded)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_identical(snapshot(model), snapshot(plain))
    assert guarded.guard.last is None
    take_step(model, guarded, 1)  # without the scaler
    assert (guarded.guard.last.step, guarded.guard.last.clipped) == (0, True)


class OwnScaling(torch.optim.Optimizer):
    """An optimizer from elsewhere that takes part in the contract by itself, and insists on it under a scaler."""

    _step_supports_amp_scaling = True

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.expects_scaler = True

    @torch.no_grad()
    def step(self, closure=None):
        scale, found_inf = (self.grad_scale, self.found_inf) if self.expects_scaler else (None, None)
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and not found_inf:
                p.add_(p.grad if scale is None else p.grad / scale, alpha=-0.1)


@every_way
def test_an_optimizer_with_a_scaling_of_its_own(way):
    plain, optimizer, model, guarded = twins(OwnScaling)
    optimizer.expects_scaler = guarded.expects_scaler = way.enabled
    bad = {0: math.inf, 3: math.nan} if way.enabled else {}
    assert _train(model, guarded, way, bad=bad) == _train(plain, optimizer, way, bad=bad)
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_step_without_any_gradient(fused):
    model, guarded = guarded_model(lambda p: torch.optim.AdamW(p, lr=0.1, fused=fused))
    before = snapshot(model, guarded)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))  # the scaler is in use, but nothing has a gradient
    scaler.step(guarded)
    assert_identical(snapshot(model, guarded), before)
    assert (guarded.guard.last.norm, guarded.guard.last.skipped) == (0.0, False)
    with pytest.raises(AssertionError, match="No inf checks"):  # the scaler's own complaint stays
        scaler.update()
