"""Gradient accumulation: several backward passes, one step. The guard judges the sum, once."""

from __future__ import annotations

import torch
from torch import nn

import fastguard

EVERY = 4


def main() -> int:
    """Trains, and returns the number of records: one a step, not one a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model, max_norm=1.0)
    total = 0.0
    for i in range(40):
        x = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)) / EVERY  # so that the sum is a mean
        loss.backward()
        total += loss.item()
        if (i + 1) % EVERY:
            continue
        optimizer.step()
        optimizer.zero_grad()
        optimizer.guard.observe(loss=total)
        total = 0.0
    print(optimizer.guard.report())
    return optimizer.guard.history.num_steps + 1  # and the step that `observe` may still add to


if __name__ == "__main__":
    main()
