"""A case of this group, its loop, and the truths and faults that several of its tasks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from ..case import Case, Make, Truth, changed
from ..harm import worse
from ..loop import Plan, Tensors, Watch, take_step
from ..wild.case import WildCase

GROUP = "afresh"
_STEPS = ("lr", "explosion", "loss", "weights", "units", "nonfinite")
_STILL = ("loss", "data", "output", "setup", "vanishing")
HIGH = Truth(_STEPS, ("learning-rate-too-high",))
LOW = Truth(("lr", "loss", "weights"), ("learning-rate-too-low",))
KEPT = Truth(("setup", *_STEPS), ("missing-zero-grad",))
LABELS = Truth(("data", "loss", "setup"), ("wrong-targets",))
BATCH = Truth(("nonfinite", "data"), ("bad-batch", "recurring-bad-batch"))
OUTPUT = Truth((*_STILL, "units"), ("wrong-output-layer",))
LOSS = Truth((*_STILL, "explosion"), ("wrong-loss",))
INPUTS = Truth(("data", "setup", "output", "vanishing", *_STEPS), ("unnormalised-inputs",))
TARGETS = Truth(("data", "setup", "output", *_STEPS), ("unnormalised-targets",))
BOTH = Truth(TARGETS.families, ("unnormalised-targets", "unnormalised-inputs"))
CLIPPED = Truth(("explosion", "lr", "loss", "weights"), ("clipped-away", "gradients-too-large-to-clip"))
CUT = Truth(
    ("setup", "weights", "vanishing", "loss"), ("parameters-cut-off", "no-gradient-arrives", "frozen-parameters")
)
LEFT_OUT = Truth(("setup", "weights", "loss"), ("parameters-missing-from-optimizer", "frozen-parameters"))
LEAK = Truth(("data", "loss", "vanishing"), ("trivial-targets",))
CANNOT = Truth(("loss", "setup", "output"), ("model-cannot-fit",))
SORTED = Truth(("data", "loss", "explosion"), ("unshuffled-data",))
SINGULAR = Truth(("nonfinite", "loss"), ("singular-operation",))
EXPLODING = Truth((*_STEPS, "setup"), ("exploding-gradients", "poor-initialisation", "saturated-units"))
COLLAPSED = Truth((*_STILL, "units"), ("collapsed-representation", "trivial-targets", "wrong-loss"))
DECAY = Truth(("weights", "loss", "vanishing", "units", "setup"), ("weight-decay-too-high",))
DROPPED = Truth(("units", "loss", "setup"), ("dropout-too-high",))
SETTINGS = Truth(("lr", "loss", "weights", "setup", "explosion"), ("wrong-optimizer-settings",))
SCHEDULE = Truth(("lr", "loss", "setup", "weights"), ("wrong-schedule", "learning-rate-too-low"))
GROWING = Truth((*SCHEDULE.families, *_STEPS), ("wrong-schedule", "learning-rate-too-high"))
OVERWRITTEN = Truth(("setup", "weights", "loss"), ("weights-overwritten",))
DEAD = Truth(("units", "vanishing", "weights", "setup", "loss"), ("dead-units", "poor-initialisation"))
SATURATED = Truth(("units", "vanishing", "weights", "setup", "loss"), ("saturated-units", "poor-initialisation"))
REPEATED = Truth(("data", "loss"), ("repeated-data", "overfitting"))

Change = Callable[[Plan], None]
Fault = tuple[str, Change | Make, Truth]


def plain(plan: Plan, watch: Watch) -> None:
    """The loop of most scripts: no validation, the loss of each step told to the guard."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    scheduler = None
    if plan.schedule is not None:
        num_steps = plan.num_epochs * sum(1 for _ in plan.batches(0))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, plan.schedule(num_steps))
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            watch.observe(optimizer, loss=take_step(plan, optimizer, batch))
            if scheduler is not None:
                scheduler.step()


def planned(seed: int, *what: Any, **options: Any) -> Plan:
    """A plan with that loop; a sound run is known by its quality alone."""
    return Plan(*what, **{"seed": seed, "play": plain, "judged_by_loss": False, **options})


def sound(home: str, kind: str, title: str, make: Make, **variants: Mapping[str, Any]) -> list[Case]:
    """A sound run for each of the `variants`, names with what is changed in the plan, each with another seed."""
    return [
        WildCase(f"{GROUP}/{kind}/{name}", GROUP, kind, title, changed(make, **changes), home, seed=seed)
        for seed, (name, changes) in enumerate((variants or {"plain": {}}).items())
    ]


def faulty(home: str, kind: str, make: Make, *faults: Fault) -> list[Case]:
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
            worse(2),
        )
        for name, change, truth in faults
    ]


def _with(make: Make, change: Change) -> Make:
    def with_fault(seed: int) -> Plan:
        plan = make(seed)
        change(plan)
        return plan

    return with_fault


def times(factor: float) -> Change:
    """Another learning rate."""

    def change(plan: Plan) -> None:
        plan.lr *= factor

    return change


def putting(**fields: Any) -> Change:
    """Other fields of the plan."""

    def change(plan: Plan) -> None:
        for name, value in fields.items():
            setattr(plan, name, value)

    return change


def shuffled(plan: Plan) -> None:
    """Targets of other samples."""
    order = torch.randperm(len(plan.train[-1]), generator=torch.Generator().manual_seed(7))
    plan.train = (*plan.train[:-1], plan.train[-1][order])


def in_order(plan: Plan) -> None:
    """Sorted by their targets, and never shuffled."""
    order = plan.train[-1].reshape(len(plan.train[-1]), -1)[:, 0].argsort(stable=True)
    plan.train, plan.shuffles = tuple(t[order] for t in plan.train), False


def one_nan(plan: Plan) -> None:
    """NaN in some samples of the data: a part of all batches is lost."""
    x = plan.train[0].clone()
    x[::5].view(len(x[::5]), -1)[:, 0] = torch.nan
    plan.train = (x, *plan.train[1:])


def scaled_inputs(factor: float, offset: float = 0.0) -> Change:
    """Inputs in other units, in training as later."""

    def change(plan: Plan) -> None:
        plan.train = (factor * plan.train[0] + offset, *plan.train[1:])
        plan.held_out = (factor * plan.held_out[0] + offset, *plan.held_out[1:])

    return change


def scaled_targets(factor: float, offset: float = 0.0) -> Change:
    """Targets in other units, in training as later."""

    def change(plan: Plan) -> None:
        plan.train = (*plan.train[:-1], factor * plan.train[-1] + offset)
        plan.held_out = (*plan.held_out[:-1], factor * plan.held_out[-1] + offset)

    return change


def loss_is(loss: Callable[..., torch.Tensor]) -> Change:
    """Another loss; the former is handed to it first."""

    def change(plan: Plan) -> None:
        former = plan.loss
        plan.loss = lambda model, batch: loss(former, model, batch)

    return change


def cross_entropy(model: torch.nn.Module, batch: Tensors) -> torch.Tensor:
    """Of logits [B, ..., C] and labels [B, ...]."""
    out = model(batch[0])
    return F.cross_entropy(out.flatten(0, -2), batch[-1].flatten())


def squared_error(model: torch.nn.Module, batch: Tensors) -> torch.Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch[0]), batch[-1])
