"""An average of the weights, of torch's own. Skipped steps do not enter it twice."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastguard


def main() -> tuple[float, float]:
    """Trains, and returns the validation loss of the model and of its average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for step in range(400):
        x = torch.randn(4, 8)
        y = x.sum(1, keepdim=True) + torch.randn(4, 1)  # noise, which an average is good against
        if step == 50:
            x[0, 0] = math.inf
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.guard.last.skipped:  # on a GPU after guard.flush(), which waits
            average.update_parameters(model)
    x = torch.randn(512, 8)
    with torch.no_grad():
        losses = [nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)).item() for net in (model, average)]
    print(f"validation loss {losses[0]:.4f}, of the average {losses[1]:.4f}")
    return losses[0], losses[1]


if __name__ == "__main__":
    main()
