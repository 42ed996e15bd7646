"""A case made real: its gradients, parameters that carry them, and what is true of them in float64."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .cases import Case

# Rare enough to leave timings alone, there to be counted.
_ZERO_START, _ZERO_STEP = 500, 997
_STD = 1e-3
_BLOCK = 1 << 24  # elements converted to float64 at a time
_MAX_FADE = 1e-3


class Stats(NamedTuple):
    """What is compared: the statistics of the toolkit, of one tensor or of all together."""

    norm: float
    max_val: float
    min_val: float
    mean: float
    std: float
    num_zeros: int
    num_nans: int
    num_infs: int


class Sums(NamedTuple):
    """What `Stats` are made of, in float64."""

    numel: int
    sum_sq: float
    sum: float
    max_val: float
    min_val: float
    num_zeros: int

    def stats(self) -> Stats:
        mean = self.sum / self.numel
        variance = max(0.0, self.sum_sq / self.numel - mean * mean)
        return Stats(
            math.sqrt(self.sum_sq), self.max_val, self.min_val, mean, math.sqrt(variance), self.num_zeros, 0, 0
        )


def _sums(tensor: Tensor) -> Sums:
    """Of finite values, some of which are not zero."""
    sum_sq = total = high = 0.0
    low, zeros = math.inf, 0
    for block in tensor.flatten().split(_BLOCK):
        x = block.double()
        sum_sq += float(x.square().sum())
        total += float(x.sum())
        magnitude = x.abs_()
        high = max(high, float(magnitude.max()))
        zeros += int((magnitude == 0).sum())
        low = min(low, float(magnitude.masked_fill_(magnitude == 0, math.inf).min()))
    return Sums(tensor.numel(), sum_sq, total, high, low, zeros)


def _word_sum(tensor: Tensor) -> int:
    """Sum of the 64-bit words of a tensor's bytes, the last one filled with zeros, modulo 2^64."""
    content = tensor.flatten().view(torch.uint8)
    whole = content.numel() // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8)
    rest[: content.numel() - whole] = content[whole:]
    return int(content[:whole].view(torch.int64).sum()) + int(rest.view(torch.int64))


class Subject:
    """The gradients of a case: normal values of standard deviation 1e-3, one in 997 of them zero.

    Attributes:
        gradients: filled from a fixed seed; kept here, so their Python wrappers stay alive.
        norm: true norm of all gradients together, as filled.
        limit: the `max_norm` of rivals that clip at every call; they lower it by a hundredth each time.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self._seed = seed
        self.gradients = [torch.empty(shape, dtype=case.dtype) for shape in case.shapes]
        self.fill()
        self.norm = self.norm_now()

    def fill(self) -> None:
        """Gives the gradients the values that they had at first."""
        generator = torch.Generator().manual_seed(self._seed)
        for gradient in self.gradients:
            gradient.normal_(std=_STD, generator=generator)
            gradient.view(-1)[_ZERO_START::_ZERO_STEP] = 0.0
        self.limit = _STD * math.sqrt(self.case.num_elements)
        self._lowest = self.limit * _MAX_FADE

    def freshen(self) -> None:
        """Fills anew before clipping has worn the values down to where arithmetic becomes slow."""
        if self.limit < self._lowest:
            self.fill()

    @functools.cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that take no memory, with the gradients as their `grad`."""
        parameters = []
        for gradient in self.gradients:
            parameter = torch.nn.Parameter(torch.zeros((), dtype=gradient.dtype).expand(gradient.shape))
            parameter.grad = gradient
            parameters.append(parameter)
        return parameters

    @functools.cached_property
    def _truth(self) -> list[Sums]:
        return [_sums(gradient) for gradient in self.gradients]

    @functools.cached_property
    def rows(self) -> list[Stats]:
        """True statistics of each tensor, as filled; computed in float64 by torch, not by fastguard."""
        return [sums.stats() for sums in self._truth]

    @functools.cached_property
    def total(self) -> Stats:
        """True statistics of all tensors together, as filled."""
        numel, sum_sq, total, high, low, zeros = zip(*self._truth, strict=True)
        return Sums(sum(numel), math.fsum(sum_sq), math.fsum(total), max(high), min(low), sum(zeros)).stats()

    def word_sum(self) -> int:
        """Sum of the 64-bit words of all gradients, modulo 2^64."""
        return sum(map(_word_sum, self.gradients)) % (1 << 64)

    def norm_now(self) -> float:
        """Norm of the gradients as they are now, in float64."""
        squares = (float(block.double().square().sum()) for g in self.gradients for block in g.flatten().split(_BLOCK))
        return math.sqrt(math.fsum(squares))
