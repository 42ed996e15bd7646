"""Whether the inputs of validation look like those of training, place by place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from .batch_sample import Given
from .tensors import some_of

_MAX_ROWS, _MAX_PLACES, _LEAST_PLACES = 64, 256, 16
_SMALL, _FEW_ROWS = 1 << 17, 16  # elements of an input; of larger ones, which may be in no cache, so many samples
_OF_MEAN, _LEAST, _MOST = 128, 32, 512  # samples in the mean; that are compared with it, on each side
_LEAST_BATCHES, _LOW = 3, 0.05


class InputLikeness:
    """Correlates samples with the mean of the first 128 training samples, over at most 256 places.

    Where inputs have a place for each thing, as centred pictures have, those of training are all somewhat like their
    mean, of whatever class they are and however they are shifted or flipped, and so are those of validation. Both are
    compared with one mean, which therefore may be rough.

    Cost: 0.1 ms for each batch; it keeps the newest 512 correlations of each side.
    """

    def __init__(self) -> None:
        self.awaits_validation = False  # batches of it could be compared, and more would say more
        self._shape: Sequence[int] | None = None  # of a sample; empty if it varied
        self._mean: Any = 0.0
        self._num_in_mean = self._num_batches = 0
        self._training, self._validation = deque[float](maxlen=_MOST), deque[float](maxlen=_MOST)

    def add(self, data: Sequence[Given], is_training: bool) -> None:
        """Takes the inputs of a pass: of validation only those that are awaited, each once."""
        x, figures = next((x for x in data if x.figures and x.tensor.dim() > 1), (None, None))
        if x is None or figures is None or figures.num_nonfinite:
            return
        self._shape = x.shape[1:] if self._shape in (None, x.shape[1:]) else ()
        num_features = math.prod(self._shape)
        if num_features < _LEAST_PLACES:
            return
        rows = _spread(x.detach().as_subclass(torch.Tensor), num_features)
        rows = rows - rows.mean(1, keepdim=True)
        if self._num_in_mean < _OF_MEAN:
            self._mean = rows.sum(0) + self._mean
            self._num_in_mean += len(rows)
            return
        self._num_batches += is_training
        found = (rows * self._mean).sum(1) / (rows.norm(dim=1) * self._mean.norm())  # no matmul, which autocast rounds
        known = self._training if is_training else self._validation
        known.extend(value for value in found.tolist() if math.isfinite(value))
        self.awaits_validation = len(self._validation) < _MOST

    def facts(self) -> dict[str, Any]:
        if min(len(self._training), len(self._validation)) < _LEAST or self._num_batches < _LEAST_BATCHES:
            return {}
        training, validation = sorted(self._training), sorted(self._validation)
        low = training[int(_LOW * len(training))]
        below = sum(value < low for value in validation) / len(validation)
        medians = training[len(training) // 2], validation[len(validation) // 2]
        return {"input_likeness": [*medians, low, below, len(validation)] if self._shape else []}


def _spread(x: torch.Tensor, num_features: int) -> torch.Tensor:
    """At most 64 samples at 256 places, or 16 of a large input, both spread evenly, [n, places]."""
    each, step = -(-len(x) // (_MAX_ROWS if x.numel() <= _SMALL else _FEW_ROWS)), -(-num_features // _MAX_PLACES)
    while step > 1 and math.gcd(step, x.shape[-1]) > 1:
        step += 1
    return some_of(x, each, step).float()
