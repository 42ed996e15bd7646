"""Set F: TrainCheck's silent errors (Jiang et al., OSDI 2025) that one process on a CPU can have.

Left out: those of several processes (clipping on one replica, replicas that bypass or lose their reduction), and those
that are not about training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import optimizers as o
from ..bases import Recipe, maker
from ..case import Case, Truth
from ..harm import worse
from ..loop import MakeOptimizer, Plan, Tensors

BASES = {
    "pixels": Recipe("digits", hidden=(48, 48), lr=2e-3, num_epochs=8, least=0.92),
    "norm": Recipe("digits", hidden=(48, 48), batch_norm=True, lr=2e-3, num_epochs=6, least=0.92),
    "images": Recipe("digit-images", "cnn", hidden=(8,), lr=3e-3, num_epochs=5, least=0.92),
    "friedman": Recipe("friedman", hidden=(48, 48), loss="mse", lr=5e-3, num_epochs=12, least=0.75),
    "copy": Recipe("copy-short", "gru", hidden=(48,), lr=1e-2, max_norm=1.0, num_epochs=8, least=0.9),
}
_NO_ZERO_GRAD = Truth(("setup", "explosion", "loss", "lr", "weights"), ("missing-zero-grad",))
_FROZEN = Truth(("weights", "setup", "loss"), ("frozen-parameters",))
_STALE = Truth(("setup", "weights", "vanishing", "loss"), ("no-gradient-arrives", "parameters-missing-from-optimizer"))
_NOTHING_ARRIVES = Truth(("setup", "weights", "vanishing", "loss"), ("no-gradient-arrives",))
_OVERWRITTEN = Truth(("setup", "weights", "loss"), ("weights-overwritten",))
_SCHEDULE = Truth(("lr", "loss", "setup"), ("wrong-schedule",))
# Where the schedule is no more than a rate that is wrong all along, that is right, too.
_ENDLESS = Truth(("lr", "loss", "setup", "weights"), ("wrong-schedule", "learning-rate-too-low"))
_GROWING = Truth((*_ENDLESS.families, "explosion", "nonfinite", "units"), ("wrong-schedule", "learning-rate-too-high"))
_UNINITIALISED = Truth(
    ("weights", "explosion", "nonfinite", "units", "loss"), ("poor-initialisation", "corrupted-weights")
)

Change = Callable[[Plan], None]


def _case(base: str, fault: str, variant: str, truth: Truth, change: Change, **words: object) -> Case:
    make = maker(BASES[base].but(**words))

    def changed(seed: int) -> Plan:
        plan = make(seed)
        change(plan)
        return plan

    return Case(
        f"F/{base}/{fault}/{variant}",
        "F",
        f"{base}/{fault}",
        f"{fault}: {variant}",
        changed,
        __name__,
        truth,
        maker(BASES[base]),
        worse(),
        place=[*BASES].index(base),
    )


def _no_zero_grad(plan: Plan) -> None:
    plan.zero_grad = False


def _only_norms_train(plan: Plan) -> None:
    for module in plan.model.modules():
        if not isinstance(module, nn.BatchNorm1d):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)


def _frozen(*names: str) -> Change:
    def change(plan: Plan) -> None:
        for name in names:
            plan.model.get_submodule(name).requires_grad_(False)

    return change


def _with_optimizer(after: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Change:
    """Something happens to the model or the optimizer once that is made."""

    def change(plan: Plan) -> None:
        make: MakeOptimizer = plan.optimizer

        def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
            made = make(model, lr)
            after(model, made)
            return made

        plan.optimizer = optimizer

    return change


def _of_a_copy(plan: Plan) -> None:
    """The optimizer was made of another copy of the model."""
    make: MakeOptimizer = plan.optimizer
    plan.optimizer = lambda model, lr: make(copy.deepcopy(model), lr)


def _replaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All but the last layer's parameters are made anew after the optimizer was made of the old ones."""
    for module in [*model.children()][:-1]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))


def _cleared_before_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad())


def _zeroed_before_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad(set_to_none=False))


def _each_batch(act: Callable[[Plan, int, int], Any]) -> Change:
    def change(plan: Plan) -> None:
        def act_and_pass(epoch: int, place: int, batch: Tensors) -> Tensors:
            act(plan, epoch, place)
            return batch

        plan.change = act_and_pass

    return change


def _assigned(plan: Plan, epoch: int, place: int) -> None:
    """A checkpoint is loaded by assignment in the first epoch: the optimizer goes on with the old tensors."""
    if (epoch, place) == (0, 3):
        state = {name: tensor.detach().clone() for name, tensor in plan.model.state_dict().items()}
        plan.model.load_state_dict(state, assign=True)


def _put_back(every: int) -> Change:
    """A stale copy of the weights is written back every so many batches, as by a compiled step that keeps its own."""

    def change(plan: Plan) -> None:
        start = copy.deepcopy(plan.model.state_dict())
        count = 0

        def act(epoch: int, place: int, batch: Tensors) -> Tensors:
            nonlocal count
            count += 1
            if count % every == 0:
                plan.model.load_state_dict(start)
            return batch

        plan.change = act

    return change


def _one_layer_put_back(name: str) -> Change:
    """One layer is overwritten before each batch with what it began with."""

    def change(plan: Plan) -> None:
        layer = plan.model.get_submodule(name)
        start = copy.deepcopy(layer.state_dict())

        def act(epoch: int, place: int, batch: Tensors) -> Tensors:
            layer.load_state_dict(start)
            return batch

        plan.change = act

    return change


def _schedule(make: Callable[[int], Callable[[int], float]]) -> Change:
    def change(plan: Plan) -> None:
        plan.schedule = make

    return change


def _garbage(name: str, size: float) -> Change:
    """A layer's memory was never written: here numbers of that size in some of its places."""

    def change(plan: Plan) -> None:
        weight = plan.model.get_submodule(name).weight
        dice = torch.Generator().manual_seed(15)
        with torch.no_grad():
            hit = torch.rand(weight.shape, generator=dice) < 0.1
            weight[hit] = size * torch.randn(int(hit.sum()), generator=dice)

    return change


CASES: tuple[Case, ...] = (
    _case("pixels", "no-zero-grad", "adam", _NO_ZERO_GRAD, _no_zero_grad),
    _case("images", "no-zero-grad", "adam", _NO_ZERO_GRAD, _no_zero_grad),
    _case("friedman", "no-zero-grad", "sgd", _NO_ZERO_GRAD, _no_zero_grad, optimizer="momentum", lr=0.02),
    _case("copy", "no-zero-grad", "adam", _NO_ZERO_GRAD, _no_zero_grad),
    _case("norm", "no-zero-grad", "sgd", _NO_ZERO_GRAD, _no_zero_grad, optimizer="momentum", lr=0.05),
    _case("norm", "only-norms-train", "adam", _FROZEN, _only_norms_train),
    _case("norm", "only-norms-train", "momentum", _FROZEN, _only_norms_train, optimizer="momentum", lr=0.02),
    _case("copy", "frozen", "recurrent", _FROZEN, _frozen("recurrent", "tokens")),
    _case("images", "frozen", "all-but-the-first", _FROZEN, _frozen("2", "5")),
    _case("pixels", "stale", "copy", _STALE, _of_a_copy),
    _case("friedman", "stale", "copy", _STALE, _of_a_copy),
    _case("copy", "stale", "copy", _STALE, _of_a_copy),
    _case("pixels", "replaced", "all-but-the-head", _STALE, _with_optimizer(_replaced)),
    _case("images", "replaced", "all-but-the-head", _STALE, _with_optimizer(_replaced)),
    _case("friedman", "replaced", "all-but-the-head", _STALE, _with_optimizer(_replaced)),
    _case("pixels", "assigned", "after-three-steps", _NOTHING_ARRIVES, _each_batch(_assigned)),
    _case("friedman", "assigned", "after-three-steps", _NOTHING_ARRIVES, _each_batch(_assigned)),
    _case("copy", "assigned", "after-three-steps", _NOTHING_ARRIVES, _each_batch(_assigned)),
    _case("pixels", "cleared", "to-none", _NOTHING_ARRIVES, _with_optimizer(_cleared_before_the_step)),
    _case("images", "cleared", "to-zeros", _NOTHING_ARRIVES, _with_optimizer(_zeroed_before_the_step)),
    _case("copy", "cleared", "to-none", _NOTHING_ARRIVES, _with_optimizer(_cleared_before_the_step)),
    _case("pixels", "frozen-step", "each-batch", _OVERWRITTEN, _put_back(1)),
    _case("friedman", "frozen-step", "each-batch", _OVERWRITTEN, _put_back(1)),
    _case("images", "frozen-step", "each-fifth-batch", _OVERWRITTEN, _put_back(5)),
    _case("copy", "frozen-step", "recurrent", _OVERWRITTEN, _one_layer_put_back("recurrent")),
    _case("pixels", "schedule", "decay-a-batch", _SCHEDULE, _schedule(lambda n: lambda step: 0.7**step)),
    _case("images", "schedule", "decay-a-batch", _SCHEDULE, _schedule(lambda n: lambda step: 0.8**step)),
    _case("copy", "schedule", "too-short-cosine", _SCHEDULE, _schedule(lambda n: o.linear_decay(n // 12))),
    _case("friedman", "schedule", "endless-warm-up", _ENDLESS, _schedule(lambda n: lambda step: step / (2000 * n))),
    _case("friedman", "schedule", "growing", _GROWING, _schedule(lambda n: lambda step: 1.05**step)),
    _case("pixels", "uninitialised", "100", _UNINITIALISED, _garbage("2", 1e3)),
    _case("friedman", "uninitialised", "1e4", _UNINITIALISED, _garbage("0", 1e4)),
    _case("images", "uninitialised", "1e20", _UNINITIALISED, _garbage("2", 1e20)),
)
