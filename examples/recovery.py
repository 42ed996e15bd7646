"""Recovery: weights are ruined halfway, and the guard brings the run through by itself.

With `recovery=`, snapshots are kept in memory; when the loss stays far above what is usual, or is NaN, the newest good
one is put back, and training goes on with the batches that come next.
"""

from __future__ import annotations

import torch
from torch import nn

import fastguard


def train(recovery: fastguard.Recovery | None) -> tuple[float, list[str]]:
    """Trains a run that goes wrong at step 100; the mean of its last losses, and what was done."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fastguard.wrap(optimizer, model, max_norm=1.0, recovery=recovery)
    losses = []
    for step in range(160):
        if step == 100:
            with torch.no_grad():
                model[2].weight.mul_(1e4)  # a fault of the memory, a bad merge, a bug
        x = torch.randn(32, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.guard.observe(loss=loss)
        losses.append(loss.item())
    return sum(losses[-10:]) / 10, optimizer.guard.recoveries


def main() -> tuple[float, float]:
    """Trains without and with recovery, and returns how each of them ends."""
    without, _ = train(None)
    brought_through, done = train(fastguard.Recovery(every=20, keep=3))
    print(f"loss at the end {without:.3g} without recovery, {brought_through:.3g} with it")
    print("\n".join(done))
    return without, brought_through


if __name__ == "__main__":
    main()
