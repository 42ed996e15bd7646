"""Warm-up and cosine, by torch's schedulers. A step that is skipped does not move the schedule on."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import fastguard

TOTAL, WARM_UP = 20, 4


def main() -> list[float]:
    """Trains, and returns the learning rate of each step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, max_norm=1.0)
    rise = LinearLR(optimizer, 0.01, total_iters=WARM_UP)
    scheduler = SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, TOTAL - WARM_UP)], [WARM_UP])
    lrs = []
    for step in range(TOTAL):
        x = torch.randn(16, 8)
        if step == 2:
            x[0, 0] = math.nan  # a bad batch
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        lrs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.guard.last.skipped:  # on a GPU after guard.flush(), which waits
            scheduler.step()
    print(" ".join(f"{lr:.4f}" for lr in lrs))
    return lrs


if __name__ == "__main__":
    main()
