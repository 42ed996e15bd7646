"""A run that is interrupted goes on from its newest checkpoint, to the same weights, bit for bit.

python examples/checkpoints_and_resume.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastguard

TOTAL = 40


def run(folder: Path, end: int = TOTAL) -> nn.Module:
    """Trains to step `end`, from the newest checkpoint in the folder if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=3e-3), model, max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL)
    stop = fastguard.EarlyStopping(patience=3)
    order = torch.Generator().manual_seed(1)  # of the batches
    x = torch.randn(80, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    state = {"scheduler": scheduler, "stop": stop, "order": order}
    checkpoints = fastguard.Checkpoints(folder, keep_last=2, keep_best=1, state=state)

    step = checkpoints.load(optimizer.guard)
    print(f"from step {step}")
    while step < end:
        for inputs, targets in DataLoader(data, 10, shuffle=True, generator=order):  # eight batches, and a checkpoint
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            optimizer.guard.observe(loss=loss)
            step += 1
        with torch.no_grad():
            val_loss = nn.functional.mse_loss(model(x), data.tensors[1])
        stopped = stop(optimizer.guard, val_loss)
        checkpoints.save(optimizer.guard, step, metric=val_loss)
        if stopped:
            break
    return model


def main(folder: Path) -> bool:
    """Trains in one go, and with an interruption; whether it comes to the same."""
    whole = run(folder / "whole")
    run(folder / "interrupted", end=24)
    resumed = run(folder / "interrupted")
    same = all(map(torch.equal, whole.parameters(), resumed.parameters()))
    print(sorted(path.name for path in (folder / "interrupted").iterdir()))
    print("the same weights, bit for bit" if same else "other weights")
    return same


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
