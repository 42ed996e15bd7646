"""Inputs and outputs of the model in sampled forward passes. Needs no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from .codec import Part, Plain

NUM_FIRST = 8
NUM_BATCHES = 256
NUM_COSINES = 256


@dataclass(frozen=True, slots=True)
class BatchSample(Plain):
    """One forward pass of the whole model: its first floating-point input, or else its first tensor, and its first
    output, preferably one that is not a scalar.

    All figures describe a strided sample of at most 4096 elements of each, without NaN and Inf. An undefined figure,
    such as the spread of a batch of one, is NaN.

    Attributes:
        training, with_grad: whether the model was in training mode; whether autograd was on.
        num_samples: leading dimension of the first tensor among the inputs.
        input_abs_max, input_mean, input_std: of the input; the population's standard deviation.
        input_num_nonfinite: NaN and Inf among the sampled elements.
        input_is_integer: whether it has integers or booleans: tokens, labels, bytes.
        input_constant_share: share of the features that are the same in all samples.
        input_digest: a hash of the sampled elements in 63 bits. Equal batches have equal digests.
        output_abs_max, output_min, output_max, output_mean, output_std, output_num_nonfinite: of the output.
        output_width: its last dimension; 1 if it has fewer than two.
        output_spread: mean over features of the standard deviation over samples; 0 if all samples get the same output.
        output_is_unit: whether all of it is within [0, 1].
        output_rows_sum_to_one: whether it adds up to 1 along the last dimension, which has more than one element.
    """

    training: bool
    with_grad: bool
    num_samples: int
    input_abs_max: float
    input_mean: float
    input_std: float
    input_num_nonfinite: int
    input_is_integer: bool
    input_constant_share: float
    input_digest: int
    output_abs_max: float
    output_min: float
    output_max: float
    output_mean: float
    output_std: float
    output_num_nonfinite: int
    output_width: int
    output_spread: float
    output_is_unit: bool
    output_rows_sum_to_one: bool


class GradientCosine(NamedTuple):
    """The cosine between the gradient of a step and that of the step before, on a sample of their elements."""

    step: int
    cosine: float


class SampledBatch(NamedTuple):
    """One forward pass, and the step whose record had it."""

    step: int
    batch: BatchSample


class SampledBatches(Part):
    """At most 256 pairs of a step and a `BatchSample`, oldest first: the first eight and the newest.

    >>> batches = SampledBatches()
    >>> len(batches), list(batches)
    (0, [])
    """

    __slots__ = ("_first", "_newest")
    _first: deque[SampledBatch]
    _newest: deque[SampledBatch]

    def __init__(self) -> None:
        self._first = deque(maxlen=NUM_FIRST)
        self._newest = deque(maxlen=NUM_BATCHES - NUM_FIRST)

    def add(self, step: int, batches: Iterable[BatchSample]) -> None:
        """Takes the forward passes in the record of a step."""
        for batch in batches:
            (self._first if len(self._first) < NUM_FIRST else self._newest).append(SampledBatch(step, batch))

    def __iter__(self) -> Iterator[SampledBatch]:
        return chain(self._first, self._newest)

    def __len__(self) -> int:
        return len(self._first) + len(self._newest)

    def __getitem__(self, index: int) -> SampledBatch:
        return (*self._first, *self._newest)[index]
