"""The forward passes of a run that were looked at, and how gradients turned from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from ..stats import strict_json, values
from ..stats.batches import BatchSample
from ..stats.part import Kind, Part

NUM_FIRST = 8
NUM_BATCHES = 256
NUM_COSINES = 256


class GradientCosine(NamedTuple):
    """The cosine between the gradient of a step and that of the step before, on a sample of their elements."""

    step: int
    cosine: float


class SampledBatch(NamedTuple):
    """One forward pass, and the step with whose record it came."""

    step: int
    batch: BatchSample


def _read(plain: Any) -> SampledBatch:
    if len(values.row(plain)) != 2:
        raise values.MisfitError(f"must be a step and a batch, got {len(plain)} entries")
    return SampledBatch(values.at(0, values.whole, plain[0]), values.at(1, BatchSample.from_dict, plain[1]))


def _encode(batches: Iterable[SampledBatch]) -> list[Any]:
    return [[step, strict_json.encode(batch.to_dict())] for step, batch in batches]


_BATCHES = Kind(_encode, lambda plain, now: deque(values.each(_read, plain), now.maxlen))


class SampledBatches(Part):
    """Pairs of a step and a `BatchSample`, oldest first: the first eight for good, and the newest; at most 256.

    >>> batches = SampledBatches()
    >>> len(batches), list(batches)
    (0, [])
    """

    __slots__ = ("_first", "_newest")
    _fields: ClassVar = dict.fromkeys(("_first", "_newest"), _BATCHES)

    def __init__(self) -> None:
        self._first: deque[SampledBatch] = deque(maxlen=NUM_FIRST)
        self._newest: deque[SampledBatch] = deque(maxlen=NUM_BATCHES - NUM_FIRST)

    def add(self, step: int, batches: Iterable[BatchSample]) -> None:
        """Takes what came with the record of a step."""
        for batch in batches:
            (self._first if len(self._first) < NUM_FIRST else self._newest).append(SampledBatch(step, batch))

    def __iter__(self) -> Iterator[SampledBatch]:
        return chain(self._first, self._newest)

    def __len__(self) -> int:
        return len(self._first) + len(self._newest)

    def __getitem__(self, index: int) -> SampledBatch:
        return (*self._first, *self._newest)[index]
