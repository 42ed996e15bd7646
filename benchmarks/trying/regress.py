"""A regression as a user writes it, with a fault on request: what `fastguard try` is measured on."""

import argparse

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
fault = parser.parse_args().fault

generator = torch.Generator().manual_seed(1)
x = torch.rand(4000, 8, generator=generator)
y = (x[:, :3] ** 2).sum(1, keepdim=True) + x[:, 3:4] * x[:, 4:5] + 0.1 * torch.randn(4000, 1, generator=generator)
if fault == "large targets":
    y = 300.0 * y + 5000.0
if fault == "shuffled":
    y = y[torch.randperm(len(y), generator=generator)]
model = torch.nn.Sequential(torch.nn.Linear(8, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
rates = {"lr high": 3.0, "lr low": 1e-5}
optimizer = torch.optim.SGD(model.parameters(), lr=rates.get(fault, 0.05), momentum=0.9)
if fault == "large targets":
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(400):
    rows = torch.randint(3200, (50,))
    optimizer.zero_grad()
    loss = F.mse_loss(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        with torch.no_grad():
            print(step, loss.item(), F.mse_loss(model(x[3200:]), y[3200:]).item())
