"""How a target is read from an output, and how well it is met; free outputs in the place of a model's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_PAIRS = 1 << 20  # of positive and negative elements that are compared with each other
_MOST_COLUMNS = 32
_NUM_STEPS = 120
_SEED = 7


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


@dataclass
class FreeOutputs:
    """Outputs that are free, in the place of the model's, under a loss."""

    judge: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
    given: Sequence[Tensor]
    targets: Sequence[Tensor]
    inputs: Sequence[Tensor]
    ending: Callable[[Tensor], Tensor] | None
    is_causal: bool
    are_targets: bool
    deadline: float

    def __post_init__(self) -> None:
        device = self.given[0].device
        self.targets = [t.detach().to(device) for t in self.targets]
        self.inputs = [x.detach().to(device) for x in self.inputs]
        self.ending = self.ending if len(self.given) == 1 else None
        self.pull = [torch.zeros(o.shape, device=device) for o in self.given]
        self.touched = [torch.zeros(o.shape, dtype=torch.bool, device=device) for o in self.given]
        self.dice = torch.Generator().manual_seed(0)
        numbers = [t.double().abs().mean() for t in self.targets if t.is_floating_point() and t.isfinite().all()]
        self.spread = 1.0 if self.ending else 1.0 + 2.0 * max(map(float, numbers), default=0.0)

    def _start(self, scale: float) -> list[Tensor]:
        """Random outputs; `scale` is of the targets' size."""
        noise = [torch.randn(o.shape, generator=self.dice).to(o.device) for o in self.given]
        return [scale * self.spread * n for n in noise]

    def _outputs(self, free: Sequence[Tensor]) -> list[Tensor]:
        made = [z if self.ending is None else self.ending(z) for z in free]
        return [z.to(o.dtype, copy=True) for z, o in zip(made, self.given)]  # some losses write to what they get

    def _gradient(
        self, free: Sequence[Tensor], seed: int = _SEED, targets: Sequence[Tensor] | None = None
    ) -> tuple[float, list[Tensor]]:
        """The loss and its derivative; notes which outputs have one, if the targets are those given."""
        torch.manual_seed(seed)
        leaves = [z.detach().clone().requires_grad_() for z in free]
        loss = self.judge(self._outputs(leaves), self.targets if targets is None else targets)
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        gradients = [torch.zeros_like(z) if g is None else g for g, z in zip(found, leaves)]
        if targets is None:
            for mask, g in zip(self.touched, gradients):
                mask |= g != 0
        return float(loss.detach()), gradients

    def _optimise(
        self, start: Sequence[Tensor], frozen: set[int] | frozenset[int] = frozenset(), pace: float = 1.0
    ) -> tuple[list[Tensor], float]:
        """The outputs after some steps of Adam, whose rate falls to zero, and their loss; up to one not finite."""
        before = free = [z.clone() for z in start]
        first, second = [torch.zeros_like(z) for z in free], [torch.zeros_like(z) for z in free]
        loss, least = self._gradient(free)[0], 0.0
        if math.isnan(loss):
            raise AbstainError("the loss is not finite at outputs of usual size")
        for step in range(1, _NUM_STEPS + 1):
            if time.perf_counter() > self.deadline:
                raise AbstainError("the loss is too slow to be asked in the time")
            value, gradients = self._gradient(free, step)
            if not math.isfinite(value) or not all(bool(g.isfinite().all()) for g in gradients):
                return before, loss
            before, loss = [z.clone() for z in free], value
            sizes = torch.cat([g[g != 0].abs().flatten().float() for g in gradients])
            least = least or (1e-4 * float(sizes.median()) if sizes.numel() else 0.0)
            rate = 0.15 * pace * self.spread * min(1.0, 2.0 - 2.0 * step / (_NUM_STEPS + 1))
            for i, g in enumerate(gradients):
                if i not in frozen:
                    first[i].lerp_(g, 0.2)
                    second[i].lerp_(g.square(), 0.05)
                    scale = (second[i] / (1 - 0.95**step)).sqrt() + least + 1e-30
                    free[i] -= rate * first[i] / (1 - 0.8**step) / scale
        after = self._gradient(free)[0]
        return (free, after) if math.isfinite(after) else (before, loss)

    def _is_changed_by(self, index: int, target: Tensor) -> bool:
        """Whether the loss of random outputs, or its derivative, is another one with this target."""
        free, targets = self._start(0.5), [*self.targets]
        targets[index] = target
        (a, before), (b, after) = self._gradient(free), self._gradient(free, targets=targets)
        if abs(a - b) > 1e-5 * abs(a) + 1e-12:
            return True
        return not all(torch.allclose(x, y, rtol=1e-3, atol=1e-5 * float(x.abs().max())) for x, y in zip(before, after))
