"""What is measured: lists of tensor shapes with gradients to fill them, and a model for whole steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
_NUM_BATCHES = 8  # several, so that the gradient norm is not the same at every step
# Zeros, rare enough to leave timings alone, there to be counted.
_ZERO_START, _ZERO_STEP = 500, 997
_STD = 1e-3
_BLOCK = 1 << 24  # elements converted to float64 at a time


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
    build: Callable[[], Task]


def gpt2_shapes(width: int = 768, depth: int = 12, vocabulary: int = 50257, context: int = 1024) -> tuple[Shape, ...]:
    """GPT-2's tensors; the head is the token embedding again, so it is not a tensor of its own."""
    block: list[Shape] = [
        *((width,), (width,)),
        *((width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,)),
        *((width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    ]
    return ((vocabulary, width), (context, width), *(block * depth), (width,), (width,))


class Subject:
    """The gradients of a case: normal values of standard deviation 1e-3, one in 997 of them zero.

    Attributes:
        gradients: filled from the seed; kept here, so their Python objects stay alive.
        parameters: take no memory, and have the gradients as their `grad`.
        norm: true norm of all gradients together, as filled.
        limit: the `max_norm` of calls that clip; each lowers it by a hundredth.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self._seed = seed
        self.gradients = [torch.empty(shape, dtype=case.dtype) for shape in case.shapes]
        self.norm = 0.0
        self.fill()
        self.norm = self.limit = self.norm_now()
        self.parameters = []
        for gradient in self.gradients:
            parameter = torch.nn.Parameter(torch.zeros((), dtype=gradient.dtype).expand(gradient.shape))
            parameter.grad = gradient
            self.parameters.append(parameter)

    def fill(self) -> None:
        """Gives the gradients the values that they had at first."""
        generator = torch.Generator().manual_seed(self._seed)
        for gradient in self.gradients:
            gradient.normal_(std=_STD, generator=generator)
            gradient.view(-1)[_ZERO_START::_ZERO_STEP] = 0.0
        self.limit = self.norm

    def norm_now(self) -> float:
        """Norm of the gradients as they are now, in float64."""
        squares = (float(block.double().square().sum()) for g in self.gradients for block in g.flatten().split(_BLOCK))
        return math.sqrt(math.fsum(squares))


class Task(NamedTuple):
    """A model, and a function that runs it forward on the next of its batches and returns the loss."""

    model: nn.Module
    loss: Callable[[], Tensor]


def task(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Task:
    """Cross-entropy on the batches, in turn and for ever."""
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
        batches = [(torch.randn(batch, inputs), torch.randint(classes, (batch,))) for _ in range(_NUM_BATCHES)]
    return task(model, batches)


CASES = {
    case.name: case
    for case in (
        Case("gpt2-float32", "GPT-2 124M float32, 148 tensors", gpt2_shapes()),
        Case("300x1000", "300 tensors × 1000 float32", ((1000,),) * 300),
    )
}
STEP_MLP = StepCase("step-mlp", "MLP of 101k parameters", mlp)
