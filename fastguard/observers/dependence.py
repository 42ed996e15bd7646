"""How targets depend on inputs in a batch: one place of the inputs follows them, or near inputs have near targets."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..kernels.cpu import extension

_MAX_SAMPLES, _MAX_FEATURES = 64, 256
_MAX_ELEMENTS = 65536  # of an input that is compared with the targets as a whole
_LEAST_SAMPLES, _LEAST_BATCHES, _LEAST_EQUAL = 8, 6, 0.05


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
    if x.numel() <= _MAX_ELEMENTS and x.nbytes <= most_bytes:
        return InputSample(x.clone(memory_format=torch.contiguous_format).view(count, -1), count, True)
    rows, num_features = x[:_MAX_SAMPLES].unsqueeze(-1), x.numel() // count
    step = -(-num_features // _MAX_FEATURES)
    if rows.is_contiguous():
        return InputSample(rows.view(len(rows), -1)[:, ::step].clone(), count, False)
    places = torch.unravel_index(torch.arange(0, num_features, step, device=x.device), rows.shape[1:])
    return InputSample(rows.movedim(0, -1)[places].T.contiguous(), count, False)


class Dependence:
    """Sums `how_near` over batches, for each input by itself. Cost: 10 to 100 us a batch and input."""

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
        found = [how_near(x, targets, len(targets) // count, are_floating) for x in inputs]
        if all(map(math.isfinite, found)):
            self._found = [now for now in self._found if len(now) == len(found)] + [found]
        num = len(self._found)
        return max(map(sum, zip(*self._found))) / math.sqrt(num) if num >= _LEAST_BATCHES else None


def how_near(x: torch.Tensor, targets: array[float], each: int, are_floating: bool) -> float:
    """The bias-corrected distance correlation of inputs and targets, times the root of n (n - 3) / 2; NaN if constant.

    If they are independent, it has mean 0 and standard deviation 1 (Szekely and Rizzo 2013). Distances of inputs count
    as 1 - exp(-2 d) in units of their median, so that near pairs count most. Each sample has `each` targets.
    """
    found = extension.how_near(*_floats(x), targets, each, are_floating)
    return math.nan if found is None else found


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
