"""Learning rates by depth: each layer has 0.8 of the rate of the next one; embeddings have a tenth of theirs."""

from __future__ import annotations

import torch
from torch import nn

import fastguard


def main() -> list[float]:
    """Trains, and returns the rates of the groups."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(64, 32),
        *(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(3)),
        nn.Linear(32, 64),
    )
    fastguard.tools.stable_weight_init(model)
    groups = fastguard.param_groups(model, lr=2e-3, weight_decay=0.01, layer_decay=0.8, lr_for={"0.*": 0.1})
    for group in groups:
        print(
            f"{group['name']:<24}{len(group['params']):>3} tensors  lr {group['lr']:.2e}  decay {group['weight_decay']}"
        )
    optimizer = fastguard.wrap(torch.optim.AdamW(groups), model, max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)  # of torch: it scales each group's own rate
    for _ in range(10):
        x = torch.randint(64, (8, 12))
        loss = nn.functional.cross_entropy(model(x).transpose(1, 2), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        optimizer.guard.observe(loss=loss)
    print(f"loss {loss.item():.3f}")
    return [group["initial_lr"] for group in optimizer.param_groups]


if __name__ == "__main__":
    main()
