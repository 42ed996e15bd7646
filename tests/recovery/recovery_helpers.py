"""A small run that something happens to: what the tests of recovery are made of."""

import torch
from torch import nn

import fastguard

W = torch.randn(6, 3, generator=torch.Generator().manual_seed(5))


def make(*, norm=True, dtype=torch.float32):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(8)] if norm else []
    model = nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))
    return model if dtype == torch.float32 else model.to(dtype)


def batch(step):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    return x, x @ W


def loss_of(model, step):
    x, y = batch(step)
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)) - y.to(dtype)).square().mean()


def train(model, optimizer, steps, *, fault=None, closure=False, scheduler=None, guard=None):
    """Trains, and returns the losses; `fault` is called ahead of each step, and may give the loss a factor."""
    losses = []
    guard = getattr(optimizer, "guard", None) if guard is None else guard
    for step in steps:
        factor = None if fault is None else fault(step)

        def evaluate(step=step, factor=factor):
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


def ruin(model, scale=5.0):
    """Overwrites the parameters, as a fault of memory or of somebody's code does."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * scale)


QUICK = fastguard.Recovery(every=10, keep=3, patience=3, quarantine=4, ramp=10)


def wrapped(model, recovery=QUICK, *, make_optimizer=None, **settings):
    kind = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01))
    return fastguard.wrap(kind(model.parameters()), model, recovery=recovery, check_every=0, **settings)
