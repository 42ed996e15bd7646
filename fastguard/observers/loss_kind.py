"""Tells the kind of a loss, and its targets, from some rows of a model's output and of its gradient."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..kernels import cpu

SMOOTHED = "cross-entropy with smoothed labels"
LOG_OF_OUTPUT, LIKELIHOOD = "log of the output", "negative log-likelihood"
WITH_LOGITS, BINARY = "binary cross-entropy with logits", "binary cross-entropy"
CLASSIFYING = ("cross-entropy", SMOOTHED, LIKELIHOOD, LOG_OF_OUTPUT, WITH_LOGITS, BINARY)
_KINDS = ("", "zero", *CLASSIFYING, "absolute error", "squared error")  # LossKind in csrc/loss_gradient.h
_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 1e-2}  # what rounding does to rows and their sums
_USUAL_TOLERANCE = 2e-3
_LEAST_SMOOTHING = 5e-3
_ALL_BUT = 0.01  # elements that rounding may spoil
_MAX_ELEMENTS, _MAX_ROWS = 65536, 4096
_MAX_READ, _MAX_SUMMED = 1 << 22, 1 << 24  # elements of the gradient: read for more targets, for the sum of squares
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

    def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Copies of them, a few rows at a time, as doubles."""
        each = max(1, _MAX_ELEMENTS // (1 if self.dim is None else x.shape[self.dim]))
        for i in range(0, self.num, each):
            start, num = self.start + i * self.step, min(each, self.num - i)
            yield self._replace(start=start, num=num).take(x).double()


class Loss(NamedTuple):
    """What a gradient says of the loss.

    Attributes:
        kind: one of `CLASSIFYING`, "squared error", "absolute error"; "zero" where there is no gradient, "" where it is
            none of them, or not finite. A squared error is taken for one with the mean over all elements, and whatever
            fits nothing else counts as one until the losses tell; the other kinds need no scale.
        targets: classes, or a squared error's numbers; of rows with a gradient only.
        places: of classes, the row of each, of `num_rows`.
        is_sampled: whether the targets are those of a sample of the rows.
        mean_squared: what a mean squared error would be; NaN of a gradient with more than 2^24 elements.
        numbers: least, largest, mean and standard deviation of a squared error's targets, and the share of 0 and 1.
    """

    kind: str
    targets: array[float] | None = None
    places: array[float] | None = None
    num_rows: int = 0
    is_sampled: bool = False
    mean_squared: float = math.nan
    numbers: tuple[float, ...] = ()


class OutputSample:
    """Copies some rows of a model's output in the forward pass, so that nothing has to hold the output itself.

    An output of up to 65,536 elements is copied whole. Of a larger one it takes as many, and up to eight whole rows of
    wide ones, in at most 1 MiB or 1 % of the output; the classes of more rows are then read from the gradient alone.

    Attributes:
        shape: of the output.
        num_bytes: that are copied.

    >>> y = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0]], requires_grad=True)
    >>> torch.nn.functional.cross_entropy(y, torch.tensor([0, 1])).backward()
    >>> loss = OutputSample(y.detach()).loss_of(y.grad)
    >>> loss.kind, loss.targets.tolist()
    ('cross-entropy', [0.0, 1.0])
    """

    def __init__(self, output: torch.Tensor) -> None:
        self.shape = output.shape
        self._samples = [(rows, rows.take(output), self._reach(rows)) for rows in _sampled(output)]
        self.num_bytes = sum(values.nbytes for _, values, _ in self._samples)

    def _reach(self, rows: Rows) -> Rows:
        """Rows of the gradient that are read where the sample is not all."""
        none = Rows(rows.dim, 0, 2, 0)
        if rows.step == 1:
            return none
        most = _MAX_READ if rows.dim is None else max(1, min(_MAX_ROWS, _MAX_READ // self.shape[rows.dim]))
        reach = Rows.spread(self.shape, rows.dim, most)
        return reach if reach.num > 2 * min(rows.num, _MAX_ROWS) else none

    def loss_of(self, gradient: torch.Tensor) -> Loss:
        """What the gradient, of the output's shape and any scale, says of the loss.

        Cost: 20 us for 640 elements, a few ms at most; the reference needs ten float64 copies of the sample.
        """
        told = None
        if cpu.kind_of_loss is not None:
            samples = [
                (values, -1 if rows.dim is None else rows.dim, *rows[1:3], *reach[1:])
                for rows, values, reach in self._samples
            ]
            told = cpu.kind_of_loss(samples, gradient, torch.get_num_threads())
        if told is None:
            return self._by_reference(gradient)
        kind, targets, places, num_rows, is_sampled, mean_squared, *numbers = told
        found = array("d", targets) if targets else None
        return Loss(_KINDS[kind], found, array("d", places), num_rows, is_sampled, mean_squared, tuple(numbers))

    def _by_reference(self, gradient: torch.Tensor) -> Loss:
        gradients = [rows.take(gradient).double() for rows, _, _ in self._samples]
        outputs = [values.double() for _, values, _ in self._samples]
        if not gradients[0].any():
            return Loss("" if any(part.any() for part in self._samples[0][2].parts(gradient)) else "zero")
        if not all(bool(x.isfinite().all()) for x in (*gradients, *outputs)):
            return Loss("")
        tolerance = max(_TOLERANCE.get(x.dtype, _USUAL_TOLERANCE) for x in (self._samples[0][1], gradient))
        for y, g, (rows, _, reach) in zip(outputs, gradients, self._samples):
            found = None if rows.dim is None else _of_classes(y[:_MAX_ROWS], g[:_MAX_ROWS], tolerance)
            if found is not None:
                kind, classes, is_least = found
                used = g[:_MAX_ROWS].abs().amax(1) > 0
                if reach.num and is_least:
                    rows, parts = reach, [_least(part) for part in reach.parts(gradient)]
                    classes, used = (torch.cat(some) for some in zip(*parts))
                places = rows.start + rows.step * used.nonzero().flatten()
                num_rows = gradient.numel() // y.shape[1]
                return Loss(kind, _as_array(classes), _as_array(places), num_rows, rows.step > 1)
        return self._of_elements(outputs[0].flatten(), gradients[0].flatten(), gradient, tolerance)

    def _of_elements(self, y: torch.Tensor, g: torch.Tensor, gradient: torch.Tensor, tolerance: float) -> Loss:
        num, is_sampled = gradient.numel(), self._samples[0][0].step > 1
        y, g = y[:_MAX_ELEMENTS], g[:_MAX_ELEMENTS]
        if len(g[g != 0.0].unique()) == 1:  # of a sum or a mean of the output
            return Loss("")
        pairs = _of_pairs(y, g, tolerance)
        if pairs is not None:
            return Loss(pairs[0], _as_array(pairs[1]), None, num, is_sampled)
        size = g.abs()
        if bool((size[size > 0] - size.max()).abs().max() <= tolerance * size.max()):
            return Loss("absolute error")
        x = y - g * (num / 2.0)
        ends = (x.abs() < 1e-3) | ((x - 1.0).abs() < 1e-3)
        numbers = tuple(map(float, (x.min(), x.max(), x.mean(), x.std(correction=0), ends.double().mean())))
        mean_squared = _sum_of_squares(gradient) * num / 4.0
        return Loss("squared error", _as_array(x), None, num, is_sampled, mean_squared, numbers)


def _as_array(x: torch.Tensor) -> array[float]:
    return array("d", x.tolist())


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


def _least(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The classes of rows of a gradient, where it is the least that tells, and which rows have one."""
    size = g.abs().amax(1)
    used = (size > 0) & size.isfinite()
    return g[used].argmin(1), used


def _sum_of_squares(x: torch.Tensor) -> float:
    if x.numel() > _MAX_SUMMED:
        return math.nan
    return math.fsum(float(part.square().sum()) for part in Rows(None, 0, 1, x.numel()).parts(x))


def _of_classes(y: torch.Tensor, g: torch.Tensor, tolerance: float) -> tuple[str, torch.Tensor, bool] | None:
    """The kind, the classes, and whether these are where the gradient is least."""
    used = g.abs().amax(1) > 0  # padding has no gradient
    y, g = y[used], g[used]
    if not len(y):
        return None
    num_negative = (g < 0).sum(1)
    largest = g.abs().amax(1, keepdim=True)
    classes = g.argmin(1)
    if bool(((g.abs() > 1e-12 * largest).sum(1) == 1).all()) and bool((num_negative == 1).all()):
        at = classes[:, None]
        scales = -(g.gather(1, at) * y.gather(1, at)).flatten()
        if _is_constant(scales, tolerance) and bool((scales > 0).all()) and len(scales) > 1:
            return LOG_OF_OUTPUT, classes, True
        return (LIKELIHOOD, classes, True) if _is_constant(g.gather(1, at).flatten(), tolerance) else None
    is_balanced = g.sum(1).abs() <= tolerance * largest.flatten()
    if float((~is_balanced).double().mean()) > _ALL_BUT:
        return None
    p = torch.softmax(y, 1)
    # A target that is more than sure already is pushed back: then the labels are what a usual scale leaves of p.
    for chosen in (classes, (p - g * len(g)).argmax(1), (p - g).argmax(1)):
        if _is_smoothed(g, p, chosen, tolerance):
            return SMOOTHED, chosen, chosen is classes
    if float((num_negative != 1).double().mean()) > _ALL_BUT:
        return None
    away = p - torch.nn.functional.one_hot(classes, y.shape[1]).double()
    scale = (g * away).sum(1, keepdim=True) / away.square().sum(1, keepdim=True)
    return ("cross-entropy", classes, True) if _fit(g, scale * away, 10 * tolerance) else None


def _is_smoothed(g: torch.Tensor, p: torch.Tensor, classes: torch.Tensor, tolerance: float) -> bool:
    """Whether labels of (1 - C e) one + e explain the gradient, and those of e = 0 do not.

    With p - one = away, it is then a multiple of away + e (C one - 1).
    """
    num_classes = g.shape[1]
    one = torch.nn.functional.one_hot(classes, num_classes).double()
    away, spread = p - one, num_classes * one - 1.0
    plain = float((g * away).sum() / away.square().sum()) * away
    left = float((g - plain).norm() / g.norm())
    if left < 0.25 * tolerance:
        return False
    a, b, c = float(away.square().sum()), float((away * spread).sum()), float(spread.square().sum())
    x, y = float((g * away).sum()), float((g * spread).sum())
    determinant = a * c - b * b
    if determinant <= 1e-9 * a * c:
        return False
    scale, share = (c * x - b * y) / determinant, (a * y - b * x) / determinant
    if scale <= 0.0 or not _LEAST_SMOOTHING < share / scale * num_classes < 0.5:
        return False
    smoothed = scale * away + share * spread
    return float((g - smoothed).norm() / g.norm()) < 0.5 * left and _fit(g, smoothed, 10 * tolerance)


def _fit(g: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether all but one in a hundred rows of `g` are as expected, to within a share of their largest."""
    fits = (g - expected).abs().amax(1) <= tolerance * g.abs().amax(1)
    return float((~fits).double().mean()) <= _ALL_BUT


def _of_pairs(y: torch.Tensor, g: torch.Tensor, tolerance: float) -> tuple[str, torch.Tensor] | None:
    if len(y) < 4:
        return None
    is_one = g < 0
    p = torch.sigmoid(y)
    if _is_constant(torch.where(is_one, -g / (1 - p).clamp_min(1e-12), g / p.clamp_min(1e-12)), tolerance):
        return WITH_LOGITS, is_one.long()
    if bool(((y >= 0) & (y <= 1)).all()) and _is_constant(torch.where(is_one, -g * y, g * (1 - y)), tolerance):
        return BINARY, is_one.long()
    return None


def _is_constant(x: torch.Tensor, tolerance: float) -> bool:
    """Whether all but one in a hundred of `x` are their median, to within rounding."""
    middle = float(x.median())
    if middle == 0.0 or not math.isfinite(middle):
        return False
    off = (x / middle - 1.0).abs() > 10 * tolerance
    return float(off.double().mean()) <= _ALL_BUT
