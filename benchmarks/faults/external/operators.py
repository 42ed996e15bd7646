"""Named faults: each operator changes the plan of a training. And the tables that plant them in tasks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .case import TASKS, Case, Make, Truth
from .harm import worse
from .loop import Plan, Tensors, Watch, epochs, take_step

Change = Callable[[Plan], None]
Fault = tuple[str, Change, Truth]
VALIDATED = {"play": epochs}


def _all_batches(plan: Plan) -> Iterator[Tensors]:
    for epoch in range(plan.num_epochs):
        yield from plan.batches(epoch)


def plain(plan: Plan, watch: Watch) -> None:
    """The loop of most scripts: no validation, and each step's loss observed."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    scheduler = None
    if plan.schedule is not None:
        num_steps = plan.num_epochs * sum(1 for _ in plan.batches(0))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, plan.schedule(num_steps))
    for batch in _all_batches(plan):
        watch.observe(optimizer, loss=take_step(plan, optimizer, batch))
        if scheduler is not None:
            scheduler.step()


def planned(seed: int, model: Callable[[], nn.Module], loss: Any, split: Any, quality: Any, **options: Any) -> Plan:
    """A plan with that loop, whose model is made with the seed; it validates where `play` is `epochs`."""
    torch.manual_seed(seed)
    options = {"play": plain, "judged_by_loss": False, **options}
    return Plan(model(), loss, *split, quality, 0.0, seed=seed, **options)


def _enter(cases: list[Case], home: str, name: str, title: str, ways: Mapping[str, Make], faults: Mapping) -> None:
    """Adds a task to `cases`. The first way has the task's name, and faults are compared with it."""
    kind = name.strip("_").replace("_", "-")
    for number, (way, make) in enumerate(ways.items()):
        called = f"{TASKS}/{kind}/{way.replace('_', '-')}" if number else f"{TASKS}/{kind}"
        cases.append(Case(called, TASKS, kind, title, make, home))
    twin = next(iter(ways.values()))
    for fault, (make, truth) in faults.items():
        fault = fault.replace("_", "-")
        what = f"{kind}/{fault}"
        cases.append(Case(f"{TASKS}/{what}", TASKS, what, f"{kind}, {fault}", make, home, truth, twin, worse(2)))


def planning(cases: list[Case], home: str) -> Callable[..., Callable[[Make], Make]]:
    """The decorator that adds plans to `cases`: the quality of a sound run, a table of faults, and other sound ways."""

    def task(least: float, *faults: Fault, **ways: Change) -> Callable[[Make], Make]:
        def enter(make: Make) -> Make:
            sound = {"": _with(make, least), **{way: _with(make, least, change) for way, change in ways.items()}}
            broken = {fault: (_with(make, least, change), truth) for fault, change, truth in faults}
            _enter(cases, home, make.__name__, make.__doc__ or "", sound, broken)
            return make

        return enter

    return task


def _with(make: Make, least: float, change: Change | None = None) -> Make:
    def make_changed(seed: int) -> Plan:
        plan = make(seed)
        plan.least = least
        torch.manual_seed(seed)
        if change is not None:
            change(plan)
        return plan

    return make_changed


def putting(**fields: Any) -> Change:
    """Other fields of the plan."""

    def change(plan: Plan) -> None:
        for name, value in fields.items():
            setattr(plan, name, value)

    return change


def all_of(*changes: Change) -> Change:
    """Several changes, one after another."""

    def change(plan: Plan) -> None:
        for one in changes:
            one(plan)

    return change


def loss_is(loss: Callable[..., torch.Tensor]) -> Change:
    """Another loss, which gets the former one as its first argument."""

    def change(plan: Plan) -> None:
        former = plan.loss
        plan.loss = lambda model, batch: loss(former, model, batch)

    return change


def shuffled(plan: Plan) -> None:
    """Targets of other samples."""
    order = torch.randperm(len(plan.train[-1]), generator=torch.Generator().manual_seed(7))
    plan.train = (*plan.train[:-1], plan.train[-1][order])


def rolled(plan: Plan) -> None:
    """Targets one row off."""
    plan.train = (*plan.train[:-1], plan.train[-1].roll(1, 0))


def in_order(plan: Plan) -> None:
    """Sorted by their targets, and never shuffled."""
    order = plan.train[-1].reshape(len(plan.train[-1]), -1)[:, 0].argsort(stable=True)
    plan.train, plan.shuffles = tuple(t[order] for t in plan.train), False


def scaled_inputs(factor: float, offset: float = 0.0) -> Change:
    """Inputs in other units, in training and in validation."""

    def change(plan: Plan) -> None:
        plan.train = (factor * plan.train[0] + offset, *plan.train[1:])
        plan.held_out = (factor * plan.held_out[0] + offset, *plan.held_out[1:])

    return change


def scaled_targets(factor: float, offset: float = 0.0) -> Change:
    """Targets in other units, in training and in validation."""

    def change(plan: Plan) -> None:
        plan.train = (*plan.train[:-1], factor * plan.train[-1] + offset)
        plan.held_out = (*plan.held_out[:-1], factor * plan.held_out[-1] + offset)

    return change


def random_labels(share: float, classes: int) -> Change:
    """Random labels for this share of the samples."""
    return targets_as(lambda y: torch.where(torch.rand(len(y)) < share, torch.randint(0, classes, y.shape), y))


def targets_as(change_targets: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Other targets in training."""

    def change(plan: Plan) -> None:
        plan.train = (*plan.train[:-1], change_targets(plan.train[-1]))

    return change


def damaged(damage: Any) -> Change:
    """A damage to the data, as the mutation operators have it."""

    def change(plan: Plan) -> None:
        damage(plan, torch.Generator().manual_seed(11))

    return change


def nan_rows(share: float = 0.02, value: float = torch.nan) -> Change:
    """One value that is not finite in this share of the samples."""

    def change(plan: Plan) -> None:
        x = plan.train[0].clone()
        rows = torch.rand(len(x), generator=torch.Generator().manual_seed(5)) < share
        flat = x.view(len(x), -1)
        flat[rows, 0] = value
        plan.train = (x, *plan.train[1:])

    return change


def model_is(make: Callable[[], nn.Module]) -> Change:
    """Another model."""

    def change(plan: Plan) -> None:
        plan.model = make()

    return change


def ending_in(*modules: nn.Module) -> Change:
    """More modules after the model."""

    def change(plan: Plan) -> None:
        plan.model = nn.Sequential(plan.model, *modules)

    return change


def weights(change: Callable[[nn.Module], None]) -> Change:
    """A change to the initial parameters, without gradients."""

    def change_plan(plan: Plan) -> None:
        with torch.no_grad():
            change(plan.model)

    return change_plan


def biases(value: float) -> Change:
    """Initial biases of all linear layers and convolutions but the last."""

    def fill(model: nn.Module) -> None:
        layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv1d)]
        for layer in layers[:-1]:
            layer.bias.fill_(value)

    return weights(fill)


def frozen(*parts: str) -> Change:
    """Parameters whose names begin so do not require gradients."""

    def change(plan: Plan) -> None:
        for name, p in plan.model.named_parameters():
            if name.startswith(parts):
                p.requires_grad_(False)

    return change


def left_out(*parts: str) -> Change:
    """Parameters whose names begin so are not in the optimizer."""

    def change(plan: Plan) -> None:
        former = plan.optimizer

        class Rest(nn.Module):
            def parameters(self, recurse: bool = True) -> Any:
                return [p for name, p in plan.model.named_parameters() if not name.startswith(parts)]

        plan.optimizer = lambda model, lr: former(Rest(), lr)

    return change


def stepped(watch: Watch, optimizer: torch.optim.Optimizer, loss: torch.Tensor, clears: bool = True) -> None:
    """One step of a script."""
    if clears:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.observe(optimizer, loss=loss)


def rate_each_batch(plan: Plan, watch: Watch) -> None:
    """A schedule made for epochs, stepped after each batch."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for batch in _all_batches(plan):
        watch.observe(optimizer, loss=take_step(plan, optimizer, batch))
        schedule.step()


def summing(count: int, divide: bool = True) -> Change:
    """Gradients of `count` batches accumulate before each step."""

    def step(plan: Plan, watch: Watch) -> None:
        optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
        for epoch in range(plan.num_epochs):
            for place, batch in enumerate(plan.batches(epoch), 1):
                loss = plan.loss(plan.model, batch)
                (loss / count if divide else loss).backward()
                if place % count == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    watch.observe(optimizer, loss=loss)

    return putting(play=step)


def put_back(every: int) -> Change:
    """The initial weights are loaded again every so many steps."""

    def play(plan: Plan, watch: Watch) -> None:
        kept = {name: t.clone() for name, t in plan.model.state_dict().items()}
        optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
        for count, batch in enumerate(_all_batches(plan), 1):
            stepped(watch, optimizer, plan.loss(plan.model, batch))
            if count % every == 0:
                plan.model.load_state_dict(kept)

    return putting(play=play)


def schedule_forgotten(plan: Plan, watch: Watch) -> None:
    """A warm-up whose scheduler is never stepped."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    torch.optim.lr_scheduler.LinearLR(optimizer, 1e-4, total_iters=40)
    for batch in _all_batches(plan):
        stepped(watch, optimizer, plan.loss(plan.model, batch))


def replaced_model(plan: Plan, watch: Watch) -> None:
    """The model is copied after the optimizer got its parameters; the copy predicts."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    plan.model = copy.deepcopy(plan.model)
    for batch in _all_batches(plan):
        plan.model.zero_grad()
        stepped(watch, optimizer, plan.loss(plan.model, batch))


def cross_entropy(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Of logits [B, ..., C] and labels [B, ...]."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[-1].flatten())


def squared_error(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch[0]), batch[-1])


def binary(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Cross-entropy of one logit [B, 1] and labels 0 and 1 [B]."""
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1].float())
