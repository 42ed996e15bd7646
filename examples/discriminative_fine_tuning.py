"""Fine-tuning: first the new head alone, then all of it, with rates that a range test has found."""

from __future__ import annotations

import torch
from torch import nn

import fastguard


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """One pass over the batches; the last loss."""
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> tuple[float, float]:
    """Trains, and returns the loss after each of the two parts."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())  # as if it were pretrained
    model = nn.Sequential(body, nn.Linear(32, 3))
    inputs = [torch.randn(32, 8) for _ in range(20)]
    batches = [(x, x[:, :3].argmax(1)) for x in inputs]

    body.requires_grad_(False)
    groups = fastguard.param_groups(model, lr=1e-2, weight_decay=0.0)  # what is frozen is left out
    first = train(model, fastguard.wrap(torch.optim.AdamW(groups), model, max_norm=1.0), batches)

    body.requires_grad_(True)
    groups = fastguard.param_groups(model, lr=1e-3, weight_decay=0.0, lr_for={"0.*": 0.1, "1.*": 1.0})
    optimizer = fastguard.wrap(torch.optim.AdamW(groups), model, max_norm=1.0)
    finder = fastguard.LearningRateFinder(min_lr=1e-5, max_lr=1.0, num_steps=30)
    found = finder.find(model, optimizer, batches, nn.functional.cross_entropy)  # the groups keep their ratio
    factor = found.suggested_lr / optimizer.param_groups[0]["lr"]
    for group in optimizer.param_groups:
        group["lr"] *= factor
        print(f"{group['name']:<16} lr {group['lr']:.2e}")
    second = train(model, optimizer, batches)
    print(f"loss {first:.3f} with the head alone, {second:.3f} with all of it")
    return first, second


if __name__ == "__main__":
    main()
