"""Small models that the tests of activations watch."""

import math

import torch
from torch import nn


class Attention(nn.Module):
    """Self-attention, written out: scores of large inputs overflow in float16."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1)
        return self.proj((scores / math.sqrt(x.shape[-1])).softmax(-1) @ self.v(x))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Transformer(nn.Module):
    """Token indices [B, T] to logits [B, T, 11]."""

    def __init__(self, num_blocks=2, width=16):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)): the product is no module's output."""

    def __init__(self, width=6, hidden=8):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def relu_net(dead=(), width=12):
    """Two hidden layers of ReLU; the units `dead` of the second have a bias far below zero."""
    net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    with torch.no_grad():
        net[0].bias.fill_(0.5)
        net[2].bias[list(dead)] = -1e4
    return net


def by_name(monitor):
    """The newest records of `monitor` by the names of their modules."""
    return {record.name: record for record in monitor.activities}


def taken(monitor, step):
    """Ends step `step` of a guard. Returns the records of the newest step that have arrived."""
    monitor.end_step(step)
    return ([()] + [records for _, records in monitor.arrived()])[-1]


def origins(monitor):
    """Names of the modules where NaN or Inf began at the newest step."""
    return [record.name for record in monitor.activities if record.is_origin]


def num_hooks(model):
    """Forward hooks of `model`, of all kinds."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
