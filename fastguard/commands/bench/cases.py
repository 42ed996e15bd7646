"""What is measured, as data: lists of tensor shapes, and models for whole steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import models

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A list of gradients. `shapes` is in the order in which the model holds its parameters."""

    name: str
    title: str
    shapes: tuple[Shape, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_tensors(self) -> int:
        return len(self.shapes)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class StepCase:
    """A model and a batch; a whole step is zero_grad, forward, backward, clip if asked for, AdamW(fused=True)."""

    name: str
    title: str
    build: Callable[[], models.Task]


def gpt2_shapes(width: int = 768, depth: int = 12, vocabulary: int = 50257, context: int = 1024) -> tuple[Shape, ...]:
    """GPT-2's tensors; the head is the token embedding again, so it is no tensor of its own."""
    block: list[Shape] = [
        *((width,), (width,)),
        *((width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,)),
        *((width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    ]
    return ((vocabulary, width), (context, width), *(block * depth), (width,), (width,))


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


_GPT2 = gpt2_shapes()
CASES = {
    case.name: case
    for case in (
        Case("gpt2-float32", "GPT-2 124M float32, 148 tensors", _GPT2),
        Case("gpt2-bfloat16", "GPT-2 124M bfloat16, 148 tensors", _GPT2, torch.bfloat16),
        Case("resnet50", "ResNet-50 float32, 161 tensors", resnet50_shapes()),
        Case("300x1000", "300 tensors × 1000 float32", ((1000,),) * 300),
        Case("3000x64", "3000 tensors × 64 float32", ((64,),) * 3000),
    )
}
STEP_CASES = {
    case.name: case
    for case in (
        StepCase("step-mlp", "MLP of 101k parameters", models.mlp),
        StepCase("step-transformer", "transformer of 4.8M parameters", models.transformer),
    )
}
