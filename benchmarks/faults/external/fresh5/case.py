"""A case of this group: made as those of `fresh4` are, under another name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case, Truth
from ..fresh3.case import either
from ..fresh4 import case as f
from ..loop import Plan, Watch

GROUP = "fresh5"
Entering = Callable[..., Callable[[Any], Any]]

BLIND = either(c.CANNOT, c.LABELS, c.LEAK)  # what the targets hang on does not get to the model
MASKLESS = either(c.LEAK, a.DIFFERS, a.OVERFITTED)
BROKEN = either(c.SINGULAR, c.EXPLODING)  # infinities that an expression makes
LINEAR = either(c.CANNOT, c.OUTPUT)
SILENT = either(c.LEAK, c.LABELS, a.NO_GRADIENT)
NOT_STEPPED = Truth(c.SCHEDULE.families, ("scheduler-not-stepped", *c.SCHEDULE.causes))
FEW = either(a.OVERFITTED, c.REPEATED)


def _under_this_name(entering: Entering, held: list[Case], cases: list[Case]) -> Entering:
    """What `entering` put into `held` goes on to `cases` as of this group."""

    def task(*what: Any, **words: Any) -> Callable[[Any], Any]:
        enter = entering(*what, **words)

        def enter_here(make: Any) -> Any:
            made = enter(make)
            for case in held:
                name = case.name.replace(f.GROUP, GROUP, 1)
                cases.append(dataclasses.replace(case, name=name, set=GROUP))
            held.clear()
            return made

        return enter_here

    return task


def planning(cases: list[Case], home: str) -> Entering:
    """What enters plans into `cases`, as `fresh4.case.planning` does."""
    held: list[Case] = []
    return _under_this_name(f.planning(held, home), held, cases)


def scripting(cases: list[Case], home: str) -> Entering:
    """What enters scripts into `cases`, as `fresh4.case.scripting` does."""
    held: list[Case] = []
    return _under_this_name(f.scripting(held, home), held, cases)


def summing(count: int, divide: bool = True) -> c.Change:
    """Gradients of so many batches are added up for a step."""

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

    return c.putting(play=step)


def warm_up_never_stepped(plan: Plan, watch: Watch) -> None:
    """A warm-up from a ten-thousandth of the rate, whose scheduler is never stepped."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, 1e-4 + t / 50.0))
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            loss = plan.loss(plan.model, batch)
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)


def in_bfloat16(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`loss` of a model that runs under autocast."""

    def autocast(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    return autocast
