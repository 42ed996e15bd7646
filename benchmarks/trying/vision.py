"""An image classifier as a user writes it, with a fault on request: what `fastguard try` is measured on."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
fault = parser.parse_args().fault


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 4 * 4, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = self.fc(x.flatten(1))
        return F.log_softmax(F.softmax(x, 1), 1) if fault == "softmax" else F.log_softmax(x, 1)


def make(n):
    """Bars in four directions, in noise."""
    y = torch.randint(4, (n,))
    x = 0.8 * torch.randn(n, 1, 16, 16)
    for i, kind in enumerate(y.tolist()):
        at = int(torch.randint(2, 14, ()))
        if kind == 0:
            x[i, 0, at] += 1.0
        elif kind == 1:
            x[i, 0, :, at] += 1.0
        else:
            x[i, 0] += torch.eye(16) if kind == 2 else torch.eye(16).flip(0)
    return x, y


torch.manual_seed(3)
train_x, train_y = make(3200)
val_x, val_y = make(400)
if fault == "shuffled":
    train_y = train_y[torch.randperm(3200)]
model = Net()
lr = {"lr high": 30.0, "lr low": 1e-5}.get(fault, 0.02)
decay = 1.0 if fault == "decay" else 5e-4
optimizer = torch.optim.SGD(
    model.parameters(), lr=lr, momentum=0.999 if fault == "momentum" else 0.9, weight_decay=decay
)
for epoch in range(6):
    model.train()
    for i in range(0, 3200, 32):
        optimizer.zero_grad()
        loss = F.nll_loss(model(train_x[i : i + 32]), train_y[i : i + 32])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(val_x)
        print(epoch, F.nll_loss(out, val_y).item(), (out.argmax(1) == val_y).float().mean().item())
