"""Every optimizer: clipping is torch's, and a skip is no step at all. Where neither happens, torch_suite/ holds guarded
training to the bits of unguarded training. And every family of learning-rate schedulers, made before and after `wrap`.

Warnings are errors in this suite; a scheduler warns when it finds its count of steps gone, which is how proxies and
replaced `step` methods show.
"""

import copy
import inspect
import math

import pytest
import torch
from guard_helpers import (
    assert_close,
    assert_identical,
    clip_by_torch,
    gradients,
    make_model,
    snapshot,
    take_step,
    true_norm,
    twins,
)
from optimizer_cases import CASES, SKIPPING
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

import fastguard

NUM_STEPS = 6
# A tenth of the norms that occur, so that every step is clipped.
MAX_NORM = 0.02

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_skipping_case = pytest.mark.parametrize("case", SKIPPING, ids=lambda case: case.id)


@pytest.mark.thinned(n=5)
@every_case
def test_clipping_is_torchs(case, backend):
    # In float64, so that the rounding of torch's own norm does not count.
    plain, optimizer, model, guarded = twins(
        case.make, kind=case.model, dtype=torch.float64, max_norm=MAX_NORM, backend=backend
    )
    for step in range(NUM_STEPS):
        norms = []

        def clip(norms=norms):
            norms.append(clip_by_torch(plain, MAX_NORM))

        take_step(plain, optimizer, step, closure=case.closure, before_step=clip)
        take_step(model, guarded, step, closure=case.closure)
        last = guarded.guard.last
        assert last.clipped
        assert last.norm == pytest.approx(norms[0], rel=1e-12)  # before clipping, of the step's first evaluation
        assert last.clip_coef == pytest.approx(MAX_NORM / (norms[0] + 1e-6), rel=1e-12)
        assert true_norm(gradients(model)) == pytest.approx(true_norm(gradients(plain)), rel=1e-10)
    # 1e-10: LBFGS divides differences of gradients by one another; all others stay within 1e-13.
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=1e-10, atol=1e-12)


@pytest.mark.thinned(n=5)
@every_skipping_case
@pytest.mark.parametrize(
    ("bad_step", "value", "closure"), [(0, math.nan, False), (3, -math.inf, False), (2, math.nan, True)]
)
def test_a_skipped_step_never_was(case, bad_step, value, closure, backend):
    plain, optimizer, model, guarded = twins(case.make, kind=case.model, max_norm=1e6, backend=backend)
    for step in range(NUM_STEPS):
        if step != bad_step:
            take_step(plain, optimizer, step, closure=closure)
            take_step(model, guarded, step, closure=closure)
            continue
        before = snapshot(model, guarded)
        seen = []
        look = lambda seen=seen: seen.extend(gradients(model))  # noqa: E731
        loss = take_step(model, guarded, step, closure=closure, bad=value, before_step=look)
        assert guarded.guard.last.skipped and (math.isfinite(loss) if closure else loss is None)
        assert_identical(snapshot(model, guarded), before, "across the skip")
        assert all(now is then for now, then in zip(gradients(model), seen, strict=True)), "gradients are given back"
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer), "as if the bad step had never been")
    guarded.guard.flush()
    assert [entry.skipped for entry in guarded.guard.history.recent] == [s == bad_step for s in range(NUM_STEPS)]


@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_lbfgs_is_not_skipped_and_says_so(line_search_fn):
    plain = make_model()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.LBFGS(plain.parameters(), lr=0.5, max_iter=3, line_search_fn=line_search_fn)
    guarded = fastguard.wrap(
        torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn=line_search_fn), model
    )
    take_step(plain, optimizer, 0, closure=True, bad=math.inf)
    take_step(model, guarded, 0, closure=True, bad=math.inf)
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    assert not guarded.guard.last.skipped
    assert not guarded.guard.last.is_finite
    assert guarded.guard.last.nonfinite[0] == "0.weight"


SCHEDULERS = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda t: 0.8),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lrs.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, total_iters=6, power=2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, total_iters=2), lrs.ExponentialLR(o, 0.5)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, total_iters=2), lrs.ExponentialLR(o, 0.5)]),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.001, anneal_epochs=4),
}


def _optimizer(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def _run(model, optimizer, scheduler, bad_step=None):
    rates = []
    for step in range(9):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        take_step(model, optimizer, step, bad=math.nan if step == bad_step else None)
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    return rates


def test_every_scheduler_of_torch_is_here():
    families = {
        name
        for name, cls in vars(lrs).items()
        if inspect.isclass(cls) and issubclass(cls, lrs.LRScheduler) and not name.startswith("_")
    }
    assert families - {"LRScheduler"} <= SCHEDULERS.keys()


# SequentialLR of torch 2.6 calls `step(epoch)`, which torch deprecates.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("bad_step", [None, 0])
@pytest.mark.parametrize("is_made", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_and_training_are_the_same(name, is_made, bad_step):
    """A skipped step is one to the scheduler: if it thought the first had not been taken, it would warn."""
    make = SCHEDULERS[name]
    plain = make_model()
    model = copy.deepcopy(plain)
    optimizer, guarded = _optimizer(plain), _optimizer(model)
    expected = _run(plain, optimizer, make(optimizer))
    if is_made == "before":
        scheduler = make(guarded)
        assert fastguard.wrap(guarded, model) is guarded
    else:
        scheduler = make(fastguard.wrap(guarded, model))
    assert _run(model, guarded, scheduler, bad_step) == expected
    assert len({tuple(rates) for rates in expected}) > 1  # it does schedule something
    guarded.guard.flush()
    assert guarded.guard.history.learning_rate == [rates[0] for rates in expected]
    if bad_step is None:
        assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    else:
        assert guarded.guard.history.first_events[0].step == 0


def test_trap_2_7_a_changed_class_keeps_the_guard():
    model = make_model()
    guarded = fastguard.wrap(_optimizer(model), model)
    guarded.__class__ = type("Renamed", (type(guarded),), {})
    before = snapshot(model, guarded)
    take_step(model, guarded, 0, bad=math.nan)
    assert guarded.guard.last.skipped
    assert_identical(snapshot(model, guarded), before)
