"""Every family of learning-rate schedulers, made before and after wrapping: the same rates, and no warning.

Warnings are errors in this suite; a scheduler warns when it finds its count of steps gone, which is how proxies and
replaced `step` methods show.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_helpers import assert_identical, make_model, snapshot, take_step
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

import fastguard

# SequentialLR of torch 2.6 calls `step(epoch)`, and is told by torch not to.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")

NUM_STEPS = 9

Maker = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Maker] = {
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


def _optimizer(model: torch.nn.Module, lr: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def _run(model: torch.nn.Module, optimizer: Any, scheduler: Any, bad_step: int | None = None) -> list[list[float]]:
    rates = []
    for step in range(NUM_STEPS):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        take_step(model, optimizer, step, bad=math.nan if step == bad_step else None)
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    return rates


def test_every_scheduler_of_torch_is_here() -> None:
    families = {
        name
        for name, cls in vars(lrs).items()
        if inspect.isclass(cls) and issubclass(cls, lrs.LRScheduler) and not name.startswith("_")
    }
    assert families - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize("bad_step", [None, 0])
@pytest.mark.parametrize("is_made", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_and_training_are_the_same(name: str, is_made: str, bad_step: int | None) -> None:
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


def test_trap_2_7_a_changed_class_keeps_the_guard() -> None:
    model = make_model()
    guarded = fastguard.wrap(_optimizer(model), model)
    guarded.__class__ = type("Renamed", (type(guarded),), {})
    before = snapshot(model, guarded)
    take_step(model, guarded, 0, bad=math.nan)
    assert guarded.guard.last.skipped
    assert_identical(snapshot(model, guarded), before)
