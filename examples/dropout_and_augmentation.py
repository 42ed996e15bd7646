"""Dropout and noise on the inputs that grow while the validation loss stays behind, beside the guard."""

from __future__ import annotations

import torch
from torch import nn

import fastguard


def main() -> tuple[float, float]:
    """Trains, and returns the last dropout and the last noise."""
    torch.manual_seed(0)
    dropout = nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), dropout, nn.Linear(64, 1))
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, max_norm=1.0)
    x, held_out = torch.randn(12, 8), torch.randn(64, 8)  # few samples: it will overfit
    y, wanted = (data[:, :1].sin() + 0.3 * torch.randn(len(data), 1) for data in (x, held_out))
    noise = 0.0
    for epoch in range(20):
        model.train()
        for _ in range(5):
            loss = nn.functional.mse_loss(model(x + noise * torch.randn_like(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.guard.observe(loss=loss)
        model.eval()
        with torch.no_grad():
            val_loss = nn.functional.mse_loss(model(held_out), wanted)
        optimizer.guard.observe(val_loss=val_loss)
        overfits = val_loss > 1.5 * loss
        dropout.p = min(0.5, dropout.p + 0.05) if overfits else max(0.0, dropout.p - 0.05)
        noise = min(0.5, noise + 0.05) if overfits else max(0.0, noise - 0.05)
        print(f"epoch {epoch}: loss {loss:.3f}, validation {val_loss:.3f}, dropout {dropout.p:.2f}, noise {noise:.2f}")
    return dropout.p, noise


if __name__ == "__main__":
    main()
