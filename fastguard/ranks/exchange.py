"""Collectives: gathers or reduces a few numbers of each rank, and the table of tensors if needed."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels import fold_rows
from ..records.columns import COLUMNS, INDEX, TABLE

NUM_COLUMNS = len(COLUMNS)
MOST_GATHERED = 64  # ranks of a group; beyond, two reductions are cheaper than a gather
_ADDED = tuple(i for i, column in enumerate(TABLE) if column.fold == "add")
_COUNTS = tuple(i for i, column in enumerate(TABLE) if column.is_count)
_SUM, _SUM_SQ, _DEVIATIONS, _NORM = (INDEX[name] for name in ("sum", "sum_sq", "sum_sq_dev", "finite_norm"))
_MAX, _LEAST, _NUMEL = INDEX["abs_max"], INDEX["abs_min_nonzero"], INDEX["numel"]
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_CPU = torch.device("cpu")
_NANS, _INFS = INDEX["num_nans"], INDEX["num_infs"]


def divided(table: bytearray, replication: torch.Tensor) -> bytearray:
    """Rows divided by the number of ranks that hold the same tensor: `replication`, float64, [T, 1] or [1, 1]."""
    if not table:
        return table
    rows = torch.frombuffer(table, dtype=torch.float64).view(-1, NUM_COLUMNS) / replication
    whole = torch.frombuffer(table, dtype=torch.float64).view(-1, NUM_COLUMNS)
    rows[:, [_MAX, _LEAST]] = whole[:, [_MAX, _LEAST]]
    rows[:, _NORM] = whole[:, _NORM] / replication[:, 0].sqrt()
    return bytes_of(rows)


def bytes_of(rows: torch.Tensor) -> bytearray:
    """A table on the CPU as bytes of float64."""
    copied = bytearray(8 * rows.numel())
    if copied:
        torch.frombuffer(copied, dtype=torch.float64).view(rows.shape).copy_(rows)
    return copied


def counted(row: Sequence[float]) -> tuple[float, ...]:
    """Rounds the counts of a row after shares of them were added."""
    return tuple(float(round(value)) if i in _COUNTS else value for i, value in enumerate(row))


class Wire:
    """Collectives over some groups, one after the other; each rank gets the same bits.

    It gathers rows and folds them in the order of the ranks. It reduces tables, and rows in a group of more than
    `MOST_GATHERED` ranks: an all-reduce gives the same result on all ranks.

    Attributes:
        num_ranks: of all groups together.
        is_wide: whether a group is too large for a gather.
        num_collectives, num_bytes: sent by this rank.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = list(groups)
        sizes = [dist.get_world_size(group) for group in groups]
        self.num_ranks = math.prod(sizes)
        self.is_wide = max(sizes, default=1) > MOST_GATHERED
        self.num_collectives = self.num_bytes = 0

    def gather(self, words: Sequence[float], group: dist.ProcessGroup) -> list[list[float]]:
        """`words` of each rank of a group, in the order of the ranks."""
        own = torch.tensor(words, dtype=torch.float64, device=device_of(group))
        found = own.new_empty(group.size() * len(words))
        self._count(8 * len(words))
        _gather(found, own, group=group)
        everyone = found.tolist()
        return [everyone[i : i + len(words)] for i in range(0, len(everyone), len(words))]

    def tell(self, said: list[Any]) -> list[Any]:
        """The lists of all ranks as one, in the order of the ranks. It pickles them: for rare events only."""
        for group in self.groups:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, said, group=group)
            self._count(len(repr(found)) // len(found))
            said = [one for part in found for one in part]
        return said

    def table(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of whole tensors, from the shares of each rank (float64, [T, columns]): two reductions a group."""
        return self.reduced(rows)[0]

    def reduced(
        self, rows: torch.Tensor, compared: Sequence[float] = (), added: Sequence[float] = ()
    ) -> tuple[torch.Tensor, list[float], list[float], list[float]]:
        """`table`, together with the least and the largest of each of `compared`, and the sums of `added`."""
        largest = torch.stack(
            [rows[:, _MAX], torch.where(rows[:, _LEAST] > 0.0, -rows[:, _LEAST], -torch.inf), rows[:, _NORM]], dim=1
        )
        largest, ends = self._reduced(largest, [*compared, *(-one for one in compared)], dist.ReduceOp.MAX)
        scale = largest[:, 2].clamp_min(torch.finfo(torch.float64).tiny)
        count = rows[:, _NUMEL] - rows[:, _NANS] - rows[:, _INFS]
        own_mean = torch.where(count > 0.0, rows[:, _SUM] / count.clamp_min(1e-300), 0.0)
        shares = [rows[:, i] for i in _ADDED]
        parts = [*shares, rows[:, _DEVIATIONS], count * own_mean * own_mean, (rows[:, _NORM] / scale).square()]
        summed, sums = self._reduced(torch.stack(parts, dim=1), added, dist.ReduceOp.SUM)
        whole = torch.zeros_like(rows)
        for place, i in enumerate(_ADDED):
            whole[:, i] = summed[:, place].round() if i in _COUNTS else summed[:, place]
        whole[:, _MAX] = largest[:, 0]
        whole[:, _LEAST] = torch.where(largest[:, 1] > -torch.inf, -largest[:, 1], 0.0)
        count = whole[:, _NUMEL] - whole[:, _NANS] - whole[:, _INFS]
        between = summed[:, -2] - whole[:, _SUM].square() / count.clamp_min(1.0)
        whole[:, _DEVIATIONS] = (summed[:, -3] + between.clamp_min(0.0)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        whole[:, _NORM] = scale * summed[:, -1].sqrt()
        return whole, [-one for one in ends[len(compared) :]], ends[: len(compared)], sums

    def _reduced(self, rows: torch.Tensor, more: Sequence[float], how: Any) -> tuple[torch.Tensor, list[float]]:
        words = torch.cat([rows.flatten(), torch.tensor(more, dtype=torch.float64, device="cpu")]) if more else rows
        for group in self.groups:
            sent = words.contiguous().to(device_of(group))
            self._count(8 * words.numel())
            dist.all_reduce(sent, op=how, group=group)
            words = sent.cpu()
        if not more:
            return words, []
        return words[: rows.numel()].view(rows.shape), words[rows.numel() :].tolist()

    def _count(self, num_bytes: int) -> None:
        self.num_collectives += 1
        self.num_bytes += num_bytes


def fold(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Folds the rows of the ranks, in their order."""
    return fold_rows(bytearray(b"".join(struct.pack(f"{NUM_COLUMNS}d", *row) for row in rows)))


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device for collectives of a group: the CPU, or its current device if it has no backend for the CPU."""
    known = dist.get_backend_config(group) if hasattr(dist, "get_backend_config") else dist.get_backend(group)
    if "gloo" in str(known) or "mpi" in str(known):
        return _CPU
    kind = "cuda" if "nccl" in str(known) else torch._C._get_accelerator().type
    return torch.device(kind, torch.accelerator.current_device_index() if kind != "cpu" else 0)
