"""A small training run as data that a fault may change, and the loop that runs it under guard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

import fastguard
from fastguard import NonFiniteGradientsError

Batch = tuple[torch.Tensor, torch.Tensor]
# What the guard watches beside the gradients. Without a time budget, which would make the sampled steps, and so what is
# found, depend on the machine's load.
WATCHING: dict[str, Any] = {"activations": {"every": 10, "overhead_budget": None}, "weights": 10}
Loss = Callable[[nn.Module, Batch], torch.Tensor]
MakeOptimizer = Callable[[Any, float], torch.optim.Optimizer]


@dataclass
class Setup:
    """All that a run is made of. A fault changes it before the run begins, or leaves an event for a later step.

    Attributes:
        seed: of weights, batches and places of faults.
        build: makes the model; keyword arguments change its shape, where the task has such.
        model: what is trained.
        loss_of: mean loss of a batch.
        batch_at: the batch of a number, counted from 0 over the whole run; the same one at each call.
        held_out: what the validation loss is taken on.
        num_batches: batches an epoch.
        lr: learning rate.
        make_optimizer: of parameters and learning rate.
        schedule: factor of the learning rate at a step; None for a constant one.
        steps_schedule: whether the training loop remembers to step the scheduler.
        max_norm: where the guard clips; None for not at all.
        num_steps, val_every: length of the run, and steps from one validation to the next.
        num_micro: batches whose gradients are accumulated for one step.
        divides_loss: whether the loss of a micro-batch is divided by their number.
        clears_gradients: when the training loop calls `zero_grad`.
        calls_eval: whether it puts the model in evaluation mode before validation.
        autocast: dtype of the forward pass; None for float32.
        scales_loss: whether a GradScaler is used.
        events: what happens before the forward pass of a step.
        after_start: what happens once, when the optimizer has been made and before it is guarded.
    """

    seed: int
    build: Callable[..., nn.Module]
    model: nn.Module
    loss_of: Loss
    batch_at: Callable[[int], Batch]
    held_out: Batch
    num_batches: int
    lr: float
    make_optimizer: MakeOptimizer
    schedule: Callable[[int], float] | None = None
    steps_schedule: bool = True
    max_norm: float | None = 1.0
    num_steps: int = 250
    val_every: int = 20
    num_micro: int = 1
    divides_loss: bool = True
    clears_gradients: Literal["after the step", "before the step", "never"] = "after the step"
    calls_eval: bool = True
    autocast: torch.dtype | None = None
    scales_loss: bool = False
    events: list[tuple[int, Callable[[Training], None]]] = field(default_factory=list)
    after_start: list[Callable[[Training], None]] = field(default_factory=list)

    def at(self, step: int, event: Callable[[Training], None]) -> None:
        """Lets `event` happen before the forward pass of `step`."""
        self.events.append((step, event))

    def change_batches(self, change: Callable[[int, Batch], Batch]) -> None:
        """Puts `change`, which takes the batch's number and the batch, between the data and the model."""
        before = self.batch_at
        self.batch_at = lambda number: change(number, before(number))


@dataclass(frozen=True)
class Outcome:
    """How a run went.

    Attributes:
        losses: training loss of each step.
        val_losses: (step, validation loss).
        skipped_steps: steps that the guard or the scaler skipped.
        stopped: what the guard raised, if it ended the run.
        unchanged: names of the parameters that are bit for bit what they were before the first step.
        num_ruined: parameter elements that are NaN or Inf at the end.
    """

    losses: list[float]
    val_losses: list[tuple[int, float]]
    skipped_steps: frozenset[int]
    stopped: str | None
    unchanged: tuple[str, ...]
    num_ruined: int

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last twentieth; Inf where it is not finite."""
        tail = self.losses[-max(1, len(self.losses) // 20) :]
        mean = sum(tail) / len(tail)
        return mean if math.isfinite(mean) else math.inf

    @property
    def final_val_loss(self) -> float:
        """The last validation loss; Inf where there is none or it is not finite."""
        last = self.val_losses[-1][1] if self.val_losses else math.inf
        return last if math.isfinite(last) else math.inf


class Training:
    """One run of a `Setup` under guard.

    Args:
        setup: what to run.
        sinks: where the guard's records go.
        watch: further keyword arguments for `fastguard.wrap`.
    """

    def __init__(self, setup: Setup, sinks: Iterable[Any] = (), **watch: Any) -> None:
        self.setup = setup
        self.model = setup.model
        self.step = 0
        self.optimizer = setup.make_optimizer(self.model.parameters(), setup.lr)
        for event in setup.after_start:
            event(self)
        fastguard.wrap(self.optimizer, self.model, max_norm=setup.max_norm, sinks=sinks, **watch)
        self.guard = fastguard.Guard.of(self.optimizer)
        self.scheduler = (
            None if setup.schedule is None else torch.optim.lr_scheduler.LambdaLR(self.optimizer, setup.schedule)
        )
        self.scaler = torch.amp.GradScaler("cpu") if setup.scales_loss else None

    def run(self) -> Outcome:
        """Trains to the end, or until the guard gives up."""
        torch.manual_seed(self.setup.seed + 1)  # dropout
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        losses: list[float] = []
        val_losses: list[tuple[int, float]] = []
        skipped: set[int] = set()
        stopped = None
        for step in range(self.setup.num_steps):
            self.step = step
            try:
                loss, val_loss = self._take_step()
            except NonFiniteGradientsError as error:
                stopped = str(error)
                skipped.add(self.step)
                break
            losses.append(loss)
            last = self.guard.last
            if last is not None and last.skipped:
                skipped.add(self.step)
            if val_loss is not None:
                val_losses.append((self.step, val_loss))
        self.guard.flush()
        after = dict(self.model.named_parameters())
        unchanged = tuple(name for name, p in before.items() if torch.equal(p, after[name]))
        num_ruined = sum(int((~p.isfinite()).sum()) for p in after.values())
        return Outcome(losses, val_losses, frozenset(skipped), stopped, unchanged, num_ruined)

    def _take_step(self) -> tuple[float, float | None]:
        setup = self.setup
        for step, event in setup.events:
            if step == self.step:
                event(self)
        self.model.train()
        total = 0.0
        for micro in range(setup.num_micro):
            loss = self.loss(setup.batch_at(self.step * setup.num_micro + micro))
            total += float(loss.detach()) / setup.num_micro
            if setup.divides_loss:
                loss = loss / setup.num_micro
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if setup.clears_gradients == "before the step":
            self.optimizer.zero_grad()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if setup.clears_gradients == "after the step":
            self.optimizer.zero_grad()
        if self.scheduler is not None and setup.steps_schedule:
            self.scheduler.step()
        val_loss = self.validate() if (self.step + 1) % setup.val_every == 0 else None
        self.guard.observe(loss=total, val_loss=val_loss)
        return total, val_loss

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean loss of `batch`, in the run's precision."""
        dtype = self.setup.autocast
        with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
            return self.setup.loss_of(self.model, batch).float()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of the held-out batch."""
        self.model.train(not self.setup.calls_eval)
        return float(self.loss(self.setup.held_out))


def shuffled_batches(data: Batch, size: int, seed: int, *, fixed: bool = False) -> Callable[[int], Batch]:
    """Batches of `data` by number, shuffled anew each epoch, or with `fixed` in one order for all epochs.

    The last, incomplete batch of an epoch is left out.
    """
    count = len(data[0])
    a_epoch = max(1, count // size)
    orders: dict[int, torch.Tensor] = {}

    def batch_at(number: int) -> Batch:
        epoch, place = divmod(number, a_epoch)
        epoch = 0 if fixed else epoch
        if epoch not in orders:
            orders.clear()
            orders[epoch] = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        chosen = orders[epoch][place * size : (place + 1) * size]
        return data[0][chosen], data[1][chosen]

    return batch_at


def warm_up_cosine(num_warm: int, num_steps: int, floor: float = 0.05) -> Callable[[int], float]:
    """A schedule: linear over `num_warm` steps, then a cosine down to `floor`; with a floor of 1, constant."""

    def factor(step: int) -> float:
        progress = min(1.0, max(0, step - num_warm) / max(1, num_steps - num_warm))
        return min(1.0, (step + 1) / max(1, num_warm)) * (
            floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        )

    return factor
