"""Dead and saturated units: in one batch, and for how many batches in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import kernels
from ...records.samples import CHANNEL_COLUMNS

NUM_NAMED = 32  # indices that a record names
_WIDTH = len(CHANNEL_COLUMNS)
_SUM_ABS = CHANNEL_COLUMNS.index("sum_abs")


class UnitBatch(NamedTuple):
    """One module's units in one sampled step: sums of CHANNEL_COLUMNS (float64 bytes), and elements a unit.

    Attributes:
        share: as for `UnitRuns`, if a module has its own.
    """

    key: str
    table: bytes
    elements: int
    share: float | None = None

    @property
    def num_units(self) -> int:
        return len(self.table) // (8 * _WIDTH)

    def load(self) -> tuple[float, ...]:
        """Mean |x| of each unit; of a router, the share of the tokens."""
        return tuple(total / self.elements for total in memoryview(self.table).cast("d")[_SUM_ABS::_WIDTH])


class UnitVerdict(NamedTuple):
    """Of one module: units, dead and saturated ones, their first indices, and the number of batches in the window."""

    num_units: int
    num_dead: int
    num_saturated: int
    dead: tuple[int, ...]
    saturated: tuple[int, ...]
    num_batches: int


class UnitRuns:
    """Counts for each unit of each module the batches in a row in which nearly all its elements were dead, or
    saturated. The unit is dead or saturated if the count reaches the window, or the number of batches if that is less.

    Args:
        window: batches.
        share: of a unit's elements that must be near zero, or saturated, for its batch to count.
    """

    def __init__(self, window: int, share: float) -> None:
        self._window = window
        self._share = share
        self._runs: dict[str, torch.Tensor] = {}  # int32 [C, 2]
        self._seen: dict[str, int] = {}
        self._sizes: tuple[int, ...] = ()
        self._ends = self._owners = torch.empty(0, dtype=torch.int64, device="cpu")  # of the modules among all units

    def add(self, batches: Sequence[UnitBatch]) -> dict[str, UnitVerdict]:
        """Adds one sampled step. Cost: a dozen small torch operations, for any number of modules."""
        batches = [batch for batch in batches if batch.table and batch.elements]
        if not batches:
            return {}
        sizes = tuple(batch.num_units for batch in batches)
        if sizes != self._sizes:
            self._sizes, ends = sizes, torch.tensor((0, *sizes), device="cpu").cumsum(0)
            self._ends, self._owners = ends, torch.repeat_interleave(ends.diff())
        runs = torch.cat([self._runs_of(batch) for batch in batches])
        table = torch.frombuffer(bytearray().join(b.table for b in batches), dtype=torch.float64).view(-1, _WIDTH)
        elements = torch.tensor([batch.elements for batch in batches], dtype=torch.float64, device="cpu")
        shares = [self._share if batch.share is None else batch.share for batch in batches]
        needed = (elements * torch.tensor(shares, dtype=torch.float64, device="cpu"))[self._owners]
        runs = (runs + 1) * (table[:, :2] >= needed[:, None])
        lengths = [self._count(batch.key) for batch in batches]
        flags = runs >= torch.tensor(lengths, device="cpu")[self._owners, None]
        counts = torch.nn.functional.pad(flags.cumsum(0), (0, 0, 1, 0))[self._ends].diff(dim=0).tolist()
        verdicts = {}
        parts, flag_parts = runs.split(sizes), flags.split(sizes)
        for batch, part, flagged, (dead, saturated), length in zip(batches, parts, flag_parts, counts, lengths):
            self._runs[batch.key] = part
            verdicts[batch.key] = UnitVerdict(
                batch.num_units, dead, saturated, _first(flagged, 0, dead), _first(flagged, 1, saturated), length
            )
        return verdicts

    def _runs_of(self, batch: UnitBatch) -> torch.Tensor:
        runs = self._runs.get(batch.key)
        if runs is None or len(runs) != batch.num_units:  # other units than before
            self._seen[batch.key] = 0
            return torch.zeros(batch.num_units, 2, dtype=torch.int32, device="cpu")
        return runs

    def _count(self, key: str) -> int:
        self._seen[key] = min(self._seen.get(key, 0) + 1, self._window)
        return self._seen[key]


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
