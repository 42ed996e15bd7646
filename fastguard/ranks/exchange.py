"""Measures the local parts of sharded tensors in one pass, and gathers or reduces a few numbers of each rank."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import kernels
from ..kernels import cpu
from ..kernels.registry import CPU_NAMES
from ..records.columns import COLUMNS, INDEX, TABLE, norm_of, norm_parts
from . import shards

NUM_COLUMNS = len(COLUMNS)
_ADDED = tuple(i for i, column in enumerate(TABLE) if column.fold == "add")
_COUNTS = tuple(i for i, column in enumerate(TABLE) if column.is_count)
_SUM, _DEVIATIONS, _NORM = (INDEX[name] for name in ("sum", "sum_sq_dev", "finite_norm"))
_MAX, _LEAST, _NUMEL = INDEX["abs_max"], INDEX["abs_min_nonzero"], INDEX["numel"]
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_CPU = torch.device("cpu")
_NANS, _INFS = INDEX["num_nans"], INDEX["num_infs"]


def divided(table: bytearray, replication: torch.Tensor) -> bytearray:
    """Rows divided by the number of ranks that hold the same tensor: `replication`, float64, [T, 1] or [1, 1]."""
    if not table:
        return table
    whole = torch.frombuffer(table, dtype=torch.float64).view(-1, NUM_COLUMNS)
    rows = whole / replication
    rows[:, [_MAX, _LEAST]] = whole[:, [_MAX, _LEAST]]
    rows[:, _NORM] = whole[:, _NORM] / replication[:, 0].sqrt()
    return bytes_of(rows)


def bytes_of(rows: torch.Tensor) -> bytearray:
    """A table as bytes of float64."""
    copied = bytearray(8 * rows.numel())
    if copied:
        torch.frombuffer(copied, dtype=torch.float64).view(rows.shape).copy_(rows)
    return copied


def counted(row: Sequence[float]) -> tuple[float, ...]:
    """Rounds the counts of a row after shares of them were added."""
    return tuple(float(round(value)) if i in _COUNTS else value for i, value in enumerate(row))


class Wire:
    """Collectives over some groups, one after the other; each rank gets the same bits.

    It gathers rows and folds them in the order of the ranks. It reduces tables: an all-reduce gives the same result on
    all ranks.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = list(groups)
        sizes = [dist.get_world_size(group) for group in groups]
        self.num_ranks = math.prod(sizes)  # of all groups together
        # num_collectives, num_bytes: sent by this rank
        self.num_collectives = self.num_bytes = 0

    def join(
        self, row: Sequence[float], compared: Sequence[float] = (), added: Sequence[float] = ()
    ) -> tuple[Sequence[float], list[list[float]], list[float]]:
        """The fold of the rows of all ranks, what was seen of each of `compared`, and the sums of `added`."""
        seen: list[list[float]] = [[] for _ in compared]
        for group in self.groups:
            own = torch.tensor([*row, *compared, *added], dtype=torch.float64, device=device_of(group))
            found = own.new_empty(group.size() * len(own))
            self._count(8 * len(own))
            _gather(found, own, group=group)
            everyone = found.view(group.size(), -1)
            row = kernels.fold_rows(bytes_of(everyone[:, :NUM_COLUMNS]))  # in the order of the ranks
            heads = [*zip(*everyone[:, NUM_COLUMNS:].tolist())]
            for values, head in zip(seen, heads):
                values += head
            added = [sum(head) for head in heads[len(compared) :]]
        return row, seen, list(added)

    def tell(self, said: list[Any]) -> list[Any]:
        """The lists of all ranks as one, in the order of the ranks. It pickles them: for rare events only."""
        for group in self.groups:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, said, group=group)
            self._count(len(repr(found)) // len(found))
            said = [one for part in found for one in part]
        return said

    def reduced(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of whole tensors, from the shares of each rank (float64, [T, columns]): two reductions a group."""
        largest = torch.stack(
            [rows[:, _MAX], torch.where(rows[:, _LEAST] > 0.0, -rows[:, _LEAST], -torch.inf), rows[:, _NORM]], dim=1
        )
        largest = self._reduced(largest, dist.ReduceOp.MAX)
        scale = largest[:, 2].clamp_min(torch.finfo(torch.float64).tiny)
        count = rows[:, _NUMEL] - rows[:, _NANS] - rows[:, _INFS]
        own_mean = torch.where(count > 0.0, rows[:, _SUM] / count.clamp_min(1e-300), 0.0)
        shares = [rows[:, i] for i in _ADDED]
        parts = [*shares, rows[:, _DEVIATIONS], count * own_mean * own_mean, (rows[:, _NORM] / scale).square()]
        summed = self._reduced(torch.stack(parts, dim=1), dist.ReduceOp.SUM)
        whole = torch.zeros_like(rows)
        for place, i in enumerate(_ADDED):
            whole[:, i] = summed[:, place].round() if i in _COUNTS else summed[:, place]
        whole[:, _MAX] = largest[:, 0]
        whole[:, _LEAST] = torch.where(largest[:, 1] > -torch.inf, -largest[:, 1], 0.0)
        count = whole[:, _NUMEL] - whole[:, _NANS] - whole[:, _INFS]
        between = summed[:, -2] - whole[:, _SUM].square() / count.clamp_min(1.0)
        whole[:, _DEVIATIONS] = (summed[:, -3] + between.clamp_min(0.0)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        whole[:, _NORM] = scale * summed[:, -1].sqrt()
        return whole

    def _reduced(self, rows: torch.Tensor, how: Any) -> torch.Tensor:
        for _ in self.groups:
            self._count(8 * rows.numel())
        return all_reduced(rows, self.groups, how)

    def _count(self, num_bytes: int) -> None:
        self.num_collectives += 1
        self.num_bytes += num_bytes


def all_reduced(words: torch.Tensor, groups: Sequence[dist.ProcessGroup], how: Any) -> torch.Tensor:
    """`words`, on the CPU, reduced over one group after the other."""
    for group in groups:
        sent = words.contiguous().to(device_of(group))
        dist.all_reduce(sent, op=how, group=group)
        words = sent.cpu()
    return words


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device for collectives of a group: the CPU, or its current device if it has no backend for the CPU."""
    known = dist.get_backend_config(group) if hasattr(dist, "get_backend_config") else dist.get_backend(group)
    if "gloo" in str(known) or "mpi" in str(known):
        return _CPU
    kind = "cuda" if "nccl" in str(known) else torch._C._get_accelerator().type
    return torch.device(kind, torch.accelerator.current_device_index() if kind != "cpu" else 0)


class Pieces(NamedTuple):
    """The local parts of some tensors."""

    table: bytearray  # a row for each part
    total: tuple[float, ...]  # their fold
    present: list[int] | None  # positions of the gradients that exist; None for all
    fingerprint: int  # of the parameters
    dtypes: frozenset[torch.dtype]  # of the tensors
    local: list[torch.Tensor]  # the parts
    num_shards: float | torch.Tensor  # number of parts of each tensor over the ranks: one number, or float64 [T, 1]
    layouts: list[shards.ShardLayout]  # of the sharded tensors, and of parameters without a gradient here

    @property
    def mesh(self) -> Any:
        """The mesh of one of the tensors; None if all are plain."""
        return self.layouts[0].mesh if self.layouts else None

    def replication(self, num_ranks: int) -> torch.Tensor | None:
        """Number of ranks with the same part, of `num_ranks`: float64, [T, 1] or [1, 1]; None if it is always one."""
        if not isinstance(self.num_shards, torch.Tensor) and self.num_shards == num_ranks:
            return None  # the usual case, quickly found
        times = num_ranks / torch.as_tensor(self.num_shards, dtype=torch.float64, device="cpu").view(-1, 1)
        return None if bool((times == 1.0).all()) else times


class PieceReader:
    """Measures the local parts of tensors, and remembers the kinds of sharding of the last call."""

    def __init__(self) -> None:
        self._plan = None if cpu.ShardPlan is None else cpu.ShardPlan()
        self._layouts: dict[int, tuple[Any, shards.ShardLayout]] = {}

    def quick(self, what: str, held: list[Any], backend: str, *inverse: float) -> Pieces | None:
        """Measures "tensor"s, if not all are plain, or the "gradient"s of groups of parameters, times `inverse`.

        None if one must be prepared or summed first.
        """
        if self._plan is None or backend not in CPU_NAMES:
            return None
        result = getattr(self._plan, f"{what}_stats")(held, torch.get_num_threads(), *inverse)
        if result is None:
            return None
        table, total, present, fingerprint, dtypes, local, kinds, used = result
        known: dict[int, shards.ShardLayout] = {}
        for kind in (kind for kind in used if kind >= 0):
            how = self._plan.known[kind]
            if kind not in self._layouts or self._layouts[kind][0] is not how:  # numbers start again after many kinds
                self._layouts[kind] = how, shards.layout_of(*how)
            known[kind] = self._layouts[kind][1]
        if any(layout.is_partial for layout in known.values()):
            return None
        counts = {kind: known[kind].num_shards if kind >= 0 else 1 for kind in used}
        parts: float | torch.Tensor = max(counts.values(), default=1)
        if len({*counts.values()}) > 1:
            each = torch.zeros(max(counts) + 2, dtype=torch.float64, device="cpu")  # of -1 the last
            for kind, count in counts.items():
                each[kind] = count
            parts = each[torch.frombuffer(kinds, dtype=torch.int32).long()].unsqueeze(1)
        return Pieces(table, total, present, fingerprint, cpu.dtypes(dtypes), local, parts, [*known.values()])

    def gradients(self, groups: list[list[torch.Tensor]], backend: str, inverse: float) -> Pieces:
        """Measures the gradients of `groups`, times `inverse`. A collective sums Partial ones first."""
        found = self.quick("gradient", groups, backend, inverse)
        if found is not None:
            return found
        gradients, present, fingerprint = kernels.collect_gradients(groups)
        holders = [*gradients, *(p for group in groups for p in group)]
        return measured(gradients, holders, backend, inverse)._replace(present=present, fingerprint=fingerprint)


def measured(
    tensors: Sequence[torch.Tensor], holders: Sequence[torch.Tensor], backend: str, inverse: float = 1.0
) -> Pieces:
    """Measures the local parts of `tensors`, DTensors and plain ones, times `inverse`, on any device.

    The layouts of `holders` say which ranks take part. Cost: one read, and some microseconds a tensor.
    """
    wholes = [shards.whole(tensor) for tensor in tensors]
    local = shards.locals_of(wholes)
    table, total = kernels.run_stats(local, backend, inverse)
    counts = [shards.layout_of(*shards.laid_out(t)).num_shards for t in wholes]
    parts: float | torch.Tensor = max(counts, default=1)
    if len({*counts}) > 1:
        parts = torch.tensor(counts, dtype=torch.float64, device="cpu").unsqueeze(1)
    dtypes = frozenset(tensor.dtype for tensor in tensors)
    total = total or kernels.fold_rows(table)
    return Pieces(table, total, None, 0, dtypes, local, parts, shards.layouts_of(holders))


class _Readers(threading.local):
    """Readers of each thread, which remember its last call; they hold no tensor and no process group."""

    def __init__(self) -> None:
        self.gradients, self.tensors = PieceReader(), PieceReader()
        self.norms: dict[torch.dtype, Any] = {}  # how a norm lies on the mesh of the last call


_readers = _Readers()


def gradients_over_ranks(parameters: list[torch.Tensor], backend: str) -> Pieces | None:
    """The local parts of the gradients of `parameters`; None if none is sharded, or one must be prepared."""
    found = _readers.gradients.quick("gradient", [parameters], backend, 1.0)
    return found if found is not None and found.layouts and found.local else None


def tensors_over_ranks(tensors: list[torch.Tensor], backend: str) -> Pieces | None:
    """The local parts of `tensors`; None as above."""
    return _readers.tensors.quick("tensor", tensors, backend)


def norm_over_ranks(pieces: Pieces) -> float:
    """The 2-norm of the whole tensors, with the same bits on every rank if their copies are equal.

    Plain tensors must be the same on every rank. Cost: a gather of ten numbers a rank, over each dimension of the mesh
    that shards tensors, or over all ranks if these are all dimensions.
    """
    wire = Wire(shards.groups_across(pieces.layouts))
    row: Sequence[float] = pieces.total
    times = pieces.replication(wire.num_ranks)
    if times is not None:
        row = kernels.fold_rows(divided(pieces.table, times))
    return norm_of(*norm_parts(counted(wire.join(row)[0])))


def as_everywhere(norm: torch.Tensor, mesh: Any) -> torch.Tensor:
    """`norm` as a DTensor that every rank of `mesh` holds, as torch returns it."""
    from torch.distributed.tensor import DTensor, Replicate

    known = _readers.norms.get(norm.dtype)
    if known is None or known.mesh is not mesh:
        first: Any = DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
        _readers.norms[norm.dtype] = first._spec
        return first
    return DTensor(norm, known, requires_grad=False)  # as from_local does, without its checks
