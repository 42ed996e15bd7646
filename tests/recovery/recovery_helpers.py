"""A small run that something happens to: what the tests of recovery are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import fastguard

W = torch.randn(6, 3, generator=torch.Generator().manual_seed(5))


def make(*, norm: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    model = nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))
    return model if dtype == torch.float32 else model.to(dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    return x, x @ W


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)) - y.to(dtype)).square().mean()


def train(
    model: nn.Module,
    optimizer: Any,
    steps: Iterable[int],
    *,
    fault: Callable[[int], Any] | None = None,
    closure: bool = False,
    scheduler: Any = None,
    guard: Any = None,
) -> list[float]:
    """Trains, and returns the losses; `fault` is called ahead of each step, and may give the loss a factor."""
    losses = []
    guard = getattr(optimizer, "guard", None) if guard is None else guard
    for step in steps:
        factor = None if fault is None else fault(step)

        def evaluate(step: int = step, factor: Any = factor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step) * (1.0 if factor is None else factor)
            loss.backward()
            return loss.detach()

        if closure:
            loss = optimizer.step(evaluate)
        else:
            loss = evaluate()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if guard is not None:
            guard.observe(loss=loss)
        losses.append(float(loss))
    return losses


def ruin(model: nn.Module, scale: float = 5.0) -> None:
    """Overwrites the parameters, as a fault of memory or of somebody's code does."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * scale)


QUICK = fastguard.Recovery(every=10, keep=3, patience=3, quarantine=4, ramp=10)


def wrapped(model: nn.Module, recovery: Any = QUICK, *, make_optimizer: Any = None, **settings: Any) -> Any:
    kind = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01))
    return fastguard.wrap(kind(model.parameters()), model, recovery=recovery, check_every=0, **settings)
