"""Lookahead beside the guard: every few steps the weights go halfway back to slow ones (Zhang et al. 2019).

The guard is on the inner optimizer, which takes the steps; the slow weights move between steps. That something else
writes to the weights is a fact in the history (`history.model.overwritten`), and no alarm.
"""

from __future__ import annotations

import torch
from torch import nn

import fastguard

EVERY, ALPHA = 5, 0.5


def main() -> float:
    """Trains, and returns the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, max_norm=1.0)
    fast = list(model.parameters())
    slow = [p.detach().clone() for p in fast]
    num_taken = 0
    for _ in range(60):
        x = torch.randn(32, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.guard.observe(loss=loss)
        num_taken += not optimizer.guard.last.skipped
        if num_taken % EVERY == 0:
            with torch.no_grad():
                torch._foreach_lerp_(slow, fast, ALPHA)
                torch._foreach_copy_(fast, slow)
    print(f"loss {loss.item():.4f}, {num_taken} steps taken")
    return loss.item()


if __name__ == "__main__":
    main()
