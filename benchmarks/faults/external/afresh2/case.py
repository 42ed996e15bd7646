"""A case of this group, and the truths that the other groups do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..afresh import case as c
from ..case import Case, Make, Truth
from ..harm import worse
from ..loop import Plan, Watch, epochs, take_step
from ..wild.case import WildCase

GROUP = "afresh2"
_STEPS = c.HIGH.families
SHORT = Truth(("loss", "lr"), ("stopped-too-early", "learning-rate-too-low"))
STATISTICS = Truth(("data", "loss", "setup", "units"), ("normalisation-statistics", "batch-size"))
NO_GRADIENT = Truth(
    ("setup", "weights", "vanishing", "loss"),
    ("no-gradient-arrives", "parameters-cut-off", "parameters-missing-from-optimizer"),
)
OUTLIERS = Truth(
    ("data", "setup", "output", "vanishing", "nonfinite", *_STEPS), ("outliers", "unnormalised-inputs", "bad-batch")
)
UNEVEN = Truth(("data", "loss", "output"), ("imbalanced-targets", "trivial-targets", "collapsed-representation"))
MODE = Truth(("data", "loss", "setup"), ("train-mode-in-validation",))
DIFFERS = Truth(("data", "loss"), ("preprocessing-differs",))
VANISHING = Truth(
    ("vanishing", "weights", "units", "loss", "setup"),
    ("vanishing-gradients", "saturated-units", "poor-initialisation"),
)
POOR = Truth((*VANISHING.families, "explosion"), ("poor-initialisation", "dead-units", "vanishing-gradients"))
HALF = Truth(
    ("nonfinite", "vanishing", "weights", "loss", "setup"), ("half-precision-underflow", "half-precision-overflow")
)
EXPERTS = Truth(("units", "setup", "loss", "vanishing"), ("dead-experts",))
WON = Truth(("loss", "vanishing", "explosion"), ("adversary-wins",))
SUMMED = Truth(("setup", "explosion", "lr", "loss"), ("wrong-loss", "learning-rate-too-high", "unscaled-accumulation"))
SMALL_BATCH = Truth(("data", "explosion", "loss", "lr"), ("batch-size", "learning-rate-too-high"))
NOT_SCALED = Truth(("setup", *_STEPS), ("unscaled-accumulation", "learning-rate-too-high"))
OVERFITTED = Truth(("loss", "data"), ("overfitting",))
MIXED = Truth(("data", "loss", "setup", "output"), ("model-cannot-fit", "wrong-targets", "wrong-output-layer"))
FROZEN = Truth(("setup", "weights", "vanishing", "loss"), ("frozen-parameters", "parameters-cut-off"))

Fault = tuple[str, c.Change | Callable[..., Any], Truth]


def task(seed: int, model: Callable[[], nn.Module], loss: Any, split: Any, quality: Any, **options: Any) -> Plan:
    """A plan whose model is made with the seed; it validates where `play` is `epochs`."""
    torch.manual_seed(seed)
    return c.planned(seed, model(), loss, *split, quality, 0.0, **options)


def faulty(home: str, kind: str, make: Make, *faults: Fault, margin: float = 0.05) -> list[Case]:
    """A run for each fault: its name, what it changes in the plan, and what is right."""
    return [
        WildCase(
            f"{GROUP}/{kind}/{name}",
            GROUP,
            f"{kind}/{name}",
            f"{kind}, {name}",
            _with(make, change),
            home,
            truth,
            make,
            worse(2, margin),
        )
        for name, change, truth in faults
    ]


def _with(make: Make, change: c.Change) -> Make:
    def with_fault(seed: int) -> Plan:
        plan = make(seed)
        torch.manual_seed(seed)
        change(plan)
        return plan

    return with_fault


def model_is(make: Callable[[], nn.Module]) -> c.Change:
    """Another model."""

    def change(plan: Plan) -> None:
        plan.model = make()

    return change


def weights(change: Callable[[nn.Module], None]) -> c.Change:
    """Something done to the model before training, without gradients."""

    def change_plan(plan: Plan) -> None:
        with torch.no_grad():
            change(plan.model)

    return change_plan


def once_more(step: Callable[[Plan, torch.optim.Optimizer, Any], torch.Tensor]) -> Callable[[Plan, Watch], None]:
    """The loop of most scripts, with another step."""

    def play(plan: Plan, watch: Watch) -> None:
        optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
        for epoch in range(plan.num_epochs):
            for batch in plan.batches(epoch):
                watch.observe(optimizer, loss=step(plan, optimizer, batch))

    return play


@once_more
def cleared_late(plan: Plan, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """Gradients are cleared between backward and step."""
    loss = plan.loss(plan.model, batch)
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    return loss


@once_more
def undone(plan: Plan, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """What a step did is put back, as by a state that is loaded in the loop."""
    kept = [p.detach().clone() for p in plan.model.parameters()]
    loss = take_step(plan, optimizer, batch)
    with torch.no_grad():
        for p, old in zip(plan.model.parameters(), kept):
            p.lerp_(old, 0.98)
    return loss


def rate_each_batch(plan: Plan, watch: Watch) -> None:
    """A schedule made for epochs, stepped after each batch."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            watch.observe(optimizer, loss=take_step(plan, optimizer, batch))
            schedule.step()


def summed_over(count: int) -> Callable[[Plan, Watch], None]:
    """Gradients of several batches are added up, and the losses not divided."""

    def play(plan: Plan, watch: Watch) -> None:
        optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
        for epoch in range(plan.num_epochs):
            for place, batch in enumerate(plan.batches(epoch), 1):
                loss = plan.loss(plan.model, batch)
                loss.backward()
                if place % count == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    watch.observe(optimizer, loss=loss)

    return play


def rolled(plan: Plan) -> None:
    """Targets lie one row off."""
    plan.train = (*plan.train[:-1], plan.train[-1].roll(1, 0))


def first_batch_only(plan: Plan) -> None:
    """The iterator is made anew at each step, without shuffling: the same samples again and again."""
    first, times = plan.batch_size, len(plan.train[0]) // plan.batch_size
    plan.train = tuple(t[:first].repeat(times, *[1] * (t.ndim - 1)) for t in plan.train)
    plan.shuffles = False


VALIDATED = {"play": epochs}
