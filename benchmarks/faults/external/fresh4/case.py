"""A case of this group: a task that is trained soundly in one way or more, and the faults that are planted in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case, Make, Truth
from ..fresh3.case import Script, either, of_script
from ..harm import worse
from ..loop import Plan, Tensors
from ..wild.case import WildCase

GROUP = "fresh4"
Fault = tuple[str, c.Change, Truth]

INPUTS = either(c.INPUTS, c.HIGH, c.SATURATED)
OVER = either(a.OVERFITTED, c.REPEATED)
UNEVEN = either(a.UNEVEN, c.LABELS)
HIGH = either(c.HIGH, c.EXPLODING)
DEEP = either(a.VANISHING, a.POOR)
LINEAR = either(c.CANNOT, c.OUTPUT)
TOO_LITTLE = either(c.LOW, a.SHORT)


def _enter(cases: list[Case], home: str, name: str, title: str, ways: Mapping[str, Make], faults: Mapping) -> None:
    """The first way is the one that faults are held against, and has the task's name."""
    kind = name.strip("_").replace("_", "-")
    for number, (way, make) in enumerate(ways.items()):
        called = f"{GROUP}/{kind}/{way.replace('_', '-')}" if number else f"{GROUP}/{kind}"
        cases.append(WildCase(called, GROUP, kind, title, make, home))
    twin = next(iter(ways.values()))
    for fault, (make, truth) in faults.items():
        fault = fault.replace("_", "-")
        what = f"{kind}/{fault}"
        cases.append(WildCase(f"{GROUP}/{what}", GROUP, what, f"{kind}, {fault}", make, home, truth, twin, worse(2)))


def planning(cases: list[Case], home: str) -> Callable[..., Callable[[Make], Make]]:
    """What enters plans into `cases`: the quality that sound ways have to reach, faults, and what other ways change."""

    def task(least: float, *faults: Fault, **ways: c.Change) -> Callable[[Make], Make]:
        def enter(make: Make) -> Make:
            sound = {"": _with(make, least), **{way: _with(make, least, change) for way, change in ways.items()}}
            broken = {fault: (_with(make, least, change), truth) for fault, change, truth in faults}
            _enter(cases, home, make.__name__, make.__doc__ or "", sound, broken)
            return make

        return enter

    return task


def scripting(cases: list[Case], home: str) -> Callable[..., Callable[[Script], Script]]:
    """The same of scripts: they are given what guards optimizers, and the name of the fault or of the way, or "".

    A name without a truth is a sound way.
    """

    def task(least: float, **words: Truth | None) -> Callable[[Script], Script]:
        def enter(script: Script) -> Script:
            made = {word: of_script(script, least, word.replace("_", "-")) for word in words}
            ways = {word: made[word] for word, truth in words.items() if truth is None}
            broken = {word: (made[word], truth) for word, truth in words.items() if truth is not None}
            _enter(
                cases, home, script.__name__, script.__doc__ or "", {"": of_script(script, least, ""), **ways}, broken
            )
            return script

        return enter

    return task


def _with(make: Make, least: float, change: c.Change | None = None) -> Make:
    def make_changed(seed: int) -> Plan:
        plan = make(seed)
        plan.least = least
        torch.manual_seed(seed)
        if change is not None:
            change(plan)
        return plan

    return make_changed


def all_of(*changes: c.Change) -> c.Change:
    """Several changes, one after another."""

    def change(plan: Plan) -> None:
        for one in changes:
            one(plan)

    return change


def scaled_weights(factor: float) -> c.Change:
    """Matrices so many times as large at first."""

    def scale(model: nn.Module) -> None:
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(factor)

    return a.weights(scale)


def biases(value: float) -> c.Change:
    """Biases of all linear layers and convolutions but the last, at first."""

    def fill(model: nn.Module) -> None:
        layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv1d)]
        for layer in layers[:-1]:
            layer.bias.fill_(value)

    return a.weights(fill)


def ending_in(*modules: nn.Module) -> c.Change:
    """Something more at the model's end."""

    def change(plan: Plan) -> None:
        plan.model = nn.Sequential(plan.model, *modules)

    return change


def random_labels(share: float, classes: int) -> c.Change:
    """So many labels are drawn by chance."""
    return targets_as(lambda y: torch.where(torch.rand(len(y)) < share, torch.randint(0, classes, y.shape), y))


def first_rows(count: int) -> c.Change:
    """So few samples are trained on."""

    def change(plan: Plan) -> None:
        plan.train = tuple(t[:count] for t in plan.train)

    return change


def targets_as(change_targets: Callable[[torch.Tensor], torch.Tensor]) -> c.Change:
    """Other targets in training."""

    def change(plan: Plan) -> None:
        plan.train = (*plan.train[:-1], change_targets(plan.train[-1]))

    return change


def inputs_later(change_inputs: Callable[[torch.Tensor], torch.Tensor]) -> c.Change:
    """Inputs that are prepared otherwise where it counts."""

    def change(plan: Plan) -> None:
        plan.held_out = (change_inputs(plan.held_out[0]), *plan.held_out[1:])

    return change


def binary(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Cross-entropy of one logit [B, 1] and labels 0 and 1 [B]."""
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1].float())
