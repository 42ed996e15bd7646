"""Bounded samples of the inputs and the output of a model, and how targets depend on inputs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.cpu import extension
from ..records.samples import BatchSample
from .tensors import can_be_read, inputs_of, leaves, some_of, strided

_MAX_ELEMENTS = 4096
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the sum of a row
_IN_HALVES = 2e-2
_MASKED = -1e3
_MAX_SAMPLES, _MAX_FEATURES = 64, 256
_MAX_WHOLE = 65536  # of an input that is compared with the targets as a whole
_LEAST_SAMPLES, _LEAST_BATCHES, _LEAST_EQUAL = 8, 6, 0.05


class Figures(NamedTuple):
    """Figures of a sample of one tensor; NaN if the sample has no such figure."""

    abs_max: float  # like the next four, of the finite elements
    mean: float
    std: float  # the population's
    min: float
    max: float
    num_nonfinite: int
    constant_share: float  # share of the columns that have one value
    spread: float  # mean over the finite columns of their standard deviations
    digest: int  # 63 bits of some of the elements and of the tensor's shape
    away_from_one: float  # the largest distance of the sum of a row from 1, if all elements are within [0, 1]


# The figures in a `BatchSample`, whose names there begin with "input_" and "output_".
_OF_INPUT = ("abs_max", "mean", "std", "num_nonfinite", "constant_share", "digest")
_OF_OUTPUT = ("abs_max", "min", "max", "mean", "std", "num_nonfinite", "spread")
_UNKNOWN = Figures._make([*[math.nan] * 5, 0, math.nan, math.nan, 0, math.nan])  # of an output without tensors


class Given(NamedTuple):
    """An input of a pass, with its figures if it holds floating-point numbers."""

    tensor: torch.Tensor
    figures: Figures | None


def sample_of(data: Sequence[Given], output: Any, training: bool, with_grad: bool) -> BatchSample | None:
    """Figures of the inputs, from `data_of`, and the output of one pass; None if no inputs can be read here."""
    given = [x for x in data if x.tensor.dim()] or list(data)  # a single number next to tensors is not data
    floating = [x for _, x in leaves(output) if x.is_floating_point() or x.is_complex()]
    returned = [x for x in floating if can_be_read(x)]
    if not given or len(floating) > len(returned) == 0:
        return None
    x, known = next((x for x in given if x.tensor.is_floating_point() or x.tensor.is_complex()), given[0])
    y = next((y for y in returned if y.dim()), returned[0] if returned else torch.empty(0))
    of_input, of_output = known or figures_of(x), figures_of(y) if returned else _UNKNOWN
    if of_input is None or of_output is None:
        return None
    figures: dict[str, Any] = {f"input_{name}": getattr(of_input, name) for name in _OF_INPUT}
    figures.update((f"output_{name}", getattr(of_output, name)) for name in _OF_OUTPUT)
    is_finite = not of_output.num_nonfinite
    return BatchSample(
        training=training,
        with_grad=with_grad,
        num_samples=given[0].tensor.shape[0] if given[0].tensor.dim() else 1,
        input_is_integer=not (x.is_floating_point() or x.is_complex()),
        output_width=y.shape[-1] if y.dim() > 1 else 1,
        output_is_unit=is_finite and of_output.min >= 0.0 and of_output.max <= 1.0,
        output_rows_sum_to_one=of_output.away_from_one <= _ROUNDING.get(y.dtype, _IN_HALVES),
        **figures,
    )


def data_of(args: Any, kwargs: dict[str, Any]) -> list[Given]:
    """The inputs of a pass that can be read here, without masks."""
    readable = [x for x in inputs_of(args, kwargs) if can_be_read(x)]
    data = [Given(x, figures_of(x) if x.is_floating_point() else None) for x in readable]
    return [x for x in data if not is_mask(*x)]


def is_mask(x: torch.Tensor, known: Figures | None = None) -> bool:
    """Whether `x`, whose figures may be `known`, holds 0 and one number below -1000, and so is added to scores."""
    if (known is not None and abs(known.max) > 0.0) or not x.is_floating_point() or not x.numel():
        return False  # most tensors
    values = strided(x.detach().as_subclass(torch.Tensor), _MAX_ELEMENTS).double()
    low, high = values.aminmax()
    return bool(high == 0.0 and low < _MASKED and ((values == low) | (values == high)).all())


def figures_of(x: torch.Tensor) -> Figures | None:
    """The figures of a tensor whose first dimension is that of the samples; None if it is empty or cannot be read.

    Cost: 30 us; it reads at most some 4096 elements, and 65,536 of a row that may add up to 1.
    """
    if extension is None:
        return None
    if type(x) is not torch.Tensor or x.is_complex():
        x = x.detach().as_subclass(torch.Tensor)
    found = extension.sample(x.conj() if x.is_conj() else x)  # not resolved, which would copy it
    return None if found is None else Figures._make(found)


class InputSample(NamedTuple):
    """A copy of an input of the model, or of some features of its first 64 samples."""

    values: torch.Tensor | None  # [n, features]; None if the input says nothing
    num_samples: int  # of the input
    is_whole: bool  # whether these are all values of the input


def sample_inputs(given: Sequence[torch.Tensor], most_bytes: int = 1 << 19) -> list[InputSample]:
    """Copies small inputs, and samples of large ones. Cost: at most `most_bytes`, or 128 KiB each."""
    return [_sample_of(x.detach(), most_bytes // len(given)) for x in given]


def _sample_of(x: torch.Tensor, most_bytes: int) -> InputSample:
    count = x.shape[0] if x.dim() else 0
    if count < _LEAST_SAMPLES or not x.numel() or x.is_complex():
        return InputSample(None, count, False)
    if x.numel() <= _MAX_WHOLE and x.nbytes <= most_bytes:
        return InputSample(x.clone(memory_format=torch.contiguous_format).view(count, -1), count, True)
    step = -(-(x.numel() // count) // _MAX_FEATURES)
    rows = some_of(x[:_MAX_SAMPLES], 1, step)
    return InputSample(rows.clone(memory_format=torch.contiguous_format), count, False)


class Dependence:
    """Sums the distance correlation of inputs and targets over batches. Cost: 10 to 100 us a batch and input.

    It is the bias-corrected one, times the root of n (n - 3) / 2: independent, it has mean 0 and standard deviation 1
    (Szekely and Rizzo 2013). Distances of inputs count as 1 - exp(-2 d) in units of their median, so that near pairs
    count most.
    """

    def __init__(self) -> None:
        self._found: list[list[float]] = []

    def add(
        self, given: Sequence[InputSample], targets: array[float], shape: Sequence[int], are_floating: bool = False
    ) -> float | None:
        """Adds a batch: inputs, targets of all rows, and the shape of the output. Returns the value that says most.

        By chance it is standard normal. None before six batches, or if it is not known which target belongs to which
        sample, or what an input means: integers that are rarely equal are names without a distance, and targets of
        sequences belong to places.
        """
        count, widths = shape[0], (1, shape[-1], shape[min(1, len(shape) - 1)])
        is_whole = any(len(targets) * width == math.prod(shape) for width in widths) and len(targets) % count == 0
        inputs = [x.values for x in given if x.values is not None and x.num_samples == count]
        if not is_whole or count < _LEAST_SAMPLES or not inputs or len(inputs) < len(given):
            return None
        counted = [x for x in inputs if not x.is_floating_point()]
        if counted and (len(targets) > count or min((x[1:] == x[:-1]).double().mean() for x in counted) < _LEAST_EQUAL):
            return None
        found = [extension.how_near(*_floats(x), targets, len(targets) // count, are_floating) for x in inputs]
        if all(one is not None and math.isfinite(one) for one in found):  # None if constant
            self._found = [now for now in self._found if len(now) == len(found)] + [found]
        num = len(self._found)
        return max(map(sum, zip(*self._found))) / math.sqrt(num) if num >= _LEAST_BATCHES else None


def how_it_follows(x: torch.Tensor, targets: array[float]) -> array[float]:
    """How closely each place of the inputs [n, features] follows the targets, from 0 to 1.

    With one target a sample, the absolute correlation of each feature with it. With several, and as many integer inputs
    or a multiple, the share of equal ones. Empty in all other cases.
    """
    each = len(targets) // max(1, len(x))
    if len(x) < _LEAST_SAMPLES or not each or len(targets) % len(x):
        return array("d")
    return array("d", extension.how_it_follows(*_floats(x), targets, each) or ())


def equal_at(x: torch.Tensor, targets: array[float], rows: array[float], num_rows: int) -> array[float]:
    """As `how_it_follows`, for targets of some of `num_rows` rows if each sample has several rows."""
    each, rest = divmod(num_rows, len(x))
    if rest or each < 2 or x.is_floating_point() or x.shape[1] % each or len(set(targets)) < 2:
        return array("d")
    at, y = torch.frombuffer(rows, dtype=torch.float64).long(), torch.frombuffer(targets, dtype=torch.float64)
    sample, place = at // each, at % each
    ways = x.view(len(x), -1, each)[sample, :, place], x.view(len(x), each, -1)[sample, place]
    return array("d", torch.cat([(way == y[:, None]).double().mean(0) for way in ways]).tolist())


def _floats(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """As numbers, and whether they were."""
    return (x, True) if x.is_floating_point() else (x.double(), False)
