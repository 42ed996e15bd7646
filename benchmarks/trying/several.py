"""Several labels a sample, in half precision if asked, as a user writes it: what `fastguard try` is measured on."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
fault = parser.parse_args().fault

torch.manual_seed(5)
weights = torch.randn(30, 6)
inputs = torch.rand(4096, 30)
labels = ((inputs - 0.5) @ weights + 0.3 * torch.randn(4096, 6) > 0).float()
if fault == "raw inputs":
    inputs = torch.cat([1e4 * inputs[:, :10], inputs[:, 10:]], 1)
model = torch.nn.Sequential(
    torch.nn.Linear(30, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 6)
)
if fault == "init":
    for layer in model[::2]:
        torch.nn.init.normal_(layer.weight, std=3.0)
if fault == "sigmoid":
    model.append(torch.nn.Sigmoid())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.0, 0.0) if fault == "betas" else (0.9, 0.999))
loss_fn = torch.nn.BCEWithLogitsLoss()
for epoch in range(8):
    order = torch.randperm(4096)
    for rows in order.split(64):
        loss = loss_fn(model(inputs[rows]), labels[rows])
        if fault != "no zero_grad":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
