"""A training as people write it: data that a fault may change, and the loop over epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fastguard
from fastguard.errors import NonFiniteGradientsError

Tensors = tuple[torch.Tensor, ...]
Loss = Callable[[nn.Module, Tensors], torch.Tensor]
MakeOptimizer = Callable[[nn.Module, float], torch.optim.Optimizer]


class RefusedError(Exception):
    """`fastguard.wrap` would not guard this optimizer: its message."""


class Watch:
    """What stands around the optimizers of a run: nothing but the clipping.

    The harm of a fault is measured with this one, so that what counts as a fault does not hang on the guard.
    """

    def wrap(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float | None = None
    ) -> torch.optim.Optimizer:
        """`optimizer`, which clips at `max_norm` from now on."""
        if max_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]

            def clip(*_: Any) -> None:
                torch.nn.utils.clip_grad_norm_(parameters, max_norm)

            optimizer.register_step_pre_hook(clip)
        return optimizer

    def observe(self, optimizer: torch.optim.Optimizer, **losses: Any) -> None:
        """Takes `loss` or `val_loss` of the step just taken."""


class Guarded(Watch):
    """A guard around each optimizer, as the README shows it.

    Args:
        make_sink: makes the one sink of a guard; it is given the number of the guard in this run.
        settings: further arguments of `fastguard.wrap`.
    """

    def __init__(self, make_sink: Callable[[], Any], settings: dict[str, Any]) -> None:
        self.sinks: list[Any] = []
        self.guards: list[fastguard.Guard] = []
        self.limits: list[float | None] = []
        self._make_sink = make_sink
        self._settings = settings

    def wrap(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float | None = None
    ) -> torch.optim.Optimizer:
        sink = self._make_sink()
        options = dict(self._settings)
        if isinstance(optimizer, torch.optim.LBFGS):
            options["skip_nonfinite"] = False  # it has no step without gradients
        try:
            fastguard.wrap(optimizer, model, max_norm=max_norm, sinks=[sink], **options)
        except (TypeError, ValueError) as error:
            raise RefusedError(str(error)) from error
        self.sinks.append(sink)
        self.guards.append(fastguard.Guard.of(optimizer))
        self.limits.append(max_norm)
        return optimizer

    def observe(self, optimizer: torch.optim.Optimizer, **losses: Any) -> None:
        fastguard.Guard.of(optimizer).observe(**losses)


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Adam over all parameters of the model."""
    return torch.optim.Adam(model.parameters(), lr=lr)


def epochs(plan: Plan, watch: Watch) -> None:
    """The loop over epochs and batches, with a validation after each epoch."""
    model = plan.model
    optimizer = watch.wrap(plan.optimizer(model, plan.lr), model, plan.max_norm)
    scheduler = None
    if plan.schedule is not None:
        num_steps = plan.num_epochs * sum(1 for _ in plan.batches(0))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, plan.schedule(num_steps))
    for epoch in range(plan.num_epochs):
        model.train(plan.train_mode)
        for batch in plan.batches(epoch):
            loss = take_step(plan, optimizer, batch)
            watch.observe(optimizer, loss=loss)
            if scheduler is not None:
                scheduler.step()
        model.eval()
        if not plan.eval_mode:
            model.train()
        watch.observe(optimizer, val_loss=plan.validate())
        model.eval()


def take_step(plan: Plan, optimizer: torch.optim.Optimizer, batch: Tensors) -> torch.Tensor:
    """One step, with a closure where the optimizer asks for the loss again and again; the loss."""

    def closure() -> torch.Tensor:
        if plan.zero_grad:
            optimizer.zero_grad()
        loss = plan.loss(plan.model, batch)
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return torch.as_tensor(optimizer.step(closure)).detach()
    loss = closure()
    optimizer.step()
    return loss


@dataclass
class Plan:
    """All that a run is made of; a fault changes it before the run begins.

    Attributes:
        model: what is trained.
        loss: of the model and a batch, to be minimised.
        train, held_out: tensors of equal length: inputs first.
        quality: of the model and `held_out`, the more the better: how the run is known to be sound or harmed.
        least: the quality that a sound run has to reach.
        lr, optimizer, schedule, max_norm: the schedule is given the number of steps, and gives factors of the rate.
        batch_size, num_epochs, shuffles: the last, incomplete batch of an epoch is trained on.
        zero_grad, train_mode, eval_mode: what people forget.
        val_loss: where validation is not measured as training is; None: the same loss.
        change: what becomes of a batch on its way to the model, by epoch and place: augmentation, or a fault.
        play: the whole loop, where it is another one.
        judged_by_loss: whether a sound run must end near its best validation loss; not where the objective changes.
        seed: of batches, dropout and such.
    """

    model: nn.Module
    loss: Loss
    train: Tensors
    held_out: Tensors
    quality: Callable[[nn.Module, Tensors], float]
    least: float
    lr: float = 1e-2
    optimizer: MakeOptimizer = adam
    schedule: Callable[[int], Callable[[int], float]] | None = None
    max_norm: float | None = None
    batch_size: int = 32
    num_epochs: int = 10
    shuffles: bool = True
    zero_grad: bool = True
    train_mode: bool = True
    eval_mode: bool = True
    val_loss: Loss | None = None
    change: Callable[[int, int, Tensors], Tensors] | None = None
    play: Callable[[Plan, Watch], None] = epochs
    judged_by_loss: bool = True
    seed: int = 0

    def batches(self, epoch: int) -> Iterator[Tensors]:
        """The batches of an epoch."""
        count = len(self.train[0])
        order = torch.arange(count)
        if self.shuffles:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * self.seed + epoch))
        for place, chosen in enumerate(order.split(self.batch_size)):
            batch = tuple(tensor[chosen] for tensor in self.train)
            yield batch if self.change is None else self.change(epoch, place, batch)

    @torch.no_grad()
    def validate(self) -> torch.Tensor:
        """The loss of what is held out."""
        return (self.val_loss or self.loss)(self.model, self.held_out)


@dataclass(frozen=True)
class Outcome:
    """How a run went.

    Attributes:
        quality: at the end, on what was held out; -1 at least, and where it is no number.
        stopped: what the guard raised, if it ended the run.
        refused: why it would not guard the optimizer; nothing was trained then.
    """

    quality: float
    stopped: str | None = None
    refused: str | None = None


def carry_out(plan: Plan, watch: Watch) -> Outcome:
    """Trains to the end, or until the guard gives up."""
    torch.manual_seed(plan.seed + 1)
    stopped = None
    try:
        plan.play(plan, watch)
    except NonFiniteGradientsError as error:
        stopped = str(error)
    except RefusedError as error:
        return Outcome(-1.0, refused=str(error))
    plan.model.eval()
    found = plan.quality(plan.model, plan.held_out)
    return Outcome(max(found, -1.0) if math.isfinite(found) else -1.0, stopped)
