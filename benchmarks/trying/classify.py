"""A classifier as a user writes it, with a fault on request: what `fastguard try` is measured on."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
fault = parser.parse_args().fault

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
x = torch.randn(6000, 20)
with torch.no_grad():
    y = (3.0 * teacher(x) + 0.3 * torch.randn(6000, 5)).argmax(1)
if fault == "shuffled":
    y = y[torch.randperm(len(y))]
if fault == "raw inputs":
    x = 300.0 * x + 1000.0
if fault == "sorted":
    order = y[:5000].argsort()
    x[:5000], y[:5000] = x[order], y[order]
train = DataLoader(TensorDataset(x[:5000], y[:5000]), batch_size=64, shuffle=fault != "sorted")
val = DataLoader(TensorDataset(x[5000:], y[5000:]), batch_size=250)

dropout = [nn.Dropout(0.95)] if fault == "dropout" else []
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), *dropout, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
if fault == "softmax":
    model.append(nn.Softmax(-1))
if fault == "init":
    for p in model.parameters():
        p.data *= 8.0
settings = {
    "lr low": {"lr": 1e-5},
    "lr high": {"lr": 0.3},
    "decay": {"lr": 1e-3, "weight_decay": 100.0},
    "eps": {"lr": 1e-3, "eps": 1.0},
}
optimizer = torch.optim.AdamW(model.parameters(), **settings.get(fault, {"lr": 1e-3}))
if fault == "clipped":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
os.makedirs("checkpoints", exist_ok=True)
for epoch in range(10):
    model.train()
    for xb, yb in train:
        if fault != "no zero_grad":
            optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        if fault == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        total = sum(criterion(model(xb), yb).item() for xb, yb in val) / len(val)
    print(f"epoch {epoch}: loss {loss.item():.3f}, validation {total:.3f}")
    torch.save(model.state_dict(), "checkpoints/last.pt")
