"""The tensors and the trainings that are measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastguard.commands.bench import Shape, gpt2_shapes, mlp
from fastguard.commands.demo.training import TransformerBlock

from .clipping import Case

_NUM_BATCHES = 8


class Task(NamedTuple):
    """A model, and a function that runs it forward on the next of its batches and returns the loss."""

    model: nn.Module
    loss: Callable[[], Tensor]


class StepCase(NamedTuple):
    """A model and its batches; a whole step is zero_grad, forward, backward, clip if asked for, AdamW(fused=True)."""

    name: str
    title: str
    build: Callable[[], Task]


def task(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Task:
    """Cross-entropy on the batches, in turn and for ever."""
    endless = itertools.cycle(list(batches))

    def loss() -> Tensor:
        x, y = next(endless)
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return Task(model, loss)


def resnet50_shapes() -> tuple[Shape, ...]:
    """The trainable tensors of ResNet-50 for ImageNet."""

    def convolution(inputs: int, outputs: int, size: int) -> list[Shape]:
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]  # with its batch norm

    shapes = convolution(3, 64, 7)
    inputs = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            shapes += convolution(inputs, width, 1) + convolution(width, width, 3) + convolution(width, 4 * width, 1)
            if block == 0:
                shapes += convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return (*shapes, (1000, inputs), (1000,))


class Transformer(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, depth: int, num_heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(depth))
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
        texts = torch.randint(256, (_NUM_BATCHES, batch, context + 1))
    return task(model, [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts])


CASES = {
    case.name: case
    for case in (
        Case("gpt2-float32", "GPT-2 124M float32, 148 tensors", tuple(gpt2_shapes())),
        Case("gpt2-bfloat16", "GPT-2 124M bfloat16, 148 tensors", tuple(gpt2_shapes()), torch.bfloat16),
        Case("resnet50", "ResNet-50 float32, 161 tensors", resnet50_shapes()),
        Case("300x1000", "300 tensors × 1000 float32", ((1000,),) * 300),
        Case("3000x64", "3000 tensors × 64 float32", ((64,),) * 3000),
        Case("10000x1", "10 000 tensors × 1 float32", ((1,),) * 10_000),
        Case("1000x1", "1000 tensors × 1 float32", ((1,),) * 1000),
    )
}
STEP_CASES = {
    "step-mlp": StepCase("step-mlp", "MLP of 101k parameters", lambda: task(*mlp())),
    "step-transformer": StepCase("step-transformer", "transformer of 4.8M parameters", transformer),
}
