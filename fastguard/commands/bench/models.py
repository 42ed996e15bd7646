"""The models whose whole steps are measured: the smallest that are still real."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BATCHES = 8  # several, so that the gradient norm is not the same at every step


class Task(NamedTuple):
    """A model, and a function that runs it forward on the next of its batches and returns the loss."""

    model: nn.Module
    loss: Callable[[], Tensor]


def _task(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Task:
    endless = itertools.cycle(list(batches))

    def loss() -> Tensor:
        x, y = next(endless)
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return Task(model, loss)


def mlp(width: int = 256, inputs: int = 128, classes: int = 10, batch: int = 32, seed: int = 0) -> Task:
    """An MLP of three layers; the same weights and batches for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )
        batches = [(torch.randn(batch, inputs), torch.randint(classes, (batch,))) for _ in range(NUM_BATCHES)]
    return _task(model, batches)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, depth: int, num_heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def transformer(
    width: int = 256, depth: int = 6, num_heads: int = 4, context: int = 64, batch: int = 2, seed: int = 0
) -> Task:
    """A small language model on random bytes; the same weights and batches for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(width, depth, num_heads, context, vocabulary=256)
        texts = torch.randint(256, (NUM_BATCHES, batch, context + 1))
    return _task(model, [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts])
