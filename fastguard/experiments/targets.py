"""How a target is read from an output, and how well it is met."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_PAIRS = 1 << 20  # of positive and negative elements that are compared with each other
_MOST_COLUMNS = 32


@dataclass(frozen=True)
class Reading:
    """How one target is read from one output."""

    output: int  # output, target: their indices
    target: int
    space: str  # "classes", "binary" or "numbers"
    dim: int  # of the classes in the output
    valid: Tensor  # which elements of the target are to count: of classes, those that are not negative

    def by_target(self, mask: Tensor) -> Tensor:
        """A mask over the output as one over the target: whether any of its elements is set."""
        return mask.any(self.dim) if self.space == "classes" else mask.reshape(self.valid.shape)

    def agreement(self, output: Tensor, target: Tensor, counted: Tensor) -> float:
        """How far `output` is what `target` says, where `counted`: 1 is wholly; 0 or less, not at all."""
        if not bool(counted.any()):
            return 0.0
        if self.space == "classes":
            return float((output.argmax(self.dim) == target)[counted].double().mean())
        output, target = output.reshape(target.shape).float(), target.float()
        if self.space == "numbers":
            return _correlation(output, target, counted)
        high, low = output[(target > 0) & counted], output[(target <= 0) & counted]
        if not high.numel() or not low.numel():
            return 1.0
        if high.numel() * low.numel() > MAX_PAIRS:
            high, low = high.sort().values[:: 1 + high.numel() // 512], low.sort().values[:: 1 + low.numel() // 512]
        return float((high[:, None] > low).double().mean())

    def ideals(self, target: Tensor, output: Tensor) -> list[Tensor]:
        """Outputs that say just what the target does."""
        if self.space == "classes":
            hot = torch.nn.functional.one_hot(target.masked_fill(~self.valid, 0), output.shape[self.dim])
            return [10.0 * hot.movedim(-1, self.dim).float()]
        plain = target.float().reshape(output.shape)
        return [plain] if self.space == "numbers" else [20.0 * (plain > 0) - 10.0, plain]


def read(i: int, output: Tensor, index: int, target: Tensor) -> Reading | None:
    """How a target may be read from an output; None if it is not in its space."""
    if target.dim() == 0 or len(target) != len(output) or target.dtype is torch.bool or target.is_complex():
        return None
    if [n for n in output.shape[1:] if n != 1] == [n for n in target.shape[1:] if n != 1]:
        if not bool(target.isfinite().all()):
            return None
        return Reading(i, index, "binary" if _is_yes_or_no(target) else "numbers", -1, torch.ones_like(target) > 0)
    if output.dim() == 1 or target.is_floating_point():
        return None
    for dim in (1, output.dim() - 1):
        rest = [*output.shape[:dim], *output.shape[dim + 1 :]]
        valid = (target >= 0) & (target < output.shape[dim])
        too_large = target[target >= output.shape[dim]].unique()  # one number may be that of labels to be ignored
        is_known = len(too_large) == 0 or (len(too_large) == 1 and int(too_large) > output.shape[dim])
        if rest == list(target.shape) and output.shape[dim] > 1 and bool(valid.any()) and is_known:
            return Reading(i, index, "classes", dim, valid)
    return None


def changed(target: Tensor) -> Tensor:
    """Other values of the same kind: some in other classes, on the other side, elsewhere."""
    if target.dtype is torch.bool:
        return ~target
    if target.is_floating_point():
        return 1.0 - target if _is_yes_or_no(target) else 0.3 * target.mean() + 0.37 - 0.7 * target
    known = target[target >= 0].unique()
    if not known.numel():
        return target.clone()
    every_third = (torch.arange(target.numel(), device=target.device) % 3 == 0).view(target.shape)
    following = known[(torch.searchsorted(known, target.clamp(min=int(known[0]))) + 1) % len(known)]
    return torch.where((target < 0) | ~every_third, target, following)


def padding_value(target: Tensor) -> int | None:
    """The number that rows of a [B, T] target end in, for more or less long, and that is nowhere else."""
    if target.dim() != 2 or target.shape[1] < 3 or target.is_floating_point():
        return None
    value = int(target[:, -1].mode().values)
    is_value = target == value
    lengths = is_value.flip(1).long().cumprod(1).sum(1)
    if int(is_value.sum()) > int(lengths.sum()) or int(lengths.max()) < 2 or len(lengths.unique()) < 2:
        return None
    return value


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """sin(tau pi / 2) of Kendall's tau over pairs whose `b` differs, of 4096 elements at most; NaN without any."""
    a, b = a[:: 1 + a.numel() // 4096], b[:: 1 + b.numel() // 4096]
    steps = range(1, len(a), 1 + len(a) // 64)
    pairs = [((a - a.roll(k)).sign() * (b - b.roll(k)).sign())[b != b.roll(k)] for k in steps]
    signs = torch.cat(pairs) if pairs else a[:0]
    return math.sin(0.5 * math.pi * float(signs.double().mean())) if signs.numel() else math.nan


def _is_yes_or_no(t: Tensor) -> bool:
    return bool(((t == 0) | (t == 1)).all()) or bool(((t == -1) | (t == 1)).all())


def _correlation(output: Tensor, target: Tensor, counted: Tensor) -> float:
    """The least of the columns, or of all together if they are many; or the mean of the rows, where that is more."""
    o, t, m = (x.reshape(len(target), -1) for x in (output, target, counted))
    columns, rows = range(t.shape[1]), range(min(len(t), _MOST_COLUMNS))
    if len(columns) > _MOST_COLUMNS:
        by_column = [rank_correlation(o[m], t[m])]
    else:
        by_column = [rank_correlation(o[m[:, j], j], t[m[:, j], j]) for j in columns]
    by_row = [rank_correlation(o[i, m[i]], t[i, m[i]]) for i in rows] if len(columns) >= 3 else []
    by_column, by_row = [c for c in by_column if c == c], [r for r in by_row if r == r]
    return max(min(by_column, default=1.0), sum(by_row) / len(by_row) if by_row else -1.0)


class AbstainError(Exception):
    """The outputs cannot be read."""
