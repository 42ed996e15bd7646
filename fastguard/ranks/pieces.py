"""Measures the local parts of sharded tensors in one pass, and the norm of the whole ones, also without a guard."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import kernels
from ..kernels import cpu
from ..records.columns import ROW, norm_of, norm_parts
from . import shards
from .exchange import Wire, counted, divided, fold


class Pieces(NamedTuple):
    """The local parts of some tensors.

    Attributes:
        table: a row for each part.
        total: their fold.
        present: positions of the gradients that exist; None for all.
        fingerprint: of the parameters.
        dtypes: of the tensors.
        local: the parts.
        num_shards: number of parts of each tensor over the ranks: one number, or float64 [T, 1].
        layouts: of the sharded tensors, and of parameters without a gradient here.
    """

    table: bytearray
    total: tuple[float, ...]
    present: list[int] | None
    fingerprint: int
    dtypes: frozenset[torch.dtype]
    local: list[torch.Tensor]
    num_shards: float | torch.Tensor
    layouts: list[shards.ShardLayout]

    @property
    def mesh(self) -> Any:
        """The mesh of one of the tensors; None if all are plain."""
        return self.layouts[0].mesh if self.layouts else None

    def replication(self, num_ranks: int) -> torch.Tensor | None:
        """Number of ranks with the same part, of `num_ranks`: float64, [T, 1] or [1, 1]; None if it is always one."""
        if isinstance(self.num_shards, torch.Tensor):
            times = num_ranks / self.num_shards
            return None if bool((times == 1.0).all()) else times
        if self.num_shards == num_ranks:
            return None
        return torch.full((1, 1), num_ranks / self.num_shards, device="cpu").double()


class PieceReader:
    """Measures the local parts of tensors, and remembers the kinds of sharding of the last call.

    For parts in plain CPU memory the kernels find each part in the slot of its DTensor, 16 at a time, and know its kind
    by the identity of its description. They notice every change between calls.

    Cost: one read of the local parts; no Python code runs for tensors of the last call.
    """

    def __init__(self) -> None:
        self._plan = None if cpu.ShardPlan is None else cpu.ShardPlan()
        self._layouts: dict[int, tuple[Any, shards.ShardLayout]] = {}

    def quick_gradients(self, groups: list[list[torch.Tensor]], backend: str, inverse: float = 1.0) -> Pieces | None:
        """Measures the gradients of `groups`, times `inverse`; None if one must be prepared or summed first."""
        if self._plan is None or not kernels.takes_cpu(backend):
            return None
        return self._taken(self._plan.gradient_stats(groups, torch.get_num_threads(), inverse))

    def quick_tensors(self, tensors: list[torch.Tensor], backend: str) -> Pieces | None:
        """Measures `tensors`; None also if all are plain."""
        if self._plan is None or not kernels.takes_cpu(backend):
            return None
        return self._taken(self._plan.tensor_stats(tensors, torch.get_num_threads()))

    def gradients(self, groups: list[list[torch.Tensor]], backend: str, inverse: float) -> Pieces:
        """Measures the gradients of `groups`, times `inverse`. A collective sums Partial ones first."""
        found = self.quick_gradients(groups, backend, inverse)
        if found is not None:
            return found
        gradients, present, fingerprint = kernels.collect_gradients(groups)
        holders = [*gradients, *(p for group in groups for p in group)]
        return measured(gradients, holders, backend, inverse)._replace(present=present, fingerprint=fingerprint)

    def _taken(self, result: tuple[Any, ...] | None) -> Pieces | None:
        if result is None or self._plan is None:
            return None
        table, total, present, fingerprint, dtypes, local, kinds, used = result
        known = {kind: self._layout(kind) for kind in used if kind >= 0}
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

    def _layout(self, kind: int) -> shards.ShardLayout:
        """The layout of a kind of sharding, made at its first use."""
        known = self._plan.known[kind]  # type: ignore[union-attr]
        if kind not in self._layouts or self._layouts[kind][0] is not known:  # numbers start again after many kinds
            self._layouts[kind] = known, shards.layout_of(*known)
        return self._layouts[kind][1]


def measured(
    tensors: Sequence[torch.Tensor], holders: Sequence[torch.Tensor], backend: str, inverse: float = 1.0
) -> Pieces:
    """Measures the local parts of `tensors`, DTensors and plain ones, times `inverse`, on any device.

    Args:
        holders: DTensors whose layouts say which ranks take part.

    Cost: one read, and some microseconds a tensor.
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
    found = _readers.gradients.quick_gradients([parameters], backend)
    return found if found is not None and found.layouts and found.local else None


def tensors_over_ranks(tensors: list[torch.Tensor], backend: str) -> Pieces | None:
    """The local parts of `tensors`; None as above."""
    return _readers.tensors.quick_tensors(tensors, backend)


def norm_over_ranks(pieces: Pieces) -> float:
    """The 2-norm of the whole tensors, with the same bits on every rank if their copies are equal.

    Plain tensors must be the same on every rank. Cost: a gather of ten numbers a rank, over each dimension of the mesh
    that shards tensors, or over all ranks if these are all dimensions; among more than 64 ranks two reductions.
    """
    wire = Wire(shards.groups_across(pieces.layouts))
    row: Sequence[float] = pieces.total
    times = pieces.replication(wire.num_ranks)
    if times is not None and times.numel() == 1:
        row = ROW.unpack(divided(bytearray(ROW.pack(*row)), times))
    elif times is not None:
        row = kernels.fold_rows(divided(pieces.table, times))
    if wire.is_wide:
        row = wire.table(torch.tensor([row], dtype=torch.float64, device="cpu"))[0].tolist()
    for group in [] if wire.is_wide else wire.groups:
        row = fold(wire.gather(row, group))
    return norm_of(*norm_parts(counted(row)))


def as_everywhere(norm: torch.Tensor, mesh: Any) -> torch.Tensor:
    """`norm` as a DTensor that every rank of `mesh` holds, as torch returns it."""
    from torch.distributed.tensor import DTensor, Replicate

    known = _readers.norms.get(norm.dtype)
    if known is None or known.mesh is not mesh:
        first: Any = DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
        _readers.norms[norm.dtype] = first._spec
        return first
    return DTensor(norm, known, requires_grad=False)  # as from_local does, without its checks
