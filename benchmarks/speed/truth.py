"""What is true of a subject's gradients, as filled: computed in float64 by torch, not by fastguard."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .clipping import Subject

_BLOCK = 1 << 24  # elements converted to float64 at a time


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
        std = math.sqrt(max(0.0, self.sum_sq / self.numel - mean * mean))
        return Stats(math.sqrt(self.sum_sq), self.max_val, self.min_val, mean, std, self.num_zeros, 0, 0)


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


def rows(subject: Subject) -> list[Stats]:
    """Statistics of each tensor."""
    return [_sums(gradient).stats() for gradient in subject.gradients]


def total(subject: Subject) -> Stats:
    """Statistics of all tensors together."""
    numel, sum_sq, sums, high, low, zeros = zip(*map(_sums, subject.gradients), strict=True)
    return Sums(sum(numel), math.fsum(sum_sq), math.fsum(sums), max(high), min(low), sum(zeros)).stats()


def _words(tensor: Tensor) -> int:
    """Sum of the 64-bit words of a tensor's bytes, the last one filled with zeros, modulo 2^64."""
    content = tensor.flatten().view(torch.uint8)
    whole = content.numel() // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8)
    rest[: content.numel() - whole] = content[whole:]
    return int(content[:whole].view(torch.int64).sum()) + int(rest.view(torch.int64))


def word_sum(subject: Subject) -> int:
    """Sum of the 64-bit words of all gradients, modulo 2^64."""
    return sum(map(_words, subject.gradients)) % (1 << 64)
