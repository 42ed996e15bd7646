"""Dead and saturated units: in one batch, and for how many batches in a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ... import kernels
from ...records.samples import CHANNEL_COLUMNS

NUM_NAMED = 32  # indices that a record names
SUM_ABS = CHANNEL_COLUMNS.index("sum_abs")


def as_table(units: bytes) -> torch.Tensor:
    """The units of a reading, [C, CHANNEL_COLUMNS]."""
    return torch.frombuffer(bytearray(units), dtype=torch.float64).view(-1, len(CHANNEL_COLUMNS))


class UnitVerdict(NamedTuple):
    """Of one module: units, dead and saturated ones, their first indices, and the number of batches in the window."""

    num_units: int = 0
    num_dead_units: int = 0
    num_saturated_units: int = 0
    dead_units: tuple[int, ...] = ()
    saturated_units: tuple[int, ...] = ()
    num_batches: int = 1


class UnitRuns:
    """Counts the batches in a row in which a `share` of a unit's elements was dead, or saturated, for all units.

    The unit is dead or saturated if the count reaches the window, or the number of batches if that is less.
    """

    def __init__(self, window: int, share: float) -> None:
        self._window, self._share = window, share
        self._runs: dict[str, tuple[torch.Tensor | None, int]] = {}  # int32 [C, 2], and the number of batches

    def add(self, key: str, table: torch.Tensor, elements: float, share: float | None = None) -> UnitVerdict:
        """Adds a sampled step of a module: sums of CHANNEL_COLUMNS, [C, 4], over so many `elements` of each unit."""
        size, (runs, num) = table.shape[0], self._runs.get(key, (None, 0))
        if runs is None or runs.shape[0] != size:  # other units than before
            runs, num = torch.zeros(size, 2, dtype=torch.int32, device="cpu"), 0
        runs, num = (runs + 1) * (table[:, :2] >= elements * (share or self._share)), min(num + 1, self._window)
        self._runs[key] = runs, num
        flags = runs >= num
        dead, saturated = flags.sum(0).tolist()
        return UnitVerdict(size, dead, saturated, _first(flags, 0, dead), _first(flags, 1, saturated), num)


def _first(flags: torch.Tensor, column: int, count: int) -> tuple[int, ...]:
    return tuple(flags[:, column].nonzero()[:NUM_NAMED, 0].tolist()) if count else ()


def detect_dead_neurons(activations: Any, threshold: float = 0.01) -> tuple[int, float]:
    """The number of neurons with a mean |activation| over the batch below `threshold`, and their share.

    Equivalent to: `dead = activations.abs().mean(0) < threshold; return dead.sum(), dead.mean()`.

    Args:
        activations: [batch, ...] tensor or ndarray of floating-point numbers; each index of the other dimensions is a
            neuron.
        threshold: a neuron with NaN or Inf is not dead; nor is one of an empty batch.

    Raises:
        UnsupportedTensorError: integers, bools, complex numbers, tensors without data.
        ValueError: no batch dimension.

    Cost: one read of every element; one sync elsewhere than on a CPU.

    >>> import torch
    >>> detect_dead_neurons(torch.tensor([[0.0, 1.0], [0.01, -1.0]]))
    (1, 0.5)
    """
    x = kernels.tensors.as_tensor(activations)
    if x.ndim < 1:
        raise ValueError("`activations` must have a batch dimension, got a scalar")
    stats = kernels.channel_stats(x.reshape(x.shape[0], x[:1].numel() if len(x) else 0), 1)
    num = stats.num_channels
    dead = sum(mean < threshold and not bad for mean, bad in zip(stats.mean_abs, stats.num_nonfinite, strict=True))
    return dead, dead / num if num else 0.0
