"""A case made real: its gradients, the parameters that carry them, and their norm in float64."""

from __future__ import annotations

import math

import torch

from .cases import Case

# Zeros, rare enough to leave timings alone, there to be counted.
_ZERO_START, _ZERO_STEP = 500, 997
_STD = 1e-3
_BLOCK = 1 << 24  # elements converted to float64 at a time


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
