"""Mixed precision: autocast and a GradScaler, both as ever. Norms and clipping are of the unscaled gradients."""

from __future__ import annotations

import torch
from torch import nn

import fastguard


def main() -> list[bool]:
    """Trains, and returns which steps were skipped: those at which the scale was too high for float16."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model, max_norm=1.0)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**18)
    skipped = []
    for _ in range(12):
        x = torch.randn(16, 8, device=device)
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # no scaler.unscale_, no clip_grad_norm_: the guard does both
        scaler.update()
        optimizer.zero_grad()
        optimizer.guard.observe(loss=loss)
        optimizer.guard.flush()  # on a GPU this waits: it is here to have the newest record at once
        last = optimizer.guard.last
        print(f"step {last.step}: norm {last.norm:.3f}, scale {last.loss_scale:g}, skipped {last.skipped}")
        skipped.append(last.skipped)
    return skipped


if __name__ == "__main__":
    main()
