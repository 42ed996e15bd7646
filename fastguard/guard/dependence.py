"""How surely near inputs have near targets, as a batch shows it: where they do not, the targets may be of others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MAX_SAMPLES, _MAX_FEATURES = 64, 256
_LEAST_SAMPLES, _LEAST_BATCHES, _LEAST_EQUAL = 8, 6, 0.05


class Dependence:
    """Sums `how_near` over batches, for each input by itself. Cost: 0.1 to 0.5 ms a batch and input."""

    def __init__(self) -> None:
        self._found: list[list[float]] = []

    def add(self, given: Sequence[torch.Tensor], targets: torch.Tensor, output: torch.Tensor) -> float | None:
        """Takes a batch; the value of all so far, of the input that tells most: a standard normal one by chance.

        None before six batches, and where it is not known which targets are whose, or what an input holds: integers
        that are hardly ever equal are names, which are not near each other, and of sequences targets go with places.
        """
        count, widths = output.shape[0], (1, output.shape[-1], output.shape[min(1, output.dim() - 1)])
        is_whole = any(len(targets) * width == output.numel() for width in widths) and len(targets) % count == 0
        inputs = [x.reshape(count, -1) for x in given if x.dim() and x.shape[0] == count and not x.is_complex()]
        if not is_whole or count < _LEAST_SAMPLES or not inputs or len(inputs) < len(given):
            return None
        counted = [x for x in inputs if not x.is_floating_point()]
        if counted and (len(targets) > count or min((x[1:] == x[:-1]).double().mean() for x in counted) < _LEAST_EQUAL):
            return None
        found = [how_near(x, targets.view(count, -1)) for x in inputs]
        if all(map(math.isfinite, found)):
            self._found = [now for now in self._found if len(now) == len(found)] + [found]
        num = len(self._found)
        return max(map(sum, zip(*self._found))) / math.sqrt(num) if num >= _LEAST_BATCHES else None


def how_near(x: torch.Tensor, y: torch.Tensor) -> float:
    """The bias-corrected distance correlation of inputs and targets, times the root of n (n - 3) / 2.

    Of independent ones it has mean 0 and spread 1 (Szekely and Rizzo 2013). Distances of inputs, [n, features] of
    spread 1, or shares of integers that differ, count as 1 - exp(-2 d) in units of their median, so that what is near
    counts most; those of targets, [n, targets], as they are. NaN where one of the two is constant.
    """
    near = _distances(x, is_scaled=True)
    a, b = _centred(-torch.exp(-2.0 * near / near.median())), _centred(_distances(y))
    return float((a * b).sum() / (a.norm() * b.norm())) * math.sqrt(len(a) * (len(a) - 3) / 2)


def _distances(x: torch.Tensor, *, is_scaled: bool = False) -> torch.Tensor:
    rows = x[:_MAX_SAMPLES, :: -(-x.shape[1] // _MAX_FEATURES)].double()
    if is_scaled and x.is_floating_point():
        spread = rows.std(0)
        rows = rows[:, spread > 0.0] / spread[spread > 0.0]
    return torch.cdist(rows, rows, p=2.0 if x.is_floating_point() else 0.0)


def _centred(d: torch.Tensor) -> torch.Tensor:
    d = d.fill_diagonal_(0.0)
    rows = d.sum(0) / (len(d) - 2)
    return (d - rows - rows[:, None] + rows.sum() / (len(d) - 1)).fill_diagonal_(0.0)
