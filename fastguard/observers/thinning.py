"""Views of a tensor: a few elements evenly over it, or all of them part by part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch


def thinned(x: torch.Tensor, most: int, dims: Iterable[int] | None = None) -> torch.Tensor:
    """A view of `x` that leaves out indices of `dims`, until it has at most some `most` elements.

    Args:
        dims: in the order in which they are thinned; default all, the last first. Each keeps an index at least.

    >>> thinned(torch.arange(12).view(3, 4), 4).tolist()
    [[0, 3], [8, 11]]
    """
    for dim in reversed(range(x.dim())) if dims is None else dims:
        step = min(-(-x.numel() // max(1, most)), x.shape[dim])
        if step > 1:
            x = x[(slice(None),) * dim + (slice(None, None, step),)]
    return x


def strided(x: torch.Tensor, most: int) -> torch.Tensor:
    """A view of at most some `most` elements of `x`; of all places of the last dimension where `x` is contiguous."""
    if x.numel() <= most or not x.is_contiguous():
        return thinned(x, most, sorted(range(x.dim()), key=lambda d: -x.shape[d]))
    step = -(-x.numel() // max(1, most))
    while math.gcd(step, x.shape[-1]) > 1:
        step += 1
    return x.view(-1)[::step]


def chunks(x: torch.Tensor, most: int = 1 << 16) -> Iterator[torch.Tensor]:
    """Views of at most `most` elements that together are `x`."""
    if x.numel() <= most:
        yield x
    elif x.is_contiguous():
        yield from x.view(-1).split(most)
    else:
        dim = max(range(x.dim()), key=lambda d: x.shape[d])
        for part in x.split(max(1, most * x.shape[dim] // x.numel()), dim):
            yield from chunks(part, most)
