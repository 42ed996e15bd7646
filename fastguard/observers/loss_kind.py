"""Infers the kind of a loss and its targets from some rows of a model's output and of its gradient."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..kernels.cpu import extension

SMOOTHED = "cross-entropy with smoothed labels"
LOG_OF_OUTPUT, LIKELIHOOD = "log of the output", "negative log-likelihood"
WITH_LOGITS, BINARY = "binary cross-entropy with logits", "binary cross-entropy"
CLASSIFYING = ("cross-entropy", SMOOTHED, LIKELIHOOD, LOG_OF_OUTPUT, WITH_LOGITS, BINARY)
_KINDS = ("", "zero", *CLASSIFYING, "absolute error", "squared error")  # LossKind in csrc/loss_gradient.h
_MAX_ELEMENTS, _MAX_ROWS = 65536, 4096
_MAX_READ = 1 << 22  # elements of the gradient, for targets of rows that are not in the sample
LEAST_BYTES, _SHARE = 1 << 20, 100


class Rows(NamedTuple):
    """Every `step`-th row along dimension `dim` of a tensor, `num` from `start` on; single elements if it is None."""

    dim: int | None
    start: int
    step: int
    num: int

    @classmethod
    def spread(cls, shape: Sequence[int], dim: int | None, most: int) -> Rows:
        """At most `most` rows. The step is odd: an even one would meet the same places of every sequence or image."""
        num_rows = math.prod(shape) // (1 if dim is None else shape[dim])
        step = -(-num_rows // most)
        step += step > 1 and step % 2 == 0
        return cls(dim, step // 2, step, len(range(step // 2, num_rows, step)))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of them, [num, width]."""
        table = x.unsqueeze(-1) if self.dim is None else x if self.dim == x.dim() - 1 else x.movedim(self.dim, -1)
        width, end = table.shape[-1], self.start + self.step * self.num
        if self.num * width == x.numel():
            return table.clone(memory_format=torch.contiguous_format).view(-1, width)
        if table.is_contiguous():
            return table.view(-1, width)[self.start : end : self.step].clone()
        places = torch.arange(self.start, end, self.step, device=x.device)
        return table[torch.unravel_index(places, table.shape[:-1])]


class Loss(NamedTuple):
    """What a gradient says about the loss."""

    # One of `CLASSIFYING`, "absolute error", "squared error" (a mean over all elements, which anything else counts as,
    # too, until the losses rule it out), "zero" if the gradient is zero, or "" if it fits none or is not finite.
    kind: str
    targets: array[float] | None = None  # classes, or the numbers of a squared error; only of rows with a gradient
    places: array[float] | None = None  # of classes, the row of each, out of `num_rows`
    num_rows: int = 0
    is_sampled: bool = False  # whether the targets are a sample of the rows
    mean_squared: float = math.nan  # what a mean squared error would be; NaN above 2^24 elements
    numbers: tuple[float, ...] = ()  # of a squared error's targets: least, largest, mean, std, share of 0 and 1


class OutputSample:
    """Copies some rows of a model's output in the forward pass, so that nothing has to hold the output itself.

    It copies an output of up to 65,536 elements whole. It takes as many elements of a larger one, up to eight rows if
    they are wide, and at most max(1 MiB, 1 % of the output). The classes of other rows come from the gradient alone.
    """

    def __init__(self, output: torch.Tensor) -> None:
        self.shape = output.shape
        self._samples = [(rows, rows.take(output), self._reach(rows)) for rows in _sampled(output)]
        self.num_bytes = sum(values.nbytes for _, values, _ in self._samples)  # of the copies

    def _reach(self, rows: Rows) -> Rows:
        """Rows of the gradient to read if the sample is not the whole output."""
        none = Rows(rows.dim, 0, 2, 0)
        if rows.step == 1:
            return none
        most = _MAX_READ if rows.dim is None else max(1, min(_MAX_ROWS, _MAX_READ // self.shape[rows.dim]))
        reach = Rows.spread(self.shape, rows.dim, most)
        return reach if reach.num > 2 * min(rows.num, _MAX_ROWS) else none

    def loss_of(self, gradient: torch.Tensor) -> Loss:
        """What the gradient, of the output's shape and any scale, says of the loss. Cost: 20 us to a few ms."""
        samples = [
            (values, -1 if rows.dim is None else rows.dim, *rows[1:3], *reach[1:])
            for rows, values, reach in self._samples
        ]
        found = extension.kind_of_loss(samples, gradient, torch.get_num_threads())
        if found is None:
            return Loss("")
        kind, targets, places, num_rows, is_sampled, mean_squared, *numbers = found
        classes = array("d", targets) if targets else None
        return Loss(_KINDS[kind], classes, array("d", places), num_rows, is_sampled, mean_squared, tuple(numbers))


def _sampled(output: torch.Tensor) -> Iterator[Rows]:
    """With the classes last, and of more than two dimensions with the classes second too, as cross_entropy has it."""
    shape, itemsize = output.shape, output.itemsize
    most_bytes = max(LEAST_BYTES, output.numel() * itemsize // _SHARE)
    width = shape[-1] if len(shape) > 1 else 1
    fitting = most_bytes // 2 // (width * itemsize)
    if width == 1 or not fitting:
        yield Rows.spread(shape, None, _MAX_ELEMENTS)
    else:
        yield Rows.spread(shape, len(shape) - 1, max(_MAX_ELEMENTS // width, min(8, fitting)))
    if len(shape) > 2 and width > 1 and shape[1] > 1:
        fitting = most_bytes // 4 // (shape[1] * itemsize)
        if fitting:
            yield Rows.spread(shape, 1, min(_MAX_ROWS, fitting))
