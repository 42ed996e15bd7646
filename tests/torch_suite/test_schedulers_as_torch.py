"""All learning-rate schedulers, and averaged weights, on guarded optimizers."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import attempt, in_all_modes
from guard_helpers import assert_identical, loss_at, make_model, train
from torch import optim
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn
from torch_optimizers import copied, make_parameters, set_gradients, state_of


class Warmup:
    """A callable object, whose attributes go into the state dict of a `LambdaLR`."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def _plateau(optimizer: Any, **settings: Any) -> Any:
    return schedulers.ReduceLROnPlateau(optimizer, **{"patience": 1, "factor": 0.5, **settings})


def _sequence(optimizer: Any) -> Any:
    parts = [schedulers.ConstantLR(optimizer, 0.5, 3), schedulers.ExponentialLR(optimizer, 0.8)]
    return schedulers.SequentialLR(optimizer, [*parts, schedulers.StepLR(optimizer, 1)], milestones=[2, 5])


def _chain(optimizer: Any) -> Any:
    return schedulers.ChainedScheduler(
        [
            schedulers.ConstantLR(optimizer, 0.5, 3),
            schedulers.StepLR(optimizer, 2),
            schedulers.ExponentialLR(optimizer, 0.9),
        ]
    )


def _one_cycle(optimizer: Any, **settings: Any) -> Any:
    return schedulers.OneCycleLR(optimizer, max_lr=0.3, total_steps=12, **settings)


def _cyclic(optimizer: Any, **settings: Any) -> Any:
    return schedulers.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2, **settings)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, Warmup(4)),
    "LambdaLR of a function": lambda o: schedulers.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (step + 1)]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 3, 3, 6]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.2, 0.9, 5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5, power=2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, T_mult=2),
    "ReduceLROnPlateau": _plateau,
    "ReduceLROnPlateau, max, abs": lambda o: _plateau(
        o, mode="max", threshold_mode="abs", cooldown=1, min_lr=[1e-3, 0]
    ),
    "OneCycleLR": _one_cycle,
    "OneCycleLR, linear, three phases": lambda o: _one_cycle(o, anneal_strategy="linear", three_phase=True),
    "CyclicLR": _cyclic,
    "CyclicLR, exp_range": lambda o: _cyclic(o, mode="exp_range", gamma=0.9, cycle_momentum=False),
    "CyclicLR, own scale": lambda o: _cyclic(o, scale_fn=lambda x: 1 / x, scale_mode="cycle"),
    "SequentialLR": _sequence,
    "ChainedScheduler": _chain,
    "SWALR": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=3),
    "SWALR, linear": lambda o: SWALR(o, swa_lr=[0.02, 0.3], anneal_epochs=2, anneal_strategy="linear"),
}


def _optimizer(model: torch.nn.Module, kind: str = "SGD") -> Any:
    """Two groups of their own learning rates."""
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.05}, {"params": others}]
    return optim.SGD(groups, lr=0.1, momentum=0.9) if kind == "SGD" else optim.AdamW(groups, lr=0.1)


def _step(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step([3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0, 4.0, 4.0, 4.0][step % 10])
    else:
        scheduler.step()


def _plan(optimizer: Any) -> list[Any]:
    return [[g["lr"], g.get("momentum"), g.get("betas"), g.get("initial_lr")] for g in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
@in_all_modes
def test_every_scheduler(name: str, thorough: bool) -> Any:
    """Rates and momenta of each step, and where training ends; with a break and a state dict half-way."""
    results = []
    for kind in ("SGD", "AdamW") if thorough and "Cycl" in name else ("SGD",):  # those have a say in betas, too
        model = make_model()
        optimizer = _optimizer(model, kind)
        scheduler = SCHEDULERS[name](optimizer)
        plans = [_plan(optimizer)]
        for step in range(10):
            if step == 5:
                file = io.BytesIO()
                saved = {"o": optimizer.state_dict(), "s": scheduler.state_dict(), "m": model.state_dict()}
                if "function" in name or "Multiplicative" in name or "own" in name:
                    saved = copy.deepcopy(saved)
                else:
                    torch.save(saved, file)
                    file.seek(0)
                    saved = torch.load(file, weights_only=False)
            train(model, optimizer, [step])
            _step(scheduler, step)
            plans += [_plan(optimizer), attempt(scheduler.get_last_lr)]
        end = state_of(model.parameters(), optimizer)

        other = make_model(seed=1)
        other.load_state_dict(saved["m"])
        resumed = _optimizer(other, kind)
        again = SCHEDULERS[name](resumed)
        resumed.load_state_dict(saved["o"])
        again.load_state_dict(saved["s"])
        for step in range(5, 10):
            train(other, resumed, [step])
            _step(again, step)
        assert_identical(state_of(other.parameters(), resumed), end)
        results.append([copied(plans), end])
    return results


@in_all_modes
def test_several_schedulers_at_once() -> Any:
    model = make_model()
    optimizer = _optimizer(model)
    many = [
        schedulers.ExponentialLR(optimizer, 0.95),
        schedulers.MultiStepLR(optimizer, [2, 4]),
        schedulers.CosineAnnealingLR(optimizer, 6),
        _plateau(optimizer),
    ]
    plans = []
    for step in range(8):
        train(model, optimizer, [step])
        for scheduler in many:
            _step(scheduler, step)
        plans.append(_plan(optimizer))
    return [plans, state_of(model.parameters(), optimizer, *many[:3])]


@in_all_modes
def test_warnings_of_steps_in_the_wrong_order() -> Any:
    """A scheduler looks whether `optimizer.step` was called: the guard is not in its way."""
    parameters = make_parameters([(2, 2)])
    results: list[Any] = []
    for overridden in (False, True):
        optimizer = optim.SGD(parameters, lr=0.1)
        scheduler = schedulers.StepLR(optimizer, 1)
        if overridden:
            optimizer.step = functools.partial(optimizer.step)
        words = "has been overridden" if overridden else r"Detected call of `lr_scheduler.step\(\)` before"
        with pytest.warns(UserWarning, match=words):
            scheduler.step()
        set_gradients(parameters, 0)
        optimizer.step()
        scheduler.step()
        results.append(_plan(optimizer))
    optimizer = optim.SGD(parameters, lr=0.1)
    scheduler = schedulers.StepLR(optimizer, 1)
    set_gradients(parameters, 1)
    optimizer.step()
    scheduler.step()  # warnings are errors
    return [results, state_of(parameters, optimizer, scheduler)]


@in_all_modes
def test_errors_of_schedulers() -> Any:
    parameters = make_parameters([(2, 2)])
    optimizer, other = optim.SGD(parameters, lr=0.1), optim.SGD(parameters, lr=0.1)
    one = schedulers.ExponentialLR(optimizer, 0.9)
    makers: list[Callable[[], Any]] = [
        lambda: schedulers.StepLR(parameters, 1),
        lambda: schedulers.LambdaLR(optimizer, [len, len]),
        lambda: schedulers.ExponentialLR(other, 0.9, last_epoch=3),
        lambda: schedulers.SequentialLR(optimizer, [one, schedulers.ExponentialLR(other, 0.9)], [1]),
        lambda: schedulers.SequentialLR(optimizer, [one], [1, 2]),
        lambda: schedulers.ChainedScheduler([one, schedulers.ExponentialLR(other, 0.9)]),
        lambda: schedulers.ChainedScheduler([]),
        lambda: schedulers.OneCycleLR(optimizer, 0.1),
        lambda: schedulers.OneCycleLR(optimizer, 0.1, total_steps=-1),
        lambda: _one_cycle(optim.Rprop(parameters)),
        lambda: _cyclic(optim.Adagrad(parameters)),
        lambda: _cyclic(optimizer, mode="no such"),
        lambda: schedulers.CosineAnnealingWarmRestarts(optimizer, 0),
        lambda: _plateau(optimizer, factor=1.5),
        lambda: _plateau(optimizer, min_lr=[0.1, 0.2]),
        lambda: SWALR(optimizer, [0.1, 0.2]),
        lambda: SWALR(optimizer, 0.1, anneal_strategy="no such"),
    ]
    results = [attempt(make) for make in makers]
    cycle = schedulers.OneCycleLR(other, 0.1, total_steps=2)
    for _ in range(3):
        set_gradients(parameters, 0)
        other.step()
        results.append(attempt(cycle.step))
    return [r if isinstance(r, str) or r is None else str(type(r)) for r in results]


@in_all_modes
def test_a_group_that_joins_a_scheduled_optimizer() -> Any:
    first, second = make_parameters([(3, 2), (4,)])
    optimizer = optim.SGD([first], lr=0.1, momentum=0.9)
    scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0)
    plans = []
    for step in range(6):
        set_gradients([first, second], step)
        optimizer.step()
        if step == 2:
            optimizer.add_param_group({"params": [second], "lr": 0.3})
        scheduler.step(1.0)
        plans.append(_plan(optimizer))
    return [plans, state_of([first, second], optimizer)]


def _without_collecting(run: Callable[[], Any]) -> Any:
    run()  # what torch imports at the first step may hold the frames that it was imported from
    gc.disable()
    try:
        gc.collect(1)  # what is young now is so no more
        return run()
    finally:
        gc.enable()


@in_all_modes
def test_optimizer_and_scheduler_are_freed_without_the_collector() -> Any:
    def run() -> list[bool]:
        parameters = make_parameters([(2, 2)])
        optimizer = optim.AdamW(parameters, lr=0.1)
        scheduler = schedulers.LambdaLR(optimizer, Warmup(2))
        set_gradients(parameters, 0)
        optimizer.step()
        scheduler.step()
        refs = [weakref.ref(o) for o in (parameters[0], optimizer, scheduler)]
        del parameters, optimizer, scheduler
        return [ref() is None for ref in refs]

    freed = _without_collecting(run)
    assert all(freed)
    return freed


@in_all_modes
def test_nothing_is_left_to_the_collector() -> Any:
    def run() -> int:
        parameters = make_parameters([(2, 2)])
        optimizer = optim.SGD(parameters, lr=0.1)
        scheduler = schedulers.ExponentialLR(optimizer, 0.9)
        for step in range(3):
            set_gradients(parameters, step)
            optimizer.step()
            scheduler.step()
        del parameters, optimizer, scheduler
        return gc.collect(0)  # of what was made since

    return _without_collecting(run)


# --- averaged weights ---


def _model_with_buffers() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "own": {"avg_fn": lambda old, new, n: old + (new - old) * 0.25},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "swa": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "ema of buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("average", AVERAGES)
@in_all_modes
def test_averaged_models(average: str) -> Any:
    """In the way of `swa_utils`: a schedule, then a constant rate and averages, batch norms updated at the end."""
    model = _model_with_buffers()
    averaged = AveragedModel(model, **AVERAGES[average])
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    before, after = schedulers.ExponentialLR(optimizer, 0.9), SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    for step in range(6):
        train(model, optimizer, [step])
        if step < 2:
            before.step()
        else:
            averaged.update_parameters(model)
            after.step()
    again = AveragedModel(_model_with_buffers(), **AVERAGES[average])
    again.load_state_dict(averaged.state_dict())
    train(model, optimizer, [6])
    for each in (averaged, again):
        each.update_parameters(model)
    update_bn([torch.randn(5, 6, generator=torch.Generator().manual_seed(1))], averaged)
    loss = loss_at(averaged.eval(), 7).detach()
    assert math.isfinite(float(loss)) and int(averaged.n_averaged) == 5
    end = [loss, copied(averaged.state_dict()), copied(again.state_dict())]
    return [end, state_of(model.parameters(), optimizer, before, after)]


@in_all_modes
def test_averages_of_what_two_optimizers_train() -> Any:
    """Parameters that are shared, and averages that are put back into the model."""
    model = make_model()
    halves = list(model.parameters())
    both = [optim.SGD(halves[:2], lr=0.1), optim.AdamW(halves[2:], lr=0.01)]
    averaged = AveragedModel(model)
    for step in range(4):
        model.zero_grad()
        loss_at(model, step).backward()
        for optimizer in both:
            optimizer.step()
        averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())
    train(model, both[0], [5])
    copied_average = copy.deepcopy(averaged)
    return [copied(copied_average.state_dict()), state_of(model.parameters(), *both)]
