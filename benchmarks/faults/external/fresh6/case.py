"""A case of this group: made as those of `fresh4` are, and renamed at the end of each file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case, Truth
from ..fresh3.case import either
from ..fresh4 import case as f
from ..loop import Plan, Watch

GROUP = "fresh6"

FIXED = either(c.CUT, a.FROZEN, c.LEFT_OUT)  # parameters that stay as they were
SQUASHED = either(c.OUTPUT, c.LOSS, c.TARGETS)  # outputs that cannot get where the targets are
DEEP = either(a.VANISHING, a.POOR, c.DEAD)
NAN_INSIDE = either(c.SINGULAR, c.EXPLODING)
SPOILT_ROWS = either(c.BATCH, c.SINGULAR)  # NaN that came with the data
NOT_STEPPED = Truth(c.SCHEDULE.families, ("scheduler-not-stepped", *c.SCHEDULE.causes))
CUT_SHORT = either(a.SHORT, c.LOW)
FAST_OR_SMALL = either(a.SMALL_BATCH, c.HIGH)
FOREIGN = either(c.SETTINGS, c.LOW)  # settings that make steps small
FOREIGN_HIGH = either(c.SETTINGS, c.HIGH)
FEW = either(a.OVERFITTED, c.REPEATED)


def renamed(cases: Iterable[Case]) -> list[Case]:
    """The same cases as of this group."""
    return [dataclasses.replace(case, name=case.name.replace(f.GROUP, GROUP, 1), set=GROUP) for case in cases]


def stepped(watch: Watch, optimizer: torch.optim.Optimizer, loss: torch.Tensor, clears: bool = True) -> None:
    """One step of a script."""
    if clears:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.observe(optimizer, loss=loss)


def damaged(damage: Any) -> c.Change:
    """A damage to the data of a plan, as the mutation operators have it."""

    def change(plan: Plan) -> None:
        damage(plan, torch.Generator().manual_seed(11))

    return change


def frozen(*parts: str) -> c.Change:
    """Parameters whose names begin so ask for no gradient."""

    def change(plan: Plan) -> None:
        for name, p in plan.model.named_parameters():
            if name.startswith(parts):
                p.requires_grad_(False)

    return change


def left_out(*parts: str) -> c.Change:
    """The optimizer is not told of parameters whose names begin so."""

    def change(plan: Plan) -> None:
        former = plan.optimizer

        class Rest(nn.Module):
            def parameters(self, recurse: bool = True) -> Any:
                return [p for name, p in plan.model.named_parameters() if not name.startswith(parts)]

        plan.optimizer = lambda model, lr: former(Rest(), lr)

    return change


def nan_rows(share: float = 0.02, value: float = torch.nan) -> c.Change:
    """So many rows of the training data hold a value that is none."""

    def change(plan: Plan) -> None:
        x = plan.train[0].clone()
        rows = torch.rand(len(x), generator=torch.Generator().manual_seed(5)) < share
        flat = x.view(len(x), -1)
        flat[rows, 0] = value
        plan.train = (x, *plan.train[1:])

    return change


def all_zero(model: nn.Module) -> None:
    """Every parameter is nothing at first."""
    for p in model.parameters():
        p.zero_()


def put_back(every: int) -> c.Change:
    """The first weights are loaded again after so many steps, by a checkpoint that is never written anew."""

    def play(plan: Plan, watch: Watch) -> None:
        kept = {name: t.clone() for name, t in plan.model.state_dict().items()}
        optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
        count = 0
        for epoch in range(plan.num_epochs):
            for batch in plan.batches(epoch):
                stepped(watch, optimizer, plan.loss(plan.model, batch))
                count += 1
                if count % every == 0:
                    plan.model.load_state_dict(kept)

    return c.putting(play=play)


def schedule_forgotten(plan: Plan, watch: Watch) -> None:
    """A warm-up whose scheduler nobody steps."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    torch.optim.lr_scheduler.LinearLR(optimizer, 1e-4, total_iters=40)
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            stepped(watch, optimizer, plan.loss(plan.model, batch))


def made_anew(plan: Plan, watch: Watch) -> None:
    """The model is made anew after the optimizer was given its parameters; the new one is what predicts."""
    import copy

    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    plan.model = copy.deepcopy(plan.model)
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            plan.model.zero_grad()
            stepped(watch, optimizer, plan.loss(plan.model, batch))
