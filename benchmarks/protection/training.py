"""A plain training loop, and what may stand between its gradients and its optimizer."""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fastguard
from benchmarks.lab.training import Setup

from .rivals import FixedNorm, Rule, SkipStep, ZClip


class Protection:
    """Nothing: the optimizer steps.

    Attributes:
        num_skipped, num_rollbacks: of the run so far.
    """

    num_skipped = num_rollbacks = 0

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Takes the step whose gradients are there."""
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def close(self) -> None:
        """The run is over."""


class Ruled(Protection):
    """A rule, as its authors use it: after the backward pass, on the host. It sees no norm that is not finite: such a
    step is taken as it is, but for `SkipStep`, whose comparison with NaN is false, and skips it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def step(self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms = [float(norm) for norm in torch._foreach_norm(gradients)]
        factors = [0.0 if isinstance(self.rule, SkipStep) else 1.0] * len(norms)
        if all(map(math.isfinite, norms)) and math.isfinite(float(loss)):
            factors = self.rule.factors(norms, float(loss))
        if not any(factors):
            self.num_skipped += 1
            return
        if any(factor != 1.0 for factor in factors):
            torch._foreach_mul_(gradients, factors)
        super().step(loss, scaler)


class Guarded(Protection):
    """`fastguard.wrap` with these arguments, each loss observed."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().attach(model, optimizer)
        fastguard.wrap(optimizer, model, **self.options)
        self.guard = fastguard.Guard.of(optimizer)

    def step(self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        super().step(loss, scaler)
        self.guard.observe(loss=loss)

    def close(self) -> None:
        self.guard.flush()
        self.num_skipped = self.guard.history.num_skipped
        if self.options.get("recovery"):
            self.num_rollbacks = sum(one["kind"] == "rollback" for one in self.guard.history.model.recoveries)
        self.guard.close()


def recovery() -> Any:
    """Snapshots and ramps as short as the runs here, which have a thousand steps where others have a hundred thousand;
    all else as it is by default."""
    return fastguard.Recovery(every=20, ramp=40, window=400)


def everything() -> Protection:
    """A clip at 1, spikes to the median, and recovery."""
    return Guarded(clip=fastguard.Spikes(max_norm=1.0), recovery=recovery())


NOTHING, OURS = "nothing", "fastguard"
PROTECTIONS: dict[str, Callable[[], Protection]] = {
    NOTHING: Protection,
    "clip at 1": lambda: Ruled(FixedNorm(1.0)),
    "ZClip": lambda: Ruled(ZClip(max_norm=1.0)),
    "SkipStep": lambda: Ruled(SkipStep(max_norm=1.0)),
    OURS: everything,
}


def digest(model: nn.Module, losses: list[float]) -> str:
    """Of all bits of parameters, buffers and losses."""
    found = hashlib.sha256(struct.pack(f"{len(losses)}d", *losses))
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@torch.no_grad()
def held_out_loss(setup: Setup) -> float:
    """Mean loss of the held-out batch in evaluation mode; Inf where it is not finite."""
    setup.model.eval()
    loss = float(setup.loss_of(setup.model, setup.held_out))
    setup.model.train()
    return loss if math.isfinite(loss) else math.inf


def train(setup: Setup, protection: Protection) -> dict[str, Any]:
    """Trains to the end, or until somebody raises: final loss, what was raised, counts, and a digest of all bits.

    "final" is the held-out loss of the parameters as the run left them.
    """
    started = time.perf_counter()
    torch.manual_seed(setup.seed + 1)
    model = setup.model.train()
    optimizer = setup.make_optimizer(model.parameters(), setup.lr)
    protection.attach(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, setup.schedule) if setup.schedule else None
    scaler = torch.amp.GradScaler("cpu") if setup.scales_loss else None
    losses: list[float] = []
    error = None
    for step in range(setup.num_steps):
        for at, event in setup.events:
            if at == step:
                event(model)  # type: ignore[arg-type]
        with contextlib.nullcontext() if setup.autocast is None else torch.autocast("cpu", setup.autocast):
            loss = setup.loss_of(model, setup.batch_at(step)).float()
        losses.append(loss.item())
        (loss if scaler is None else scaler.scale(loss)).backward()
        try:
            protection.step(loss.detach(), scaler)
        except fastguard.FastguardError as raised:
            error = type(raised).__name__
            break
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    protection.close()
    return {
        "final": held_out_loss(setup),
        "losses": losses,
        "error": error,
        "num_skipped": protection.num_skipped,
        "num_rollbacks": protection.num_rollbacks,
        "digest": digest(model, losses),
        "seconds": time.perf_counter() - started,
    }
