"""A character model as a user writes it, with a fault on request: what `fastguard try` is measured on."""

import argparse
import inspect

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
fault = parser.parse_args().fault

text = inspect.getsource(argparse) + inspect.getsource(inspect)
symbols = sorted(set(text))
data = torch.tensor([symbols.index(one) for one in text])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(symbols), 32)
        self.rnn = nn.GRU(32, 96, batch_first=True)
        self.head = nn.Linear(96, len(symbols))

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr={"lr high": 0.3, "lr low": 1e-6}.get(fault, 2e-3))
loss_fn = nn.CrossEntropyLoss()
for _ in range(400):
    starts = torch.randint(len(data) - 33, (16,)).tolist()
    x = torch.stack([data[i : i + 32] for i in starts])
    y = torch.stack([data[i + 1 : i + 33] for i in starts])
    if fault == "shuffled":
        y = y[torch.randperm(len(y))]
    loss = loss_fn(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
