"""A training of twenty steps with one optimizer, guarded or not, and what it leaves."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

import fastguard

from . import state

NUM_STEPS = 20

Clip = Callable[[list[torch.Tensor], float], Any]


@dataclasses.dataclass(frozen=True)
class Way:
    """How an optimizer is made and stepped.

    Args:
        make: gives the optimizer of a model.
        closure: "step" passes one to `step`; "after" does so too, after a backward pass of its own, as sharpness-aware
            minimization wants it; None passes none.
        graph: the gradients keep their graph, for optimizers that look at curvature.
        backward: instead of `loss.backward()`, given the optimizer and the loss.
        named: `wrap` is given the model, too.
        train: call the `train` of the optimizer, if it has one: schedule-free ones ask for it.
        width: of the model.
        model: gives the model of a width.
        num_steps: how long it is trained.
    """

    make: Callable[[torch.nn.Module], Any]
    closure: Literal["step", "after"] | None = None
    graph: bool = False
    backward: Callable[[Any, torch.Tensor], None] | None = None
    named: bool = True
    train: bool = True
    width: int = 16
    model: Callable[[int], torch.nn.Module] | None = None
    num_steps: int = NUM_STEPS


@dataclasses.dataclass
class Outcome:
    """What a training left.

    Args:
        losses: of the batches that were seen; one that was skipped is not among them.
        parts: of the optimizer, after the last step.
        parameters: after the last step.
        changed: by the bad step, which should have changed nothing.
        gradients_kept: the bad step left the gradients as they were.
        skipped, clipped: numbers of the steps of which the guard's records say so.
        moved: the parameters have been elsewhere than where they began.
    """

    losses: list[float]
    parts: state.Parts
    parameters: list[torch.Tensor]
    changed: list[str]
    gradients_kept: bool
    skipped: list[int]
    clipped: list[int]
    moved: bool

    @property
    def is_finite(self) -> bool:
        return all(torch.isfinite(p).all() for p in self.parameters) and bool(np.isfinite(self.losses).all())


class RefusedError(Exception):
    """`fastguard.wrap` would not have the optimizer."""


def mlp(width: int) -> torch.nn.Module:
    """Six parameters, of one and two dimensions."""
    return torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.Tanh(), torch.nn.Linear(width, width)
    )


def _seed(number: int) -> None:
    """Whatever draws numbers in a step draws those of its batch, whichever steps were taken before it."""
    torch.default_generator.manual_seed(number)  # torch.manual_seed has a stack formatted for each kind of GPU
    random.seed(number)
    np.random.seed(number)


def _poison(optimizer: Any) -> None:
    """A NaN in one gradient, neither the first nor the last."""
    graded = [p for p in state.parameters_of(optimizer) if p.grad is not None]
    gradient = graded[-2 if len(graded) > 1 else 0].grad.detach()
    if gradient.is_sparse:
        gradient._values()[0] = float("nan")
    else:
        gradient[(0,) * gradient.dim()] = float("nan")


def train(
    way: Way,
    *,
    settings: Mapping[str, Any] | None = None,
    bad: int | None = None,
    left_out: int | None = None,
    clip: Clip | None = None,
    max_norm: float = 1.0,
) -> Outcome:
    """Trains on batches 0 to `way.num_steps` - 1.

    Args:
        settings: of `fastguard.wrap`; None: not guarded.
        bad: the batch that puts a NaN into a gradient.
        left_out: a batch that is never seen.
        clip, max_norm: a function to clip by, of parameters and a norm, after each backward pass.

    Raises:
        RefusedError: by `wrap`.
        Exception: whatever the optimizer, or the guard in it, raises.
    """
    _seed(12345)
    model = (way.model or mlp)(way.width)
    optimizer = way.make(model)
    if way.train and callable(getattr(optimizer, "train", None)):
        optimizer.train()
    guard = None
    if settings is not None:
        try:
            fastguard.wrap(optimizer, model if way.named else None, **settings)
        except Exception as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        guard = fastguard.Guard.of(optimizer)
    start = [p.detach().clone() for p in model.parameters()]
    losses: list[float] = []
    skipped, clipped, changed, gradients_kept, moved = [], [], [], True, False

    for number in range(way.num_steps):
        if number == left_out:
            continue
        _seed(number)
        inputs, targets = torch.randn(2, 8, way.width)

        def evaluate(*, clips: bool = True) -> torch.Tensor:
            optimizer.zero_grad()
            model.zero_grad()  # also where an optimizer inside has parameters that the outer one does not clear
            loss = torch.nn.functional.mse_loss(model(inputs), targets)  # noqa: B023 - called within this turn only
            if way.backward is not None:
                way.backward(optimizer, loss)
            else:
                loss.backward(create_graph=way.graph)
            if clip is not None and clips:
                clip(state.parameters_of(optimizer), max_norm)
            if number == bad:  # noqa: B023
                _poison(optimizer)
            return loss

        # With a closure, it is the gradients of its making that are clipped.
        loss = None if way.closure == "step" else evaluate(clips=way.closure is None)
        before = state.parts(optimizer, model) if number == bad else {}
        given = [p.grad for p in state.parameters_of(optimizer)]
        copies = [None if g is None else g.detach().clone() for g in given] if number == bad else []
        if way.closure is None:
            optimizer.step()
        else:
            value = optimizer.step(torch.enable_grad()(evaluate))
            loss = value if loss is None else loss
            assert loss is not None, "step does not return what the closure returns"
        if number == bad:
            changed = state.differences(before, state.parts(optimizer, model))
            now = [p.grad for p in state.parameters_of(optimizer)]
            gradients_kept = way.closure is not None or all(
                a is b and (a is None or torch.equal(_bits(a), _bits(c))) for a, b, c in zip(given, now, copies)
            )
        else:
            losses.append(float(torch.as_tensor(loss).detach()))
        moved = moved or any(not torch.equal(a, b) for a, b in zip(start, model.parameters()))
        record = None if guard is None else guard.last
        if record is not None and record.skipped:
            skipped.append(number)
        if record is not None and record.clipped:
            clipped.append(number)
    parameters = [p.detach() for p in model.parameters()]
    return Outcome(
        losses=losses,
        parts=state.parts(optimizer, model),
        parameters=parameters,
        changed=changed,
        gradients_kept=gradients_kept,
        skipped=skipped,
        clipped=clipped,
        moved=moved,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.contiguous().reshape(-1).view(torch.uint8)
